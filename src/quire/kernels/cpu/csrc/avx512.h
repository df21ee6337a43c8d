// What both sets of AVX-512 share: vectors, unpacking, products. Included by each in its namespace, after `kMxOffset` (what
// makes MXFP4's numbers unsigned: 128 or 16); each defines `dots` behind it. Refuses to know: how bytes are multiplied.

#define QUIRE_WIDTH 16
inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512 maximum(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
inline __m512 minimum(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
#include "simd.h"

inline vi lane_numbers() { return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline float sum(vf v) { return _mm512_reduce_add_ps(v); }
inline uint32_t sum(vu v) { return uint32_t(_mm512_reduce_add_epi32((__m512i)v)); }
inline bool any(vi mask) { return _mm512_movepi32_mask((__m512i)mask); }
inline float highest(vf v) { return _mm512_reduce_max_ps(v); }
inline vf load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store_half(uint16_t* p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bytes(int8_t* p, vi v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}

inline vi load_bytes(const int8_t* p) {
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vi load_bytes(const uint8_t* p) {
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline vf fold_pairs(vf a, vf b) { return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd); }
inline vf fold_quads(vf a, vf b, vf c, vf d) {  // within each 128-bit lane: the sums of a, b, c, d
  return fold_pairs(fold_pairs(a, b), fold_pairs(c, d));
}
inline vf fold_lanes(vf a, vf b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); }

inline void dots16(const float* q, const float* k, int dim, float* out) {
  vf acc[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++) acc[j] = load(q) * load(k + j * W);
  for (int i = W; i < dim; i += W) {
    vf x = load(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) acc[j] = fma(x, load(k + i * kKeys + j * W), acc[j]);
  }
  vf s[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) s[j] = fold_quads(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
  store(out, fold_lanes(fold_lanes(s[0], s[1]), fold_lanes(s[2], s[3])));
}

#include "stages.h"

#include "recurrent.h"

#include "attend.h"

#include "draw.h"
#include "score.h"

inline void finish(Out out, int m, int g, __m512 acc) {
  float* to = out.at(m, g);
  if (out.bias) acc = _mm512_add_ps(acc, _mm512_loadu_ps(out.bias + g * kLanes));
  acc = _mm512_mul_ps(acc, _mm512_set1_ps(out.scale));
  if (out.add) acc = _mm512_add_ps(_mm512_loadu_ps(to), acc);
  _mm512_storeu_ps(to, acc);
}

constexpr float kUnit = 1.0f, kZero = 0.0f;
QUIRE_INLINE void bytes_to_floats(bytes16 bytes, vf* to) {
  to[0] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
}

// Bits of bytes from Shift on, of which `mask` leaves what is wanted, exclusively or'ed with `with`.
template <int Shift>
QUIRE_INLINE __m512i bits(__m512i v, int mask, __m512i with) {
  const __m512i shifted = Shift ? _mm512_srli_epi16(v, Shift) : v;
  return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(char(mask)), with, 0x6a);  // a & b ^ c
}

// The 8 vectors of a block, as unsigned bytes: quants that are signed are too large by 128 (6 bits: 32, 3 bits: 4), MXFP4's
// numbers by kMxOffset.
template <FormId Id>
QUIRE_INLINE void load_block(const uint8_t* p, __m512i* w) {
  constexpr int stored = kForms[Id].bits;
  __m512i v[stored];
#pragma GCC unroll 8
  for (int i = 0; i < stored; i++) v[i] = _mm512_loadu_si512(p + 64 * i);
  const __m512i none = _mm512_setzero_si512();
  if constexpr (Id == kByte) {
    const __m512i flip = _mm512_set1_epi8(-128);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) w[i] = _mm512_xor_si512(v[i], flip);
  } else if constexpr (stored == 6) {
    const __m512i flip = _mm512_set1_epi8(32);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m512i* three = v + 3 * half;
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) w[4 * half + i] = bits<0>(three[i], 63, flip);
      w[4 * half + 3] = bits<2>(three[2], 48, bits<4>(three[1], 12, bits<6>(three[0], 3, flip)));
    }
  } else if constexpr (stored == 5) {
    const __m512i low = _mm512_set1_epi8(31);
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) w[i] = _mm512_and_si512(v[i], low);
    w[5] = bits<3>(v[0], 28, bits<6>(v[1], 3, none));
    w[6] = bits<3>(v[2], 28, bits<6>(v[3], 3, none));
    w[7] = bits<3>(v[4], 28, bits<4>(v[1], 2, bits<5>(v[3], 1, none)));
  } else if constexpr (stored == 3) {
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) w[3 * i] = bits<0>(v[i], 7, none), w[3 * i + 1] = bits<3>(v[i], 7, none);
    w[2] = bits<6>(v[0], 3, bits<4>(v[2], 4, none));
    w[5] = bits<6>(v[1], 3, bits<5>(v[2], 4, none));
  } else if constexpr (stored == 2) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      w[4 * i] = bits<0>(v[i], 3, none);
      w[4 * i + 1] = bits<2>(v[i], 3, none);
      w[4 * i + 2] = bits<4>(v[i], 3, none);
      w[4 * i + 3] = bits<6>(v[i], 3, none);
    }
  } else {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      w[i] = _mm512_and_si512(v[i], low);
      w[i + 4] = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), low);
    }
  }
  if constexpr (Id == kMxFour) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxNumbers));
    const __m512i table = _mm512_add_epi8(_mm512_broadcast_i32x4(numbers), _mm512_set1_epi8(char(kMxOffset)));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) w[i] = _mm512_shuffle_epi8(table, w[i]);
  }
}

