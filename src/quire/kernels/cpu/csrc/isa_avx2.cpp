// AVX2 with FMA and F16C: a group of 16 outputs is two vectors of 8, done one after the other.
#include <algorithm>
#include <cmath>
#include <utility>

#include "common.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

namespace quire {
namespace {

#define QUIRE_WIDTH 8
inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256 maximum(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
inline __m256 minimum(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
#include "simd.h"

inline vi lane_numbers() { return vi{0, 1, 2, 3, 4, 5, 6, 7}; }
inline vf load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_half(uint16_t* p, vf v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bytes(int8_t* p, vi v) {
  __m128i both = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(both, both));
}

inline vi load_bytes(const int8_t* p) {
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline vi load_bytes(const uint8_t* p) {
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

inline float sum(vf v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline uint32_t sum(vu v) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1))));
}
inline bool any(vi mask) { return _mm256_movemask_ps((__m256)mask); }
inline float highest(vf v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline void dots8(const float* q, const float* k, int dim, float* out) {
  vf acc[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) acc[j] = vf{};
  for (int i = 0; i < dim; i += W) {
    vf x = load(q + i);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) acc[j] = fma(x, load(k + i * kKeys + j * W), acc[j]);
  }
  vf a = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
  vf b = _mm256_hadd_ps(_mm256_hadd_ps(acc[4], acc[5]), _mm256_hadd_ps(acc[6], acc[7]));
  store(out, _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
}

inline void dots16(const float* q, const float* k, int dim, float* out) {
  dots8(q, k, dim, out);
  dots8(q, k + 8 * W, dim, out + 8);
}

#include "stages.h"

#include "attend.h"

#include "draw.h"

// Dot products of one block of 32 inputs, 8 outputs, R rows. Unsigned 4-bit products of all 8 quads fit 16 bits.
template <int R>
inline void dot4(const uint8_t* p, const int8_t* x, __m256i* dots) {
  const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i));
    __m256i a = _mm256_and_si256(both, low), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const int32_t* quads = reinterpret_cast<const int32_t*>(x + r * kBlock);
      dots[r] = _mm256_add_epi16(dots[r], _mm256_maddubs_epi16(a, _mm256_set1_epi32(quads[i])));
      dots[r] = _mm256_add_epi16(dots[r], _mm256_maddubs_epi16(b, _mm256_set1_epi32(quads[i + 4])));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = _mm256_madd_epi16(dots[r], _mm256_set1_epi16(1));
}

// Signed products: |w| times x with w's sign; two of them fit 16 bits because x is never -128.
template <int R>
inline void dot8(const uint8_t* p, const int8_t* x, __m256i* dots) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) dots[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i)), size = _mm256_abs_epi8(w);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      __m256i quad = _mm256_set1_epi32(reinterpret_cast<const int32_t*>(x + r * kBlock)[i]);
      __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(quad, w));
      dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }
}

// R rows from m on, within one tile of 16; outputs 8 * half .. of group g.
template <int Bits, int R>
void tile(const Matrix& w, int g, int half, Rows x, int m, Out out) {
  vf acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) acc[r] = vf{};
  for (int b = 0; b < w.blocks(); b++) {
    __m256i dots[R];
    if (Bits == 4) {
      dot4<R>(w.quants(g, b) + 32 * half, x.quants(m, b), dots);
    } else {
      dot8<R>(w.quants(g, b) + 32 * half, x.quants(m, b), dots);
    }
    const uint16_t* scales = w.scales(g, b) + 8 * half;
    vf d = load_half(scales), minimum = Bits == 4 ? load_half(scales + kLanes) : d;
    const float* factors = x.scale(m, b);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      acc[r] = fma(_mm256_cvtepi32_ps(dots[r]), d * factors[r], acc[r]);
      if (Bits == 4) acc[r] = fma(minimum, splat(factors[16 + r]), acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    float* to = out.at(m + r, g) + 8 * half;
    if (out.bias) acc[r] += load(out.bias + g * kLanes + 8 * half);
    if (out.add) acc[r] = load(to) + acc[r];
    store(to, acc[r]);
  }
}

template <int Bits>
void rows(const Matrix& w, int g, int half, Rows x, int m0, int m1, Out out) {
  int m = m0;
  for (; m + 4 <= m1; m += 4) tile<Bits, 4>(w, g, half, x, m, out);
  switch (m1 - m) {
    case 3: return tile<Bits, 3>(w, g, half, x, m, out);
    case 2: return tile<Bits, 2>(w, g, half, x, m, out);
    case 1: return tile<Bits, 1>(w, g, half, x, m, out);
  }
}

void gemm(const Matrix& w, int g0, int g1, Rows x, int m0, int m1, Out out) {
  for (int g = g0; g < g1; g++)
    for (int half = 0; half < 2; half++)
      w.bits == 4 ? rows<4>(w, g, half, x, m0, m1, out) : rows<8>(w, g, half, x, m0, m1, out);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch) {
  for (const Piece* p = pieces; p < pieces + count; p++) gemm(*p->w, p->g0, p->g1, x, m0, m1, p->out);
}

void begin() {}
void end() {}

const Kernels kTable = QUIRE_KERNELS("avx2", gemm);

}  // namespace

const Kernels* kernels_avx2() {
  bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has ? &kTable : nullptr;
}

}  // namespace quire

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
namespace quire {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace quire
#endif
