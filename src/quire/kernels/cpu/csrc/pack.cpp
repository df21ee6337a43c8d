// Stored blocks to the packed layout, once at load; and one row back, for embeddings.
#include <algorithm>
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

// How rows are stored; matrix_packing.py says the same. The last of K-quants' own kinds: as files have them, where the one
// before was made of fp16 scales.
enum Kind { kQ4_0, kQ4_1, kQ8_0, kQ4_KAsNibbles, kF32, kQ5_0, kQ5_1, kQ5_K, kQ6_K, kQ4_K, kQ3_K, kQ2_K, kMXFP4 };

struct Block {  // one row's 32 weights on their way
  uint8_t quants[kBlock];
  uint16_t scale, minimum;  // of a super-block: its factors; of MXFP4: an exponent
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

// Of Q4_K and Q5_K: the scale and the minimum of block `sub` of 8, 6 bits each.
uint8_t six_bits(const uint8_t* s, int sub, bool minimum) {
  if (sub < 4) return s[minimum ? sub + 4 : sub] & 63;
  return minimum ? s[sub + 4] >> 4 | s[sub] >> 6 << 4 : (s[sub + 4] & 15) | s[sub - 4] >> 6 << 4;
}

void read_q4_k(const uint8_t* super, int sub, Block& out) {
  out.scale = read16(super);
  out.minimum = read16(super + 2);
  const uint8_t* q = super + 16 + sub / 2 * 32;
  for (int i = 0; i < kBlock; i++) out.quants[i] = sub % 2 ? q[i] >> 4 : q[i] & 15;
}

// Products of the integers with the factors are rounded to fp16, which moves a weight by at most 2^-11 of itself, far below
// a 4-bit step.
void read_q4_k_as_nibbles(const uint8_t* super, int sub, Block& out) {
  read_q4_k(super, sub, out);
  out.scale = float_to_half(half_to_float(out.scale) * float(six_bits(super + 4, sub, false)));
  out.minimum = float_to_half(-half_to_float(out.minimum) * float(six_bits(super + 4, sub, true)));
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

// [hmask[32] qs[64] scales[12] d]: two bits of a quant, and the third, without which it counts 4 less.
void read_q3_k(const uint8_t* super, int sub, Block& out) {
  const uint8_t *high = super, *low = super + 32 + sub / 4 * 32;
  for (int i = 0; i < kBlock; i++) out.quants[i] = (low[i] >> sub % 4 * 2 & 3) | (high[i] >> sub & 1) << 2;
  out.scale = read16(super + 108);
  out.minimum = 0;
}

// [integers[16] qs[64] d dmin]
void read_q2_k(const uint8_t* super, int sub, Block& out) {
  const uint8_t* low = super + 16 + sub / 4 * 32;
  for (int i = 0; i < kBlock; i++) out.quants[i] = low[i] >> sub % 4 * 2 & 3;
  out.scale = read16(super + 80);
  out.minimum = read16(super + 82);
}

void read_mxfp4(const uint8_t* p, Block& out) {
  nibbles(p + 1, out);
  out.scale = p[0] > 252 ? 0xffff : p[0] ? p[0] - 1 : 0;  // numbers are kept doubled; 12 << 126 is no float
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
    case kQ4_KAsNibbles:
      return read_q4_k_as_nibbles(row + b / 8 * 144, b % 8, out);
    case kQ4_K:
      return read_q4_k(row + b / 8 * 144, b % 8, out);
    case kQ3_K:
      return read_q3_k(row + b / 8 * 110, b % 8, out);
    case kQ2_K:
      return read_q2_k(row + b / 8 * 84, b % 8, out);
    case kMXFP4:
      return read_mxfp4(row + b * 17, out);
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
    case kQ4_KAsNibbles:
    case kQ4_K: return size_t(k) / 256 * 144;
    case kQ3_K: return size_t(k) / 256 * 110;
    case kQ2_K: return size_t(k) / 256 * 84;
    case kMXFP4: return size_t(k) / 32 * 17;
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
  static const Bits three[] = {{0, 0, 3, 0, 0}, {1, 0, 3, 0, 3}, {2, 0, 2, 0, 6}, {3, 0, 3, 1, 0}, {4, 0, 3, 1, 3},
                               {5, 0, 2, 1, 6}, {6, 0, 3, 2, 0}, {7, 0, 3, 2, 3}, {2, 2, 1, 2, 6}, {5, 2, 1, 2, 7}};
  if (bits == 5)
    for (const Bits& part : five) visit(part);
  if (bits == 3)
    for (const Bits& part : three) visit(part);
  for (int q = 0; q < 8; q++) {
    if (bits == 8) visit(Bits{q, 0, 8, q, 0});
    if (bits == 4) visit(Bits{q, 0, 4, q % 4, q / 4 * 4});
    if (bits == 2) visit(Bits{q, 0, 2, q / 4, q % 4 * 2});
    if (bits == 6 && q % 4 < 3) visit(Bits{q, 0, 6, q / 4 * 3 + q % 4, 0});
    for (int i = 0; bits == 6 && q % 4 == 3 && i < 3; i++) visit(Bits{q, 2 * i, 2, q / 4 * 3 + i, 6});
  }
}

void put_quants(int bits, const uint8_t* from, uint8_t* quants, int lane) {
  if (bits == 4) {  // as below, but models load in half the time
    for (int i = 0; i < 16; i++) quants[i / 4 * 64 + lane * 4 + i % 4] = from[i] | from[i + 16] << 4;
    return;
  }
  if (bits == 8) {
    for (int i = 0; i < kBlock; i += 4) std::memcpy(quants + i * 16 + lane * 4, from + i, 4);
    return;
  }
  each_bits(bits, [&](const Bits& at) {
    for (int i = 0; i < 4; i++)
      quants[at.vector * 64 + lane * 4 + i] |= (from[at.quad * 4 + i] >> at.from & ((1 << at.count) - 1)) << at.to;
  });
}

// The integers of a super-block, two of each block: of its halves, or its scale's and its minimum's.
void put_integers(int kind, const uint8_t* super, uint8_t* to, int lane) {
  for (int i = 0; i < 16; i++) {
    uint8_t integer;
    if (kind == kQ4_K || kind == kQ5_K) {
      integer = six_bits(super + 4, i / 2, i % 2);
    } else if (kind == kQ3_K) {
      const uint8_t* from = super + 96;
      integer = uint8_t(((from[i % 8] >> i / 8 * 4 & 15) | (from[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    } else {
      integer = super[(kind == kQ6_K ? 192 : 0) + i];
    }
    to[i * kLanes + lane] = integer;
  }
}

void put_scale(const Matrix& into, const Block& block, uint8_t* scales, int lane) {
  if (into.how().scale_bytes == 1) {
    scales[lane] = uint8_t(block.scale);
    return;
  }
  std::memcpy(scales + 2 * lane, &block.scale, 2);
  if (into.how().minima) std::memcpy(scales + 2 * (kLanes + lane), &block.minimum, 2);
}

}  // namespace

// Rows first .. first + count of the matrix, stored as `kind`. The matrix starts zeroed: lanes past n stay zero. False:
// a scale or minimum is not finite.
bool pack(int32_t kind, const uint8_t* rows, int32_t first, int32_t count, const Matrix& into) {
  Block block = {};
  bool finite = true;
  const Form& how = into.how();
  const size_t bytes = row_bytes(kind, into.k);
  for (int r = 0; r < count; r++) {
    int group = (first + r) / kLanes, lane = (first + r) % kLanes;
    const uint8_t* row = rows + r * bytes;
    for (int b = 0; b < into.blocks(); b++) {
      read_block(kind, row, b, block);
      for (int i = 0; kind == kQ5_0 && into.form == kByte && i < kBlock; i++) block.quants[i] -= 16;  // no minima there
      put_quants(how.bits, block.quants, const_cast<uint8_t*>(into.quants(group, b)), lane);
      if (b % how.run) continue;
      put_scale(into, block, const_cast<uint8_t*>(into.scales(group, b)), lane);
      finite &= how.scale_bytes == 1 ? block.scale != 0xffff : is_finite(block.scale) && is_finite(block.minimum);
      if (how.integers)
        put_integers(kind, row + bytes * b / into.blocks(), const_cast<uint8_t*>(into.integers(group, b)), lane);
    }
  }
  return finite;
}

void scale_rows(const Matrix& m, const float* factors) {
  for (int row = 0; row < m.n; row++)
    for (int b = 0; b < m.blocks(); b += m.how().run) {
      uint8_t* at = const_cast<uint8_t*>(m.scales(row / kLanes, b));
      if (m.how().scale_bytes == 1) {
        const int exponent = at[row % kLanes] + std::ilogb(factors[row]);
        at[row % kLanes] = uint8_t(std::max(0, std::min(254, exponent)));
        continue;
      }
      uint16_t* scales = reinterpret_cast<uint16_t*>(at) + row % kLanes;
      scales[0] = float_to_half(half_to_float(scales[0]) * factors[row]);
      if (m.how().minima) scales[kLanes] = float_to_half(half_to_float(scales[kLanes]) * factors[row]);
    }
}

void unpack_quants(const Matrix& m, int g, int b, int lane, int8_t* out) {
  const uint8_t* quants = m.quants(g, b) + lane * 4;
  for (int i = 0; i < kBlock; i++) out[i] = 0;
  each_bits(m.how().bits, [&](const Bits& at) {
    for (int i = 0; i < 4; i++)
      out[at.quad * 4 + i] |= (quants[at.vector * 64 + i] >> at.to & ((1 << at.count) - 1)) << at.from;
  });
  for (int i = 0; i < kBlock; i++) {
    if (m.form == kSixK) out[i] = int8_t((out[i] ^ 32) - 32);
    if (m.form == kThreeK) out[i] -= 4;
    if (m.form == kMxFour) out[i] = kMxNumbers[out[i]];
  }
}

void block_scales(const Matrix& m, int g, int b, int lane, float* scales, float* minima) {
  const uint8_t* from = m.scales(g, b);
  minima[0] = minima[1] = 0;
  if (m.how().scale_bytes == 1) {
    const uint32_t bits = uint32_t(from[lane]) << 23;
    std::memcpy(scales, &bits, 4);
    scales[1] = scales[0];
    return;
  }
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from) + lane;
  scales[0] = scales[1] = half_to_float(halves[0]);
  if (m.how().minima) minima[0] = minima[1] = half_to_float(halves[kLanes]);
  if (!m.how().integers) return;
  const uint8_t* at = m.integers(g, b) + lane;
  const int sub = b % m.how().run;
  auto integer = [&](int i) { return int(at[i * kLanes]); };
  for (int i = 0; i < 2; i++) {
    const int mine = integer(2 * sub + i);
    if (m.form == kTwoK) {
      scales[i] *= float(mine & 15);
      minima[i] *= -float(mine >> 4);
    } else if (m.how().halves) {
      scales[i] *= float(int8_t(mine));
    } else {
      scales[i] *= float(integer(2 * sub));
      minima[i] *= -float(integer(2 * sub + 1));
    }
  }
}

void unpack_row(const Matrix& m, int32_t row, float* out) {
  int8_t quants[kBlock];
  float scales[2], minima[2];
  for (int b = 0; b < m.blocks(); b++, out += kBlock) {
    unpack_quants(m, row / kLanes, b, row % kLanes, quants);
    block_scales(m, row / kLanes, b, row % kLanes, scales, minima);
    for (int i = 0; i < kBlock; i++) out[i] = scales[i / 16] * float(quants[i]) + minima[i / 16];
  }
}

}  // namespace quire
