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
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
  return acc;
}

template <FormId Id, int I, int Count>
QUIRE_INLINE __m512i dot(const __m512i* w, const int32_t* quads, const int32_t* excess) {
  __m512i one = less_excess<Id>(excess, I / 4), two = Count == 8 ? less_excess<Id>(excess, 1) : _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = I; i < I + 4; i++) {
    one = add_dots(one, w[i], quads + i);
    if (Count == 8) two = add_dots(two, w[i + 4], quads + i + 4);
  }
  return Count == 8 ? _mm512_add_epi32(one, two) : one;
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
