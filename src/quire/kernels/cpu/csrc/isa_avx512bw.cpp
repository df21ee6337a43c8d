// AVX-512 without VNNI (Skylake's). The same bits as with it: integer dot products of a block are exact.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")
#endif
#include <immintrin.h>

namespace quire {
namespace {

constexpr int kMxOffset = 16;
#include "avx512.h"

inline vi neighbours(vh pairs, int16_t each) { return (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(each)); }
#include "pairs.h"

// Bytes do not fit even two at a time: their halves do, which are 4 bits each.
template <FormId Id, int I, int Count>
QUIRE_INLINE __m512i dot(const __m512i* w, const int32_t* quads, const int32_t* excess) {
  const auto times = [&](__m512i bytes, int i) { return (vh)_mm512_maddubs_epi16(bytes, _mm512_set1_epi32(quads[i])); };
  const auto low = [&](__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); };
  vi sum;
  if constexpr (Id == kByte) {
    sum = add_products<8, I, Count>([&](int i) { return times(low(_mm512_srli_epi16(w[i], 4)), i); }, 16);
    sum += add_products<8, I, Count>([&](int i) { return times(low(w[i]), i); });
  } else {
    constexpr int bits = Id == kMxFour ? 5 : kForms[Id].bits;  // its numbers are less than 32
    sum = add_products<pairs_that_fit(bits), I, Count>([&](int i) { return times(w[i], i); });
  }
  return _mm512_add_epi32((__m512i)sum, less_excess<Id>(excess, I / 4));
}

template <FormId Id, int I, int Count, int R>
QUIRE_INLINE void dots(const __m512i* w, const int8_t* x, const int32_t* excess, __m512i* to) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) to[r] = dot<Id, I, Count>(w, reinterpret_cast<const int32_t*>(x + r * kBlock), excess + r);
}

const Kernels kTable = QUIRE_KERNELS("avx512bw", gemm);

}  // namespace

const Kernels* kernels_avx512bw() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  return has ? &kTable : nullptr;
}

}  // namespace quire

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
namespace quire {
const Kernels* kernels_avx512bw() { return nullptr; }
}  // namespace quire
#endif
