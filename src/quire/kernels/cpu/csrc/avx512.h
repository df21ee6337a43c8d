// What both sets of AVX-512 share: vectors, unpacking, products. Included by each in its namespace, after `kMxOffset` (what
// makes MXFP4's numbers unsigned: 128 or 16); each defines `dot` behind it. Refuses to know: how bytes are multiplied.

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

// Unpacked bytes are unsigned already.
template <typename Source>
QUIRE_INLINE void load_quads(const uint8_t* p, __m512i* w) {
  if constexpr (!Source::bytes) return load_block<Source::id>(p, w);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) w[i] = _mm512_load_si512(p + 64 * i);
}

template <FormId Id>
inline void unpack_block(const uint8_t* from, uint8_t* to) {
  __m512i w[8];
  load_block<Id>(from, w);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) _mm512_store_si512(to + 64 * i, w[i]);
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

// Products of quads [I, I + Count) of a block with one row, from `less_excess` on.
template <FormId Id, int I, int Count>
__m512i dot(const __m512i* w, const int32_t* quads, const int32_t* excess);

constexpr int kUnpack = 64;

#include "forms.h"

// How an integer dot product enters a sum, and how those of a block whose halves have scales of their own do.
QUIRE_INLINE __m512 accumulate(__m512 acc, __m512i dot, __m512 scale, float factor) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(factor)), acc);
}
QUIRE_INLINE __m512 add_halves(__m512 acc, __m512 one, __m512 two, __m512 first, __m512 second, __m512 factor) {
  return _mm512_fmadd_ps(_mm512_fmadd_ps(two, second, _mm512_mul_ps(one, first)), factor, acc);
}

constexpr int kAhead = 2560;  // bytes: weights stream from memory, and are asked for this early

// What minima add to a row.
template <typename Source>
QUIRE_INLINE __m512 add_minima(__m512 acc, __m512 first, __m512 second, const float* factors) {
  if constexpr (!Source::minima) return acc;
  acc = _mm512_fmadd_ps(second, _mm512_set1_ps(factors[16]), acc);
  return Source::halves ? _mm512_fmadd_ps(_mm512_sub_ps(first, second), _mm512_set1_ps(factors[32]), acc) : acc;
}

// R rows from m on, within one tile of 16.
template <int R, typename Source>
void tile(Source from, int g, Rows x, int m, Out out, bool first) {
  const int8_t* xq = x.quants(m, 0);
  const float* factors = x.scale(m, 0);
  const int32_t* excess = x.excesses(m, 0);
  constexpr int last = Source::halves;
  __m512 acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
  for (int b = 0; b < x.blocks(); b++, xq += 512, factors += 48, excess += 48) {
    from.enter(b);
    __m512i v[8];
    load_quads<Source>(from.quants(b), v);
    if (first) from.template fetch<kAhead>(b);  // later tiles of the same weights find them in the cache
    const __m512 scale = from.scale(b, 0), minimum = from.minimum(b, 0, last);
    const __m512 scale2 = last ? from.scale(b, 0, 1) : scale, first_minimum = last ? from.minimum(b, 0) : minimum;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const int32_t* quads = reinterpret_cast<const int32_t*>(xq + r * kBlock);
      if constexpr (Source::halves) {
        const __m512 one = _mm512_cvtepi32_ps(dot<Source::id, 0, 4>(v, quads, excess + r));
        const __m512 two = _mm512_cvtepi32_ps(dot<Source::id, 4, 4>(v, quads, excess + r));
        acc[r] = add_halves(acc[r], one, two, scale, scale2, _mm512_set1_ps(factors[r]));
      } else {
        acc[r] = accumulate(acc[r], dot<Source::id, 0, 8>(v, quads, excess + r), scale, factors[r]);
      }
      acc[r] = add_minima<Source>(acc[r], first_minimum, minimum, factors + r);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) finish(out, m + r, g, acc[r]);
}

template <typename Source>
void rows(Source from, int g, Rows x, int m0, int m1, Out out) {
  int m = m0;
  for (; m + 8 <= m1; m += 8) tile<8>(from, g, x, m, out, m == m0);
  switch (m1 - m) {
    case 7: return tile<7>(from, g, x, m, out, m == m0);
    case 6: return tile<6>(from, g, x, m, out, m == m0);
    case 5: return tile<5>(from, g, x, m, out, m == m0);
    case 4: return tile<4>(from, g, x, m, out, m == m0);
    case 3: return tile<3>(from, g, x, m, out, m == m0);
    case 2: return tile<2>(from, g, x, m, out, m == m0);
    case 1: return tile<1>(from, g, x, m, out, m == m0);
  }
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  each_group(pieces, count, m1 - m0, scratch, [&](const auto& from, int g, Out out) { rows(from, g, x, m0, m1, out); });
}

void begin() {}
void end() {}
