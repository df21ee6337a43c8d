// AVX-512 with VNNI, and with AMX where the host has it. Both give the same bits: integer dot products of a block
// are exact, and floats are added block by block in the same order.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,amx-tile,amx-int8")
#endif
#include <immintrin.h>

namespace quire {
namespace {

constexpr int kMxOffset = 128;
#include "avx512.h"

// acc + w . x of four neighbours each, x the same for all: one instruction, which compilers take two for.
QUIRE_INLINE __m512i add_dots(__m512i acc, __m512i w, const int32_t* x) {
  asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
  return acc;
}

// Row after row within each quad: an instruction waits five cycles for the one of its own row before it, and as few as are under
// way let the processor see what is behind them. Of few rows each has two sums, which need not wait for each other.
template <FormId Id, int I, int Count, int R>
QUIRE_INLINE void dots(const __m512i* w, const int8_t* x, const int32_t* excess, __m512i* to) {
  constexpr int sums = R <= kFew && Count == 8 ? 2 : 1, quads = Count / sums;
  __m512i more[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) to[r] = less_excess<Id>(excess + r, I / 4), more[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = I; i < I + quads; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const int32_t* at = reinterpret_cast<const int32_t*>(x + r * kBlock) + i;
      to[r] = add_dots(to[r], w[i], at);
      if (sums == 2) more[r] = add_dots(more[r], w[i + quads], at + quads);
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    if (sums == 2) to[r] = _mm512_add_epi32(to[r], more[r]);
}

const Kernels kTable = QUIRE_KERNELS("avx512", gemm);

#include "amx.h"

}  // namespace

const Kernels* kernels_avx512() {
  bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
  return has ? &kTable : nullptr;
}

const Kernels* kernels_amx() { return kernels_avx512() && amx::permitted() ? &amx::kTable : nullptr; }

}  // namespace quire

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
namespace quire {
const Kernels* kernels_avx512() { return nullptr; }
const Kernels* kernels_amx() { return nullptr; }
}  // namespace quire
#endif
