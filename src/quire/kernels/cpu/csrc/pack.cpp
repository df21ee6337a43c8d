// Stored blocks to the packed layout, once at load; and one row back, for embeddings.
#include <cmath>
#include <cstring>

#include "common.h"

namespace quire {

float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    float tiny = float(mantissa) * 5.9604644775390625e-08f;  // 2^-24
    std::memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (size < 0x38800000) {                       // below the smallest normal half
    float magnitude;
    std::memcpy(&magnitude, &size, 4);
    return sign | uint16_t(std::nearbyint(magnitude * 16777216.0f));
  }
  uint32_t rounded = size + 0xfff + (size >> 13 & 1) - 0x38000000;
  return sign | uint16_t(rounded >> 13);
}

namespace {

enum Kind { kQ4_0, kQ4_1, kQ8_0, kQ4_K, kF32, kQ5_0, kQ5_1, kQ5_K, kQ6_K };  // program.py says the same

struct Block {  // one row's 32 weights on their way
  uint8_t quants[kBlock];
  uint16_t scale, minimum;  // of a super-block: its factors
};

uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

void nibbles(const uint8_t* p, Block& out) {
  for (int i = 0; i < 16; i++) {
    out.quants[i] = p[i] & 15;
    out.quants[i + 16] = p[i] >> 4;
  }
}

void fifth_bits(const uint8_t* p, Block& out) {
  for (int i = 0; i < kBlock; i++) out.quants[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

// Block `sub` of 8 with 6-bit scales and minima; their products with the fp16 factors are rounded to fp16, which moves a
// weight by at most 2^-11 of itself, far below a 4-bit step.
void read_q4_k(const uint8_t* super, int sub, Block& out) {
  const uint8_t* s = super + 4;
  int scale = sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
  int minimum = sub < 4 ? s[sub + 4] & 63 : (s[sub + 4] >> 4) | (s[sub] >> 6) << 4;
  out.scale = float_to_half(half_to_float(read16(super)) * float(scale));
  out.minimum = float_to_half(-half_to_float(read16(super + 2)) * float(minimum));
  const uint8_t* q = super + 16 + sub / 2 * 32;
  for (int i = 0; i < kBlock; i++) out.quants[i] = sub % 2 ? q[i] >> 4 : q[i] & 15;
}

// [d dmin integers[12] qh[32] qs[128]]
void read_q5_k(const uint8_t* super, int sub, Block& out) {
  const uint8_t *qh = super + 16, *qs = super + 48 + sub / 2 * 32;
  for (int i = 0; i < kBlock; i++) out.quants[i] = (qs[i] >> sub % 2 * 4 & 15) | (qh[i] >> sub & 1) << 4;
  out.scale = read16(super);
  out.minimum = read16(super + 2);
}

// [ql[128] qh[64] integers[16] d], each half of the quants for itself; two's complement of 6 bits.
void read_q6_k(const uint8_t* super, int sub, Block& out) {
  const uint8_t *ql = super + sub / 4 * 64 + sub % 2 * 32, *qh = super + 128 + sub / 4 * 32;
  const int part = sub % 4;
  for (int i = 0; i < kBlock; i++)
    out.quants[i] = ((ql[i] >> part / 2 * 4 & 15) | (qh[i] >> part * 2 & 3) << 4) ^ 32;
  out.scale = read16(super + 208);
  out.minimum = 0;
}

void read_f32(const uint8_t* p, Block& out) {
  float x[kBlock], most = 0;
  std::memcpy(x, p, sizeof x);
  for (float v : x) most = v == v ? std::fmax(most, std::fabs(v)) : INFINITY;
  out.scale = float_to_half(most / 127);
  float scale = half_to_float(out.scale);  // quantise against the scale as it will be read
  float inverse = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < kBlock; i++) {
    float q = std::nearbyint(x[i] * inverse);
    out.quants[i] = uint8_t(int8_t(std::fmax(-127.f, std::fmin(127.f, q))));
  }
  out.minimum = 0;
}

void read_block(int kind, const uint8_t* row, int b, Block& out) {
  const uint8_t* p;
  switch (kind) {
    case kQ4_0:
      p = row + b * 18;
      out.scale = read16(p);
      out.minimum = float_to_half(-8 * half_to_float(out.scale));  // exact: a power of two
      return nibbles(p + 2, out);
    case kQ4_1:
      p = row + b * 20;
      out.scale = read16(p);
      out.minimum = read16(p + 2);
      return nibbles(p + 4, out);
    case kQ8_0:
      p = row + b * 34;
      out.scale = read16(p);
      std::memcpy(out.quants, p + 2, kBlock);
      return;
    case kQ4_K:
      return read_q4_k(row + b / 8 * 144, b % 8, out);
    case kQ5_0:
      p = row + b * 22;
      out.scale = read16(p);
      out.minimum = float_to_half(-16 * half_to_float(out.scale));  // exact: a power of two
      nibbles(p + 6, out);
      return fifth_bits(p + 2, out);
    case kQ5_1:
      p = row + b * 24;
      out.scale = read16(p);
      out.minimum = read16(p + 2);
      nibbles(p + 8, out);
      return fifth_bits(p + 4, out);
    case kQ5_K:
      return read_q5_k(row + b / 8 * 176, b % 8, out);
    case kQ6_K:
      return read_q6_k(row + b / 8 * 210, b % 8, out);
    default:
      return read_f32(row + b * 4 * kBlock, out);
  }
}

size_t row_bytes(int kind, int k) {
  switch (kind) {
    case kQ4_0: return size_t(k) / 32 * 18;
    case kQ4_1: return size_t(k) / 32 * 20;
    case kQ8_0: return size_t(k) / 32 * 34;
    case kQ4_K: return size_t(k) / 256 * 144;
    case kQ5_0: return size_t(k) / 32 * 22;
    case kQ5_1: return size_t(k) / 32 * 24;
    case kQ5_K: return size_t(k) / 256 * 176;
    case kQ6_K: return size_t(k) / 256 * 210;
    default: return size_t(k) * 4;
  }
}

// Where a quant's bits lie: `count` bits of quad `quad`, from bit `from` on, at bit `to` of a byte of vector `vector`.
struct Bits {
  int quad, from, count, vector, to;
};

template <typename Visit>
void each_bits(int bits, Visit visit) {
  static const Bits five[] = {{0, 0, 5, 0, 0}, {1, 0, 5, 1, 0}, {2, 0, 5, 2, 0}, {3, 0, 5, 3, 0},
                              {4, 0, 5, 4, 0}, {5, 2, 3, 0, 5}, {5, 0, 2, 1, 6}, {6, 2, 3, 2, 5},
                              {6, 0, 2, 3, 6}, {7, 2, 3, 4, 5}, {7, 1, 1, 1, 5}, {7, 0, 1, 3, 5}};
  if (bits == 5)
    for (const Bits& part : five) visit(part);
  for (int q = 0; q < 8 && bits != 5; q++) {
    if (bits == 8) visit(Bits{q, 0, 8, q, 0});
    if (bits == 4) visit(Bits{q, 0, 4, q % 4, q / 4 * 4});
    if (bits == 6 && q % 4 < 3) visit(Bits{q, 0, 6, q / 4 * 3 + q % 4, 0});
    for (int i = 0; bits == 6 && q % 4 == 3 && i < 3; i++) visit(Bits{q, 2 * i, 2, q / 4 * 3 + i, 6});
  }
}

void put_quants(int bits, const uint8_t* from, uint8_t* quants, int lane) {
  if (bits == 4) {  // as below, but models load in half the time
    for (int i = 0; i < 16; i++) quants[i / 4 * 64 + lane * 4 + i % 4] = from[i] | from[i + 16] << 4;
    return;
  }
  each_bits(bits, [&](const Bits& at) {
    for (int i = 0; i < 4; i++)
      quants[at.vector * 64 + lane * 4 + i] |= (from[at.quad * 4 + i] >> at.from & ((1 << at.count) - 1)) << at.to;
  });
}

// The integers of a super-block, byte by byte.
void put_integers(int kind, const uint8_t* super, uint8_t* to, int lane) {
  const int count = kind == kQ6_K ? 16 : 12;
  const uint8_t* from = super + (kind == kQ6_K ? 192 : 4);
  for (int i = 0; i < count; i++) to[i * kLanes + lane] = from[i];
}

}  // namespace

// Rows first .. first + count of the matrix, stored as `kind`. The matrix starts zeroed: lanes past n stay zero. False:
// a scale or minimum is not finite.
bool pack(int32_t kind, const uint8_t* rows, int32_t first, int32_t count, const Matrix& into) {
  Block block = {};
  bool finite = true;
  for (int r = 0; r < count; r++) {
    int group = (first + r) / kLanes, lane = (first + r) % kLanes;
    const size_t bytes = row_bytes(kind, into.k);
    const uint8_t* row = rows + r * bytes;
    for (int b = 0; b < into.blocks(); b++) {
      read_block(kind, row, b, block);
      for (int i = 0; kind == kQ5_0 && into.bits == 8 && i < kBlock; i++) block.quants[i] -= 16;  // no minima there
      put_quants(into.bits, block.quants, const_cast<uint8_t*>(into.quants(group, b)), lane);
      if (b % into.run) continue;
      uint16_t* scales = const_cast<uint16_t*>(into.scales(group, b));
      scales[lane] = block.scale;
      if (into.minima()) scales[kLanes + lane] = block.minimum;
      finite &= is_finite(block.scale) && is_finite(block.minimum);
      if (into.run > 1)
        put_integers(kind, row + bytes * b / into.blocks(), const_cast<uint8_t*>(into.integers(group, b)), lane);
    }
  }
  return finite;
}

void scale_rows(const Matrix& m, const float* factors) {
  for (int row = 0; row < m.n; row++)
    for (int b = 0; b < m.blocks(); b += m.run) {
      uint16_t* scales = const_cast<uint16_t*>(m.scales(row / kLanes, b)) + row % kLanes;
      scales[0] = float_to_half(half_to_float(scales[0]) * factors[row]);
      if (m.minima()) scales[kLanes] = float_to_half(half_to_float(scales[kLanes]) * factors[row]);
    }
}

void unpack_quants(const Matrix& m, int g, int b, int lane, int8_t* out) {
  const uint8_t* quants = m.quants(g, b) + lane * 4;
  for (int i = 0; i < kBlock; i++) out[i] = 0;
  each_bits(m.bits, [&](const Bits& at) {
    for (int i = 0; i < 4; i++)
      out[at.quad * 4 + i] |= (quants[at.vector * 64 + i] >> at.to & ((1 << at.count) - 1)) << at.from;
  });
  for (int i = 0; i < kBlock && m.bits == 6; i++) out[i] = int8_t((out[i] ^ 32) - 32);
}

void block_scales(const Matrix& m, int g, int b, int lane, float* scales, float* minimum) {
  const uint16_t* halves = m.scales(g, b) + lane;
  scales[0] = scales[1] = half_to_float(halves[0]);
  *minimum = m.minima() ? half_to_float(halves[kLanes]) : 0.0f;
  if (m.run == 1) return;
  const uint8_t* at = m.integers(g, b) + lane;
  const int sub = b % m.run;
  auto integer = [&](int i) { return int(at[i * kLanes]); };
  if (!m.minima()) {
    for (int i = 0; i < 2; i++) scales[i] *= float(int8_t(integer(2 * sub + i)));
  } else if (sub < 4) {
    scales[0] = scales[1] *= float(integer(sub) & 63);
    *minimum *= -float(integer(sub + 4) & 63);
  } else {
    scales[0] = scales[1] *= float((integer(sub + 4) & 15) | integer(sub - 4) >> 6 << 4);
    *minimum *= -float(integer(sub + 4) >> 4 | integer(sub) >> 6 << 4);
  }
}

void unpack_row(const Matrix& m, int32_t row, float* out) {
  int8_t quants[kBlock];
  float scales[2], minimum;
  for (int b = 0; b < m.blocks(); b++, out += kBlock) {
    unpack_quants(m, row / kLanes, b, row % kLanes, quants);
    block_scales(m, row / kLanes, b, row % kLanes, scales, &minimum);
    for (int i = 0; i < kBlock; i++) out[i] = scales[i / 16] * float(quants[i]) + minimum;
  }
}

}  // namespace quire
