// NEON with dot products (ARMv8.2), and with 8-bit matrix products (i8mm) where the host has them: a group of 16 outputs
// is four vectors of 4. One or two rows take all four at once and stream the weights; more rows take one vector at a time,
// so that up to 8 rows stay in registers.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"

#if defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

namespace quire {
namespace {

#define QUIRE_WIDTH 4
inline float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
inline float32x4_t maximum(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t minimum(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
#include "simd.h"

inline vi lane_numbers() { return vi{0, 1, 2, 3}; }
inline float sum(vf v) { return vaddv_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v))); }
inline uint32_t sum(vu v) { return vaddvq_u32(v); }
inline bool any(vi mask) { return vmaxvq_u32((vu)mask); }
inline float highest(vf v) { return vmaxvq_f32(v); }
inline vf load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store_half(uint16_t* p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
inline void store_bytes(int8_t* p, vi v) {
  int16x4_t narrow = vmovn_s32((int32x4_t)v);
  uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(narrow, narrow))), 0);
  __builtin_memcpy(p, &four, 4);
}

inline vi load_bytes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(uint32_t(four)))));
}
inline vi load_bytes(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

// The sums of four vectors.
inline vf fold_quads(vf a, vf b, vf c, vf d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }

inline void dots16(const float* q, const float* k, int dim, float* out) {
  float32x4_t acc[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++) acc[j] = vdupq_n_f32(0);
  for (int i = 0; i < dim; i += W) {
    float32x4_t x = vld1q_f32(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) acc[j] = vfmaq_f32(acc[j], x, vld1q_f32(k + i * kKeys + j * W));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 16; j += 4) vst1q_f32(out + j, fold_quads(acc[j], acc[j + 1], acc[j + 2], acc[j + 3]));
}

// out[i] += x[i] * lane i of y.
QUIRE_INLINE void fma_lanes(vf y, const vf* x, vf* out) {
  out[0] = vfmaq_laneq_f32(out[0], x[0], y, 0);
  out[1] = vfmaq_laneq_f32(out[1], x[1], y, 1);
  out[2] = vfmaq_laneq_f32(out[2], x[2], y, 2);
  out[3] = vfmaq_laneq_f32(out[3], x[3], y, 3);
}

#include "stages.h"

#include "recurrent.h"

#include "attend.h"

#include "draw.h"
#include "score.h"

constexpr float kUnit = 0.25f;  // 6-bit quants are multiplied as the high bits of a byte

// 16 bytes as floats, kZero more than they are: the low bits of 2^23. Integers are converted by one unit, zips done by two.
constexpr float kZero = 8388608.0f;
QUIRE_INLINE void bytes_to_floats(uint8x16_t bytes, vf* to) {
  const uint8x16_t none = vdupq_n_u8(0);
  const uint16x8_t high = vdupq_n_u16(0x4b00);
  uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(bytes, none)), b = vreinterpretq_u16_u8(vzip2q_u8(bytes, none));
  to[0] = vreinterpretq_f32_u16(vzip1q_u16(a, high));
  to[1] = vreinterpretq_f32_u16(vzip2q_u16(a, high));
  to[2] = vreinterpretq_f32_u16(vzip1q_u16(b, high));
  to[3] = vreinterpretq_f32_u16(vzip2q_u16(b, high));
}

