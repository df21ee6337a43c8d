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

enum Kind { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kQ4_K = 3, kF32 = 4, kQ5_0 = 5 };

struct Block {  // one row's 32 weights on their way
  uint8_t quants[kBlock];
  uint16_t scale, minimum;
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

// 8 sub-blocks of 32 with 6-bit scales and minima; their products with the fp16 factors are rounded to fp16, which
// moves a weight by at most 2^-11 of itself, far below a 4-bit step.
void read_q4_k(const uint8_t* super, int sub, Block& out) {
  const uint8_t* s = super + 4;
  int scale = sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
  int minimum = sub < 4 ? s[sub + 4] & 63 : (s[sub + 4] >> 4) | (s[sub] >> 6) << 4;
  out.scale = float_to_half(half_to_float(read16(super)) * float(scale));
  out.minimum = float_to_half(-half_to_float(read16(super + 2)) * float(minimum));
  const uint8_t* q = super + 16 + sub / 2 * 32;
  for (int i = 0; i < kBlock; i++) out.quants[i] = sub % 2 ? q[i] >> 4 : q[i] & 15;
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
    case kQ5_0:  // 5 bits less 16: whole numbers of the same scale
      p = row + b * 22;
      out.scale = read16(p);
      nibbles(p + 6, out);
      for (int i = 0; i < kBlock; i++) out.quants[i] = uint8_t(int(out.quants[i] | (p[2 + i / 8] >> i % 8 & 1) << 4) - 16);
      return;
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
    default: return size_t(k) * 4;
  }
}

}  // namespace

// Rows first .. first + count of the matrix, stored as `kind`. The matrix starts zeroed: lanes past n stay zero. False:
// a scale or minimum is not finite.
bool pack(int32_t kind, const uint8_t* rows, int32_t first, int32_t count, const Matrix& into) {
  Block block = {};
  bool finite = true;
  for (int r = 0; r < count; r++) {
    int group = (first + r) / kLanes, lane = (first + r) % kLanes;
    const uint8_t* row = rows + r * row_bytes(kind, into.k);
    for (int b = 0; b < into.blocks(); b++) {
      read_block(kind, row, b, block);
      uint8_t* quants = const_cast<uint8_t*>(into.quants(group, b));
      uint16_t* scales = const_cast<uint16_t*>(into.scales(group, b));
      scales[lane] = block.scale;
      finite &= is_finite(block.scale) && is_finite(block.minimum);
      if (into.bits == 4) {
        scales[kLanes + lane] = block.minimum;
        for (int i = 0; i < 16; i++)
          quants[i / 4 * 64 + lane * 4 + i % 4] = block.quants[i] | block.quants[i + 16] << 4;
      } else {
        for (int i = 0; i < kBlock; i++) quants[i / 4 * 64 + lane * 4 + i % 4] = block.quants[i];
      }
    }
  }
  return finite;
}

void scale_rows(const Matrix& m, const float* factors) {
  for (int row = 0; row < m.n; row++)
    for (int b = 0; b < m.blocks(); b++) {
      uint16_t* scales = const_cast<uint16_t*>(m.scales(row / kLanes, b)) + row % kLanes;
      scales[0] = float_to_half(half_to_float(scales[0]) * factors[row]);
      if (m.bits == 4) scales[kLanes] = float_to_half(half_to_float(scales[kLanes]) * factors[row]);
    }
}

void unpack_row(const Matrix& m, int32_t row, float* out) {
  int group = row / kLanes, lane = row % kLanes;
  for (int b = 0; b < m.blocks(); b++, out += kBlock) {
    const uint8_t* quants = m.quants(group, b) + lane * 4;
    float scale = half_to_float(m.scales(group, b)[lane]);
    if (m.bits == 4) {
      float minimum = half_to_float(m.scales(group, b)[kLanes + lane]);
      for (int i = 0; i < 16; i++) {
        uint8_t both = quants[i / 4 * 64 + i % 4];
        out[i] = scale * float(both & 15) + minimum;
        out[i + 16] = scale * float(both >> 4) + minimum;
      }
    } else {
      for (int i = 0; i < kBlock; i++) out[i] = scale * float(int8_t(quants[i / 4 * 64 + i % 4]));
    }
  }
}

}  // namespace quire
