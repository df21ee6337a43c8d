// Kernels for any machine: plain loops, and the twin the others are tested against.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels.h"

namespace quire {
namespace {

#define QUIRE_WIDTH 4
typedef float vf4 __attribute__((vector_size(16)));
inline vf4 fma(vf4 a, vf4 b, vf4 c) { return a * b + c; }
inline vf4 maximum(vf4 a, vf4 b) { return a > b ? a : b; }
inline vf4 minimum(vf4 a, vf4 b) { return a < b ? a : b; }
#include "simd.h"

inline vi lane_numbers() { return vi{0, 1, 2, 3}; }
inline float sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline uint32_t sum(vu v) { return v[0] + v[1] + v[2] + v[3]; }
inline bool any(vi mask) { return mask[0] | mask[1] | mask[2] | mask[3]; }
inline float highest(vf v) {
  float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

inline vf load_half(const uint16_t* p) {
  return vf{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
inline void store_half(uint16_t* p, vf v) {
  for (int i = 0; i < W; i++) p[i] = float_to_half(v[i]);
}
inline void store_bytes(int8_t* p, vi v) {
  for (int i = 0; i < W; i++) p[i] = int8_t(v[i]);
}

inline vi load_bytes(const int8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
inline vi load_bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }

inline float fold(vf v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline vf fold_quads(vf a, vf b, vf c, vf d) { return vf{fold(a), fold(b), fold(c), fold(d)}; }

inline void dots16(const float* q, const float* k, int dim, float* out) {
  for (int j = 0; j < 16; j++) {
    vf acc = {};
    for (int i = 0; i < dim; i += W) acc = fma(load(q + i), load(k + i * kKeys + j * W), acc);
    out[j] = fold(acc);
  }
}

inline void fma_lanes(vf y, const vf* x, vf* out) {
  for (int i = 0; i < W; i++) out[i] = fma(x[i], splat(y[i]), out[i]);
}

#include "stages.h"

#include "recurrent.h"

#include "attend.h"

#include "draw.h"
#include "score.h"

int32_t dot16(const int8_t* w, const int8_t* x) {
  int32_t acc = 0;
  for (int i = 0; i < 16; i++) acc += int32_t(w[i]) * x[i];
  return acc;
}

void gemm(const Matrix& w, int g0, int g1, Rows x, int m0, int m1, Out out) {
  struct Block {
    int8_t quants[kBlock];
    float scales[2], minima[2];
  };
  std::vector<Block> row(w.blocks());
  for (int g = g0; g < g1; g++)
    for (int lane = 0; lane < kLanes; lane++) {
      for (int b = 0; b < w.blocks(); b++) {
        unpack_quants(w, g, b, lane, row[b].quants);
        block_scales(w, g, b, lane, row[b].scales, row[b].minima);
      }
      for (int m = m0; m < m1; m++) {
        float acc = 0;
        for (int b = 0; b < w.blocks(); b++) {
          const int8_t *quants = row[b].quants, *xq = x.quants(m, b);
          const float *factors = x.scale(m, b), *minima = row[b].minima;
          int32_t first = dot16(quants, xq), second = dot16(quants + 16, xq + 16);
          if (w.how().halves) {
            acc += float(first) * (row[b].scales[0] * factors[0]);
            acc += float(second) * (row[b].scales[1] * factors[0]);
          } else {
            acc += float(first + second) * (row[b].scales[0] * factors[0]);
          }
          if (w.how().minima) acc += minima[1] * factors[16];
          if (w.how().minima && w.how().halves) acc += (minima[0] - minima[1]) * factors[32];
        }
        if (out.bias) acc += out.bias[g * kLanes + lane];
        acc *= out.scale;
        float* to = out.at(m, g) + lane;
        *to = out.add ? *to + acc : acc;
      }
    }
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch) {
  for (const Piece* p = pieces; p < pieces + count; p++) gemm(*p->w, p->g0, p->g1, x, m0, m1, p->out);
}

void begin() {}
void end() {}

const Kernels kTable = QUIRE_KERNELS("base", gemm);


}  // namespace

const Kernels* kernels_base() { return &kTable; }

}  // namespace quire
