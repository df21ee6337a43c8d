// Multiplication by SMMLA for eight rows and more: each takes two rows, two outputs and eight inputs at once, twice the
// work of a dot product. Included by isa_neon.cpp in its namespace; gives the same bits as its other kernels.
namespace i8mm {

// The eight weight vectors of a block for 4 outputs from vector v on: [inputs / 8][first or last two outputs].
template <typename Source>
QUIRE_INLINE void load_pairs(const Source& from, int b, int v, int8x16_t* w) {
  int8x16_t quads[8];
  load_quads(from, b, v, quads);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    int32x4_t even = vreinterpretq_s32_s8(quads[2 * i]), odd = vreinterpretq_s32_s8(quads[2 * i + 1]);
    w[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
    w[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
  }
}

inline int8x16_t pair(const int8_t* a, const int8_t* b) { return vcombine_s8(vld1_s8(a), vld1_s8(b)); }

// Products of two rows, `xq` of the first, with 4 outputs over inputs 8 * I .. of a block: as [row], [output].
template <int I, int Count>
QUIRE_INLINE void dots(const int8_t* xq, const int8x16_t* w, int32x4_t* out) {
  int32x4_t low = none(), high = low;  // [row, output] of the first and the last two outputs
#pragma GCC unroll 4
  for (int i = I; i < I + Count; i++) {
    int8x16_t both = pair(xq + 8 * i, xq + kBlock + 8 * i);
    low = vmmlaq_s32(low, both, w[2 * i]);
    high = vmmlaq_s32(high, both, w[2 * i + 1]);
  }
  int64x2_t a = vreinterpretq_s64_s32(low), z = vreinterpretq_s64_s32(high);
  out[0] = vreinterpretq_s32_s64(vzip1q_s64(a, z));
  out[1] = vreinterpretq_s32_s64(vzip2q_s64(a, z));
}

// Eight rows from m on, within one tile of 16; 4 outputs from vector v on.
template <typename Source>
void tile8(Source from, int g, int v, Rows x, int m, Out out) {
  float32x4_t acc[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; r++) acc[r] = vdupq_n_f32(0);
  for (int b = 0; b < x.blocks(); b++) {
    from.enter(b);
    int8x16_t weights[8];
    load_pairs(from, b, v, weights);
    const float* factors = x.scale(m, b);
    const int8_t* xq = x.quants(m, b);
    const Levels by = Levels::of(from, b, 4 * v);
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
      int32x4_t first[2], second[2];
      if constexpr (Source::halves) {
        dots<0, 2>(xq + r * kBlock, weights, first);
        dots<2, 2>(xq + r * kBlock, weights, second);
      } else {
        dots<0, 4>(xq + r * kBlock, weights, first);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++)
        acc[r + i] = add_block<Source>(acc[r + i], first[i], second[i], by, factors + r + i);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < 8; r++) finish(out, m + r, g, v, acc[r]);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  each_group(pieces, count, m1 - m0, scratch, [&](const auto& from, int g, Out out) {
    int m = m0;
    for (; m + 8 <= m1; m += 8)
      for (int v = 0; v < 4; v++) tile8(from, g, v, x, m, out);
    if (m < m1) rows(from, g, x, m, m1, out);
  });
}

const Kernels kTable = QUIRE_KERNELS("i8mm", gemm);

}  // namespace i8mm