// What is added to dot products of a row: less what quants that were made unsigned have added; of a half, if halves are apart.
template <FormId Id>
QUIRE_INLINE __m512i less_excess(const int32_t* excess, int half) {
  if constexpr (Id == kByte || Id == kMxFour) {
    if (half) return _mm512_setzero_si512();
    const __m512i all = _mm512_set1_epi32(excess[0]);
    return Id == kMxFour && kMxOffset == 16 ? _mm512_srai_epi32(all, 3) : all;
  }
  if constexpr (Id == kSixK) return _mm512_set1_epi32(excess[16 + 16 * half]);
  if constexpr (Id == kThreeK) return _mm512_srai_epi32(_mm512_set1_epi32(excess[16 + 16 * half]), 3);
  return _mm512_setzero_si512();
}

// Products of quads [I, I + Count) of a block with each of R rows, from `less_excess` on.
template <FormId Id, int I, int Count, int R>
void dots(const __m512i* w, const int8_t* x, const int32_t* excess, __m512i* to);

constexpr int kUnpack = INT32_MAX;  // never: rows of a large tile share one unpacking, in registers

#include "forms.h"

// acc + a * b, in the register that acc is in: compilers choose another, and move all of them once a block.
QUIRE_INLINE __m512 multiply_add(__m512 acc, __m512 a, __m512 b) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
QUIRE_INLINE __m512 multiply_add(__m512 acc, __m512 a, const float& b) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(b));
  return acc;
}

constexpr int kAhead = 2560;  // bytes: weights stream from memory, and are asked for this early
constexpr int kFew = 4;  // rows, so few that reading weights bounds them

// How an integer dot product enters a sum, and what minima add to it.
QUIRE_INLINE __m512 accumulate(__m512 acc, __m512i dot, __m512 scale, float factor) {
  return multiply_add(acc, _mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(factor)));
}
template <typename Source>
QUIRE_INLINE __m512 add_minima(__m512 acc, __m512 first, __m512 second, const float* factors) {
  if constexpr (!Source::minima) return acc;
  acc = multiply_add(acc, second, factors[16]);
  return Source::halves ? multiply_add(acc, _mm512_sub_ps(first, second), factors[32]) : acc;
}

// The next group's weights are asked for by all tiles of rows of this one together, a block's each time as many blocks have
// passed as there are tiles. A tile that is alone asks for what is a little further on (one of few rows by `Packed::fetch`).
struct Next {
  const uint8_t* at;
  int tiles, left;