// The 8 vectors of a block, 4 inputs of 4 outputs each.
template <FormId Id>
QUIRE_INLINE void load_block(const uint8_t* p, int8x16_t* w) {
  constexpr int stored = kForms[Id].bits;
  uint8x16_t v[stored], quads[8];
#pragma GCC unroll 8
  for (int i = 0; i < stored; i++) v[i] = vld1q_u8(p + 64 * i);
  if constexpr (stored == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) quads[i] = v[i];
  } else if constexpr (stored == 6) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const uint8x16_t* three = v + 3 * half;
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) quads[4 * half + i] = vshlq_n_u8(three[i], 2);
      uint8x16_t high = vsriq_n_u8(vsriq_n_u8(three[2], three[1], 2), three[0], 4);
      quads[4 * half + 3] = vandq_u8(high, vdupq_n_u8(0xfc));
    }
  } else if constexpr (stored == 5) {
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) quads[i] = vandq_u8(v[i], vdupq_n_u8(31));
    quads[5] = vshrq_n_u8(vsriq_n_u8(v[0], v[1], 3), 3);
    quads[6] = vshrq_n_u8(vsriq_n_u8(v[2], v[3], 3), 3);
    uint8x16_t high = vsriq_n_u8(v[4], vshlq_n_u8(v[1], 2), 3);
    quads[7] = vshrq_n_u8(vsriq_n_u8(high, vshlq_n_u8(v[3], 2), 4), 3);
  } else if constexpr (stored == 3) {
    const uint8x16_t low = vdupq_n_u8(7), third = vdupq_n_u8(4);
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {
      quads[3 * i] = vandq_u8(v[i], low);
      quads[3 * i + 1] = vandq_u8(vshrq_n_u8(v[i], 3), low);
    }
    quads[2] = vorrq_u8(vshrq_n_u8(v[0], 6), vandq_u8(vshrq_n_u8(v[2], 4), third));
    quads[5] = vorrq_u8(vshrq_n_u8(v[1], 6), vandq_u8(vshrq_n_u8(v[2], 5), third));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) quads[i] = vsubq_u8(quads[i], third);  // signed as they are
  } else if constexpr (stored == 2) {
    const uint8x16_t low = vdupq_n_u8(3);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      quads[4 * i] = vandq_u8(v[i], low);
      quads[4 * i + 1] = vandq_u8(vshrq_n_u8(v[i], 2), low);
      quads[4 * i + 2] = vandq_u8(vshrq_n_u8(v[i], 4), low);
      quads[4 * i + 3] = vshrq_n_u8(v[i], 6);
    }
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      quads[i] = vandq_u8(v[i], vdupq_n_u8(15));
      quads[i + 4] = vshrq_n_u8(v[i], 4);
    }
  }
  const int8x16_t numbers = vld1q_s8(kMxNumbers);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) w[i] = Id == kMxFour ? vqtbl1q_s8(numbers, quads[i]) : vreinterpretq_s8_u8(quads[i]);
}

template <FormId Id>
inline void unpack_block(const uint8_t* from, uint8_t* to) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    int8x16_t w[8];
    load_block<Id>(from + 16 * v, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) vst1q_s8(reinterpret_cast<int8_t*>(to) + 64 * i + 16 * v, w[i]);
  }
}

constexpr int kUnpack = 4;

#include "forms.h"

// Dot products begin with the bits of 1.5 * 2^23, so that they are floats which that is taken off.
inline int32x4_t none() { return vdupq_n_s32(0x4b400000); }

