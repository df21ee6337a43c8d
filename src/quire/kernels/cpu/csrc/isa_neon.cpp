// NEON with dot products (ARMv8.2), and with 8-bit matrix products (i8mm) where the host has them: a group of 16 outputs is four vectors of 4. One or two rows take all four at once
// and stream the weights; more rows take one vector at a time, so that up to 8 rows stay in registers.
#include <algorithm>
#include <cmath>
#include <utility>

#include "common.h"

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
  for (int j = 0; j < 16; j += 4)
    vst1q_f32(out + j, vpaddq_f32(vpaddq_f32(acc[j], acc[j + 1]), vpaddq_f32(acc[j + 2], acc[j + 3])));
}

#include "stages.h"

#include "attend.h"

#include "draw.h"

// Adds quads I and I + 4 of a block: 4 bits from one vector, 8 bits from two.
template <int Bits, int I>
inline int32x4_t quads(int32x4_t dot, const uint8_t* p, int8x16_t x0, int8x16_t x1) {
  int8x16_t a, b;
  if (Bits == 4) {
    uint8x16_t both = vld1q_u8(p + 64 * I);
    a = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    b = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  } else {
    a = vreinterpretq_s8_u8(vld1q_u8(p + 64 * I));
    b = vreinterpretq_s8_u8(vld1q_u8(p + 64 * (I + 4)));
  }
  return vdotq_laneq_s32(vdotq_laneq_s32(dot, a, x0, I), b, x1, I);
}

template <int Bits>
inline int32x4_t block_dot(const uint8_t* p, const int8_t* x) {
  int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
  int32x4_t dot = quads<Bits, 0>(vdupq_n_s32(0), p, x0, x1);
  dot = quads<Bits, 1>(dot, p, x0, x1);
  dot = quads<Bits, 2>(dot, p, x0, x1);
  return quads<Bits, 3>(dot, p, x0, x1);
}

// The one way an integer dot product enters a sum: scale, add, then the minimum.
template <int Bits>
inline float32x4_t accumulate(float32x4_t acc, int32x4_t dot, vf d, vf minimum, const float* factors) {
  acc = vfmaq_f32(acc, vcvtq_f32_s32(dot), vmulq_n_f32(d, factors[0]));
  return Bits == 4 ? vfmaq_f32(acc, minimum, vdupq_n_f32(factors[16])) : acc;
}

inline void finish(Out out, int m, int g, int v, float32x4_t acc) {
  float* to = out.at(m, g) + 4 * v;
  if (out.bias) acc = vaddq_f32(acc, vld1q_f32(out.bias + g * kLanes + 4 * v));
  if (out.add) acc = vaddq_f32(vld1q_f32(to), acc);
  vst1q_f32(to, acc);
}

// R rows from m on, within one tile of 16; V vectors of 4 outputs from vector v on.
template <int Bits, int R, int V>
void tile(const Matrix& w, int g, int v, Rows x, int m, Out out) {
  float32x4_t acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) acc[r][i] = vdupq_n_f32(0);
  for (int b = 0; b < w.blocks(); b++) {
    const uint8_t* p = w.quants(g, b) + 16 * v;
    const uint16_t* scales = w.scales(g, b) + 4 * v;
    const float* factors = x.scale(m, b);
    const int8_t* xq = x.quants(m, b);
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
      vf d = load_half(scales + 4 * i), minimum = Bits == 4 ? load_half(scales + kLanes + 4 * i) : d;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32x4_t dot = block_dot<Bits>(p + 16 * i, xq + r * kBlock);
        acc[r][i] = accumulate<Bits>(acc[r][i], dot, d, minimum, factors + r);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) finish(out, m + r, g, v + i, acc[r][i]);
}

template <int Bits, int R>
void narrow(const Matrix& w, int g, Rows x, int m, Out out) {
  for (int v = 0; v < 4; v++) tile<Bits, R, 1>(w, g, v, x, m, out);
}

template <int Bits>
void rows(const Matrix& w, int g, Rows x, int m0, int m1, Out out) {
  int m = m0;
  for (; m + 8 <= m1; m += 8) narrow<Bits, 8>(w, g, x, m, out);
  for (; m + 4 <= m1; m += 4) narrow<Bits, 4>(w, g, x, m, out);
  for (; m + 2 <= m1; m += 2) tile<Bits, 2, 4>(w, g, 0, x, m, out);
  for (; m < m1; m++) tile<Bits, 1, 4>(w, g, 0, x, m, out);
}

void gemm(const Matrix& w, int g0, int g1, Rows x, int m0, int m1, Out out) {
  for (int g = g0; g < g1; g++) w.bits == 4 ? rows<4>(w, g, x, m0, m1, out) : rows<8>(w, g, x, m0, m1, out);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch) {
  for (const Piece* p = pieces; p < pieces + count; p++) gemm(*p->w, p->g0, p->g1, x, m0, m1, p->out);
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