  Next(const uint8_t* group, const uint8_t* end, int tiles) : at(tiles > 1 ? end : group + kAhead), tiles(tiles), left(tiles) {}
  template <int Lines>
  QUIRE_INLINE void fetch() {
    if (--left) return;
    left = tiles;
#pragma GCC unroll 16
    for (int i = 0; i < Lines; i++) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * Lines;
  }
};

// A block's products with R rows, scaled, on top of `acc`.
template <int R, typename Source>
QUIRE_INLINE void add_block(const Source& from, int b, const __m512i* w, const int8_t* xq, const float* factors,
                            const int32_t* excess, __m512* acc) {
  const __m512 scale = from.scale(b, 0), minimum = from.minimum(b, 0);
  __m512i dot[R];
  if constexpr (Source::halves) {
    __m512 first[R];
    dots<Source::id, 0, 4, R>(w, xq, excess, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) first[r] = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), scale);
    dots<Source::id, 4, 4, R>(w, xq, excess, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512 both = multiply_add(first[r], _mm512_cvtepi32_ps(dot[r]), from.scale(b, 0, 1));
      acc[r] = add_minima<Source>(multiply_add(acc[r], both, factors[r]), minimum, from.minimum(b, 0, 1), factors + r);
    }
  } else {
    dots<Source::id, 0, 8, R>(w, xq, excess, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      acc[r] = add_minima<Source>(accumulate(acc[r], dot[r], scale, factors[r]), minimum, minimum, factors + r);
  }
}

// Times * R rows from m on, within one tile of 16. Sums of R rows stay in registers; of more they lie in the cache, where R of
// them at a time are added to while a block's weights, unpacked once, stay in registers.
template <int R, int Times, typename Source>
QUIRE_INLINE void tile(Source from, int g, Rows x, int m, Out out, Next& next) {
  const int8_t* xq = x.quants(m, 0);
  const float* factors = x.scale(m, 0);
  const int32_t* excess = x.excesses(m, 0);
  const bool alone = R <= kFew && next.tiles == 1;
  Next coming = next;
  __m512 acc[Times * R];
#pragma GCC unroll 16
  for (int r = 0; r < Times * R; r++) acc[r] = _mm512_setzero_ps();
  for (int b = 0, blocks = x.blocks(); b < blocks; b++, xq += 512, factors += 48, excess += 48) {
    from.enter(b);
    __m512i w[8];
    load_block<Source::id>(from.quants(b), w);
    if (alone) from.template fetch<kAhead>(b);
    else coming.fetch<Source::form.block_lines()>();
#pragma GCC unroll 2
    for (int i = 0; i < Times * R; i += R)
      add_block<R>(from, b, w, xq + i * kBlock, factors + i, excess + i, acc + i);
  }
  next = coming;
#pragma GCC unroll 16
  for (int r = 0; r < Times * R; r++) finish(out, m + r, g, acc[r]);
}

// Not inlined: beside others it would have too few registers.
template <int R, int Times, typename Source>
__attribute__((noinline)) void large_tile(Source from, int g, Rows x, int m, Out out, Next& next) {
  tile<R, Times>(from, g, x, m, out, next);
}

template <typename Source>
void rows(Source from, int g, Rows x, int m, int m1, Out out) {
  const int count = m1 - m;
  Next next(from.group, from.end, count / 16 + (count % 16 + 7) / 8);
  for (; m + 16 <= m1; m += 16) large_tile<8, 2>(from, g, x, m, out, next);
  if (m + 8 <= m1) large_tile<8, 1>(from, g, x, m, out, next), m += 8;
  switch (m1 - m) {
    case 7: return large_tile<7, 1>(from, g, x, m, out, next);
    case 6: return large_tile<6, 1>(from, g, x, m, out, next);
    case 5: return large_tile<5, 1>(from, g, x, m, out, next);
    case 4: return tile<4, 1>(from, g, x, m, out, next);
    case 3: return tile<3, 1>(from, g, x, m, out, next);
    case 2: return tile<2, 1>(from, g, x, m, out, next);
    case 1: return tile<1, 1>(from, g, x, m, out, next);
  }
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  each_group(pieces, count, m1 - m0, scratch, [&](const auto& from, int g, Out out) { rows(from, g, x, m0, m1, out); });
}

void begin() {}
void end() {}
