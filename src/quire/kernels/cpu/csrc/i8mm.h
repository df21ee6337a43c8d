// Multiplication by SMMLA for eight rows and more: each takes two rows, two outputs and eight inputs at once, twice the
// work of a dot product. Included by isa_neon.cpp in its namespace; gives the same bits as its other kernels.
namespace i8mm {

// The eight weight vectors of a block for 4 outputs from vector v on: [inputs / 8][first or last two outputs].
template <int Bits>
inline void load_pairs(const uint8_t* p, int8x16_t* w) {
  int32x4_t quads[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    if (Bits == 4) {
      uint8x16_t both = vld1q_u8(p + 64 * i);
      quads[i] = vreinterpretq_s32_u8(vandq_u8(both, vdupq_n_u8(15)));
      quads[i + 4] = vreinterpretq_s32_u8(vshrq_n_u8(both, 4));
    } else {
      quads[i] = vreinterpretq_s32_u8(vld1q_u8(p + 64 * i));
      quads[i + 4] = vreinterpretq_s32_u8(vld1q_u8(p + 64 * (i + 4)));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    w[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(quads[2 * i], quads[2 * i + 1]));
    w[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(quads[2 * i], quads[2 * i + 1]));
  }
}

inline int8x16_t pair(const int8_t* a, const int8_t* b) { return vcombine_s8(vld1_s8(a), vld1_s8(b)); }

// Eight rows from m on, within one tile of 16; 4 outputs from vector v on.
template <int Bits>
void tile8(const Matrix& w, int g, int v, Rows x, int m, Out out) {
  float32x4_t acc[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; r++) acc[r] = vdupq_n_f32(0);
  for (int b = 0; b < w.blocks(); b++) {
    int8x16_t weights[8];
    load_pairs<Bits>(w.quants(g, b) + 16 * v, weights);
    const uint16_t* scales = w.scales(g, b) + 4 * v;
    const float* factors = x.scale(m, b);
    const int8_t* xq = x.quants(m, b);
    vf d = load_half(scales), minimum = Bits == 4 ? load_half(scales + kLanes) : d;
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
      int32x4_t low = vdupq_n_s32(0), high = low;  // [row, output] of the first and the last two outputs
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        int8x16_t both = pair(xq + r * kBlock + 8 * i, xq + (r + 1) * kBlock + 8 * i);
        low = vmmlaq_s32(low, both, weights[2 * i]);
        high = vmmlaq_s32(high, both, weights[2 * i + 1]);
      }
      int64x2_t a = vreinterpretq_s64_s32(low), z = vreinterpretq_s64_s32(high);
      int32x4_t dots[2] = {vreinterpretq_s32_s64(vzip1q_s64(a, z)), vreinterpretq_s32_s64(vzip2q_s64(a, z))};
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) acc[r + i] = accumulate<Bits>(acc[r + i], dots[i], d, minimum, factors + r + i);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < 8; r++) finish(out, m + r, g, v, acc[r]);
}

template <int Bits>
void group(const Matrix& w, int g, Rows x, int m0, int m1, Out out) {
  int m = m0;
  for (; m + 8 <= m1; m += 8)
    for (int v = 0; v < 4; v++) tile8<Bits>(w, g, v, x, m, out);
  if (m < m1) rows<Bits>(w, g, x, m, m1, out);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch) {
  for (const Piece* p = pieces; p < pieces + count; p++)
    for (int g = p->g0; g < p->g1; g++)
      p->w->bits == 4 ? group<4>(*p->w, g, x, m0, m1, p->out) : group<8>(*p->w, g, x, m0, m1, p->out);
}

const Kernels kTable = QUIRE_KERNELS("i8mm", gemm);

}  // namespace i8mm