// Adds the quads of one half of a block, of R rows side by side, so that no product waits for the one before.
template <int R>
QUIRE_INLINE void half_dots(const int8x16_t* w, const int8_t* x, int32x4_t* dots) {
  int8x16_t rows[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) rows[r] = vld1q_s8(x + r * kBlock);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = vdotq_laneq_s32(dots[r], w[0], rows[r], 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = vdotq_laneq_s32(dots[r], w[1], rows[r], 1);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = vdotq_laneq_s32(dots[r], w[2], rows[r], 2);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = vdotq_laneq_s32(dots[r], w[3], rows[r], 3);
}

// The one way an integer dot product enters a sum.
QUIRE_INLINE float32x4_t accumulate(float32x4_t acc, int32x4_t dot, vf scale, float factor) {
  return vfmaq_f32(acc, vreinterpretq_f32_s32(dot) - kRound, vmulq_n_f32(scale, factor));
}

// Scales and minima of a block's halves.
struct Levels {
  vf scales[2], minima[2];

  template <typename Source>
  QUIRE_INLINE static Levels of(const Source& from, int b, int lane) {
    constexpr int last = Source::halves;
    return {{from.scale(b, lane), from.scale(b, lane, last)}, {from.minimum(b, lane), from.minimum(b, lane, last)}};
  }
};

// A block: the product, or those of both halves; then minima.
template <typename F>
QUIRE_INLINE float32x4_t add_block(float32x4_t acc, int32x4_t first, int32x4_t second, const Levels& by, const float* factors) {
  acc = accumulate(acc, first, by.scales[0], factors[0]);
  if (F::halves) acc = accumulate(acc, second, by.scales[1], factors[0]);
  if (F::minima) acc = vfmaq_f32(acc, by.minima[1], vdupq_n_f32(factors[16]));
  if (F::minima && F::halves) acc = vfmaq_f32(acc, by.minima[0] - by.minima[1], vdupq_n_f32(factors[32]));
  return acc;
}

// The 8 vectors of a block of 4 outputs from vector v on.
template <typename Source>
QUIRE_INLINE void load_quads(const Source& from, int b, int v, int8x16_t* w) {
  if constexpr (Source::bytes) load_block<kByte>(from.quants(b) + 16 * v, w);
  else load_block<Source::id>(from.quants(b) + 16 * v, w);
}

inline void finish(Out out, int m, int g, int v, float32x4_t acc) {
  float* to = out.at(m, g) + 4 * v;
  if (out.bias) acc = vaddq_f32(acc, vld1q_f32(out.bias + g * kLanes + 4 * v));
  acc = vmulq_n_f32(acc, out.scale);
  if (out.add) acc = vaddq_f32(vld1q_f32(to), acc);
  vst1q_f32(to, acc);
}

// R rows from m on, within one tile of 16; V vectors of 4 outputs from vector v on.
template <int R, int V, typename Source>
void tile(Source from, int g, int v, Rows x, int m, Out out) {
  float32x4_t acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) acc[r][i] = vdupq_n_f32(0);
  for (int b = 0; b < x.blocks(); b++) {
    from.enter(b);
    const float* factors = x.scale(m, b);
    const int8_t* xq = x.quants(m, b);
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
      int8x16_t w[8];
      load_quads(from, b, v + i, w);
      const Levels by = Levels::of(from, b, 4 * (v + i));
      constexpr int S = R < 4 ? 1 : 4;
#pragma GCC unroll 2
      for (int s = 0; s < R; s += S) {
        int32x4_t dots[2][S];
#pragma GCC unroll 4
        for (int r = 0; r < S; r++) dots[0][r] = dots[1][r] = none();
        half_dots<S>(w, xq + s * kBlock, dots[0]);
        half_dots<S>(w + 4, xq + s * kBlock + 16, dots[Source::halves]);
#pragma GCC unroll 4
        for (int r = 0; r < S; r++)
          acc[s + r][i] = add_block<Source>(acc[s + r][i], dots[0][r], dots[1][r], by, factors + s + r);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) finish(out, m + r, g, v + i, acc[r][i]);
}

template <int R, typename Source>
void narrow(Source from, int g, Rows x, int m, Out out) {
  for (int v = 0; v < 4; v++) tile<R, 1>(from, g, v, x, m, out);
}

template <typename Source>
void rows(Source from, int g, Rows x, int m0, int m1, Out out) {
  int m = m0;
  for (; m + 8 <= m1; m += 8) narrow<8>(from, g, x, m, out);
  for (; m + 4 <= m1; m += 4) narrow<4>(from, g, x, m, out);
  for (; m + 2 <= m1; m += 2) tile<2, 4>(from, g, 0, x, m, out);
  for (; m < m1; m++) tile<1, 4>(from, g, 0, x, m, out);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  each_group(pieces, count, m1 - m0, scratch, [&](const auto& from, int g, Out out) { rows(from, g, x, m0, m1, out); });
}

void begin() {}
void end() {}

const Kernels kTable = QUIRE_KERNELS("neon", gemm);

#if defined(__clang__)  // which takes the first of two targets that a function is given
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif
#include "i8mm.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

}  // namespace

#if defined(__APPLE__)
namespace {
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
bool has_dot_product() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_matrix() { return has("hw.optional.arm.FEAT_I8MM"); }
}  // namespace
#else
namespace {
bool has_dot_product() { return getauxval(AT_HWCAP) & 1 << 20; }  // HWCAP_ASIMDDP
bool has_matrix() { return getauxval(AT_HWCAP2) & 1 << 13; }      // HWCAP2_I8MM
}  // namespace
#endif

const Kernels* kernels_neon() { return has_dot_product() ? &kTable : nullptr; }
const Kernels* kernels_i8mm() { return kernels_neon() && has_matrix() ? &i8mm::kTable : nullptr; }

}  // namespace quire

#else
namespace quire {
const Kernels* kernels_neon() { return nullptr; }
const Kernels* kernels_i8mm() { return nullptr; }
}  // namespace quire
#endif
