// AVX2 with FMA and F16C: a group of 16 outputs is two vectors of 8, done one after the other.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <cpuid.h>
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

#include "recurrent.h"

#include "attend.h"

#include "draw.h"
#include "score.h"

constexpr float kUnit = 1.0f, kZero = 0.0f;
QUIRE_INLINE void bytes_to_floats(bytes16 bytes, vf* to) {
  to[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)bytes));
  to[1] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)bytes, 8)));
}

// Bits of bytes from Shift on, of which `mask` leaves what is wanted.
template <int Shift>
QUIRE_INLINE __m256i bits(__m256i v, int mask) {
  return _mm256_and_si256(Shift ? _mm256_srli_epi16(v, Shift) : v, _mm256_set1_epi8(char(mask)));
}

// The 8 vectors of a block, 4 inputs of 8 outputs each: 8 bits and MXFP4's numbers as they are, else unsigned (6 bits: plus
// 32, 3 bits: plus 4).
template <FormId Id>
QUIRE_INLINE void load_block(const uint8_t* p, __m256i* w) {
  constexpr int stored = kForms[Id].bits;
  __m256i v[stored];
#pragma GCC unroll 8
  for (int i = 0; i < stored; i++) v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i));
  if constexpr (stored == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) w[i] = v[i];
  } else if constexpr (stored == 6) {
    const __m256i flip = _mm256_set1_epi8(32);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m256i* three = v + 3 * half;
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) w[4 * half + i] = _mm256_xor_si256(bits<0>(three[i], 63), flip);
      __m256i high = _mm256_or_si256(bits<4>(three[1], 12), bits<2>(three[2], 48));
      w[4 * half + 3] = _mm256_xor_si256(_mm256_or_si256(bits<6>(three[0], 3), high), flip);
    }
  } else if constexpr (stored == 5) {
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) w[i] = bits<0>(v[i], 31);
    w[5] = _mm256_or_si256(bits<3>(v[0], 28), bits<6>(v[1], 3));
    w[6] = _mm256_or_si256(bits<3>(v[2], 28), bits<6>(v[3], 3));
    w[7] = _mm256_or_si256(bits<3>(v[4], 28), _mm256_or_si256(bits<4>(v[1], 2), bits<5>(v[3], 1)));
  } else if constexpr (stored == 3) {
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) w[3 * i] = bits<0>(v[i], 7), w[3 * i + 1] = bits<3>(v[i], 7);
    w[2] = _mm256_or_si256(bits<6>(v[0], 3), bits<4>(v[2], 4));
    w[5] = _mm256_or_si256(bits<6>(v[1], 3), bits<5>(v[2], 4));
  } else if constexpr (stored == 2) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      w[4 * i] = bits<0>(v[i], 3), w[4 * i + 1] = bits<2>(v[i], 3);
      w[4 * i + 2] = bits<4>(v[i], 3), w[4 * i + 3] = bits<6>(v[i], 3);
    }
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) w[i] = bits<0>(v[i], 15), w[i + 4] = bits<4>(v[i], 15);
  }
  if constexpr (Id == kMxFour) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxNumbers));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) w[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), w[i]);
  }
}

template <FormId Id>
inline void unpack_block(const uint8_t* from, uint8_t* to) {
  for (int half = 0; half < 2; half++) {
    __m256i w[8];
    load_block<Id>(from + 32 * half, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 * i + 32 * half), w[i]);
  }
}

constexpr int kUnpack = 8;

#include "forms.h"

inline vi neighbours(vh pairs, int16_t each) { return (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(each)); }
#include "pairs.h"

