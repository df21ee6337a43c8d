// What every file of the extension shares: packed matrices and quantised rows. Refuses to know: Python, models, threads.
//
// A packed matrix [n, k] interleaves 16 output rows ("a group"), so that one vector of 64 bytes holds the same four inputs
// ("a quad") of 16 outputs. The quants of a block of 32 inputs, 8 quads, take as many vectors as a quant has bits; pack.cpp
// says where each bit lies. A group is a series of runs of blocks, and a run
//
//   of 8 blocks (a K-quant's super-block)   [fp16 factors] [small integers, a byte each] [quants]
//   of one block                            [quants] [fp16 scales and minima]
//
// Where there are no minima, scales or factors of all runs follow behind the last.
#pragma once

#include <cstddef>
#include <cstdint>

// In inner loops, which compilers find too large; a call among vectors also costs all registers that hold them.
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

constexpr int kLanes = 16;  // output rows of a group
constexpr int kBlock = 32;  // inputs that share a scale

// How weights are kept: weight = scale * quant + minimum, or, with no minima, scale * signed quant.
struct Form {
  int bits;         // of a quant: unsigned where there are minima
  int run;          // blocks that share fp16 factors: 1 or 8; of 8, scales and minima are these times small integers
  int integers;     // bytes of such of a run, for each output
  bool minima;
  bool halves;      // each half of a block has a scale, and a minimum, of its own
  int scale_bytes;  // 2: fp16. 1: a power of two, its exponent as that of a float

  // Bytes of a block's quants; of a run's factors (or scales and minima), what lies before its quants, all of it; and of its
  // scales behind all runs.
  QUIRE_INLINE constexpr size_t quant_bytes() const { return size_t(bits) * 64; }
  QUIRE_INLINE constexpr size_t factor_bytes() const { return minima ? 64 : 0; }
  QUIRE_INLINE constexpr size_t head_bytes() const { return run == 1 ? 0 : factor_bytes() + integers * kLanes; }
  QUIRE_INLINE constexpr size_t run_bytes() const {
    return head_bytes() + run * quant_bytes() + (run == 1 ? factor_bytes() : 0);
  }
  QUIRE_INLINE constexpr size_t behind_bytes() const { return minima ? 0 : size_t(scale_bytes) * kLanes; }
  // Lines of the cache that a block takes, its share of all that is beside its quants counted in.
  QUIRE_INLINE constexpr int block_lines() const { return int((run_bytes() + behind_bytes() + 64 * run - 1) / (64 * run)); }
  // Where these of block b are, from the beginning of its group on.
  QUIRE_INLINE constexpr size_t head_at(int b) const { return b / run * run_bytes(); }
  QUIRE_INLINE constexpr size_t quants_at(int b) const { return head_at(b) + head_bytes() + b % run * quant_bytes(); }
  QUIRE_INLINE constexpr size_t integers_at(int b) const { return head_at(b) + factor_bytes(); }
};

enum FormId : int32_t { kByte, kNibble, kFive, kSixK, kFiveK, kFourK, kThreeK, kTwoK, kMxFour };

// The last is of MXFP4: quants stand for numbers of `kMxNumbers`.
constexpr Form kForms[] = {{8, 1, 0, false, false, 2},  {4, 1, 0, true, false, 2}, {5, 1, 0, true, false, 2},
                           {6, 8, 16, false, true, 2},  {5, 8, 16, true, false, 2}, {4, 8, 16, true, false, 2},
                           {3, 8, 16, false, true, 2},  {2, 8, 16, true, true, 2},  {4, 1, 0, false, false, 1}};
constexpr int8_t kMxNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Matrix {
  const uint8_t* data;
  int32_t n, k;
  FormId form;

  QUIRE_INLINE const Form& how() const { return kForms[form]; }
  QUIRE_INLINE int blocks() const { return k / kBlock; }
  QUIRE_INLINE int groups() const { return (n + kLanes - 1) / kLanes; }
  QUIRE_INLINE size_t runs_bytes() const { return blocks() / how().run * how().run_bytes(); }
  QUIRE_INLINE size_t group_bytes() const {
    return runs_bytes() + (blocks() / how().run * how().behind_bytes() + 63) / 64 * 64;
  }
  QUIRE_INLINE const uint8_t* group(int g) const { return data + g * group_bytes(); }
  QUIRE_INLINE const uint8_t* integers(int g, int b) const { return group(g) + how().integers_at(b); }
  QUIRE_INLINE const uint8_t* quants(int g, int b) const { return group(g) + how().quants_at(b); }
  QUIRE_INLINE const uint8_t* scales(int g, int b) const {  // or factors; and minima
    if (!how().minima) return group(g) + runs_bytes() + b / how().run * how().behind_bytes();
    return group(g) + how().head_at(b) + (how().run == 1 ? how().quant_bytes() : 0);
  }
};

// Activations, int8 per block of 32 inputs, in tiles of 16 rows so that a block of a tile is contiguous and a kernel
// finds all its rows at fixed distances. Memory is there for whole tiles.
struct Rows {
  int8_t* q;        // [tile, block, 16 rows, 32]
  float* factors;   // [tile, block, 3, 16 rows]: the scale; scale * sum of the quants, and of their first half, for minima
  int32_t* excess;  // [tile, block, 3, 16 rows]: sum of the quants * -128, of each half * -32: what weights that are made
                    // unsigned have added too much
  int32_t k;

  QUIRE_INLINE int blocks() const { return k / kBlock; }
  QUIRE_INLINE size_t place(int row, int block) const { return (size_t(row / 16) * blocks() + block) * 16; }
  QUIRE_INLINE int8_t* quants(int row, int block) const { return q + (place(row, block) + row % 16) * kBlock; }
  QUIRE_INLINE float* scale(int row, int block) const { return factors + place(row, block) * 3 + row % 16; }
  QUIRE_INLINE int32_t* excesses(int row, int block) const { return excess + place(row, block) * 3 + row % 16; }
};

// Where a multiplication puts its results.
struct Out {
  float* data;
  size_t stride;
  const float* bias;  // or null
  bool add;           // add to what is there (the residual)
  int32_t row, group;  // what data[0] is
  float scale = 1.0f;  // of the product and its bias, before that

  QUIRE_INLINE float* at(int m, int g) const { return data + size_t(m - row) * stride + size_t(g - group) * kLanes; }
};

// Groups [g0, g1) of a matrix to multiply by.
struct Piece {
  const Matrix* w;
  int32_t g0, g1;
  Out out;
};

bool pack(int32_t kind, const uint8_t* rows, int32_t first, int32_t count, const Matrix& into);
void scale_rows(const Matrix& m, const float* factors);  // each row by a factor
void unpack_row(const Matrix& m, int32_t row, float* out);
void unpack_quants(const Matrix& m, int g, int b, int lane, int8_t* out);  // 32 of one row
// Of one row's block: the scales of its first and of its second half, and the minima.
void block_scales(const Matrix& m, int g, int b, int lane, float* scales, float* minima);
float half_to_float(uint16_t h);
uint16_t float_to_half(float f);

}  // namespace quire