// Products of quads [I, I + Count) with one row. Of signed quants: |w| times x with w's sign; two of 8 bits fit because x is
// never -128.
template <FormId Id, int I, int Count>
QUIRE_INLINE __m256i dot(const __m256i* w, const int8_t* x) {
  const auto product = [&](int i) {
    const __m256i quad = _mm256_set1_epi32(reinterpret_cast<const int32_t*>(x)[i]);
    constexpr bool has_sign = Id == kByte || Id == kMxFour;
    return (vh)(has_sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(quad, w[i]))
                         : _mm256_maddubs_epi16(w[i], quad));
  };
  return (__m256i)add_products<pairs_that_fit(kForms[Id].bits), I, Count>(product);
}

// A dot product of a half of a block, less what quants that were made unsigned have added.
template <FormId Id, int Half>
QUIRE_INLINE __m256i half_dot(const __m256i* w, const int8_t* x, const int32_t* excess) {
  const __m256i sum = dot<Id, 4 * Half, 4>(w, x);
  if constexpr (Id == kTwoK) return sum;
  return _mm256_add_epi32(sum, _mm256_set1_epi32(Id == kThreeK ? excess[16 + 16 * Half] >> 3 : excess[16 + 16 * Half]));
}

// R rows from m on, within one tile of 16; outputs 8 * half .. of group g.
template <int R, int half, typename Source>
void tile(Source from, int g, Rows x, int m, Out out) {
  constexpr int last = Source::halves;
  vf acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) acc[r] = vf{};
  for (int b = 0; b < x.blocks(); b++) {
    from.enter(b);
    __m256i w[8];
    if constexpr (Source::bytes) load_block<kByte>(from.quants(b) + 32 * half, w);
    else load_block<Source::id>(from.quants(b) + 32 * half, w);
    const vf scale = from.scale(b, 8 * half), scale2 = from.scale(b, 8 * half, last);
    const vf minimum = from.minimum(b, 8 * half, last), first_minimum = from.minimum(b, 8 * half);
    const float* factors = x.scale(m, b);
    const int8_t* xq = x.quants(m, b);
    const int32_t* excess = x.excesses(m, b);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      if constexpr (Source::halves) {
        const __m256i first = half_dot<Source::id, 0>(w, xq + r * kBlock, excess + r);
        const __m256i second = half_dot<Source::id, 1>(w, xq + r * kBlock, excess + r);
        acc[r] = fma(_mm256_cvtepi32_ps(first), scale * factors[r], acc[r]);
        acc[r] = fma(_mm256_cvtepi32_ps(second), scale2 * factors[r], acc[r]);
      } else {
        acc[r] = fma(_mm256_cvtepi32_ps(dot<Source::id, 0, 8>(w, xq + r * kBlock)), scale * factors[r], acc[r]);
      }
      if (Source::minima) acc[r] = fma(minimum, splat(factors[16 + r]), acc[r]);
      if (Source::minima && Source::halves) acc[r] = fma(first_minimum - minimum, splat(factors[32 + r]), acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    float* to = out.at(m + r, g) + 8 * half;
    if (out.bias) acc[r] += load(out.bias + g * kLanes + 8 * half);
    acc[r] *= out.scale;
    if (out.add) acc[r] = load(to) + acc[r];
    store(to, acc[r]);
  }
}

template <int half, typename Source>
void rows(Source from, int g, Rows x, int m0, int m1, Out out) {
  int m = m0;
  for (; m + 4 <= m1; m += 4) tile<4, half>(from, g, x, m, out);
  switch (m1 - m) {
    case 3: return tile<3, half>(from, g, x, m, out);
    case 2: return tile<2, half>(from, g, x, m, out);
    case 1: return tile<1, half>(from, g, x, m, out);
  }
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  each_group(pieces, count, m1 - m0, scratch, [&](const auto& from, int g, Out out) {
    rows<0>(from, g, x, m0, m1, out);
    rows<1>(from, g, x, m0, m1, out);
  });
}

void begin() {}
void end() {}

const Kernels kTable = QUIRE_KERNELS("avx2", gemm);

}  // namespace

const Kernels* kernels_avx2() {
  unsigned a, b, c, d;  // clang before 19 does not know "f16c" by name
  const bool halves = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  return halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kTable : nullptr;
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
