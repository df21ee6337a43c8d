// What every file of the extension shares: packed matrices, quantised rows, paged KV, and the table of kernels
// that each instruction set fills. Refuses to know: Python, models, threads.
//
// A packed matrix [n, k] interleaves 16 output rows ("a group"), so that one vector of 64 bytes holds the same four inputs
// ("a quad") of 16 outputs. The quants of a block of 32 inputs, 8 quads, take as many vectors as a quant has bits:
//
//   8 bits  a quad in each, int8
//   6 bits  quads 0..2 in the low bits of vectors 0..2, quad 3 in their high bits, two from each, the lowest first; quads
//           4..7 likewise in vectors 3..5; two's complement
//   5 bits  quads 0..4 in the low bits of vectors 0..4, quads 5..7 in their high bits (pack.cpp says which); unsigned
//   4 bits  quads 0..3 in the low bits of vectors 0..3, quads 4..7 in their high bits; unsigned
//
// Unsigned quants have minima: weight = scale * quant + minimum. Scales and minima are fp16, one for each block and output;
// or, in a run of 8 blocks (a K-quant's super-block), fp16 factors of the run, [16 outputs] of scales and of minima, times
// small integers of its blocks, as the file has them: with 5 bits its 12 bytes, [12][16 outputs], with 6 bits an int8 for
// each half of a block, [16][16 outputs].
//
// A group is a series of runs. Of 8 blocks: [fp16, if there are minima] [integers] [quants]; of one: [quants] [fp16, if there
// are minima]. Where there are none, the scales' fp16 of all runs follow behind the last.
#pragma once

#include <cstddef>
#include <cstdint>

#define QUIRE_INLINE inline __attribute__((always_inline))  // in inner loops, which compilers find too large

namespace quire {

constexpr int kLanes = 16;  // output rows of a group
constexpr int kBlock = 32;  // inputs that share a scale
constexpr int kKeys = 32;   // KV positions attended at a time, aligned to position 0
constexpr int kMostScales = 16;  // of a head: 4-bit heads have at most 256 numbers

struct Matrix {
  const uint8_t* data;
  int32_t n, k, bits;
  int32_t run;  // blocks that share fp16 factors: 1 or 8

  int blocks() const { return k / kBlock; }
  int groups() const { return (n + kLanes - 1) / kLanes; }
  bool minima() const { return bits < 6; }
  size_t quant_bytes() const { return size_t(bits) * 64; }  // of a block
  size_t head_bytes() const { return run == 1 ? 0 : 256; }  // of a run, before its quants
  size_t run_bytes() const { return head_bytes() + run * quant_bytes() + (run == 1 && minima() ? 64 : 0); }
  size_t runs_bytes() const { return blocks() / run * run_bytes(); }
  size_t group_bytes() const { return runs_bytes() + (minima() ? 0 : (blocks() / run * size_t(32) + 63) / 64 * 64); }
  const uint8_t* group(int g) const { return data + g * group_bytes(); }
  const uint8_t* head(int g, int b) const { return group(g) + b / run * run_bytes(); }
  const uint8_t* integers(int g, int b) const { return head(g, b) + (minima() ? 64 : 0); }
  const uint8_t* quants(int g, int b) const { return head(g, b) + head_bytes() + b % run * quant_bytes(); }
  const uint16_t* scales(int g, int b) const {  // and minima
    const uint8_t* at = !minima() ? group(g) + runs_bytes() + b / run * 32 : head(g, b) + (run == 1 ? quant_bytes() : 0);
    return reinterpret_cast<const uint16_t*>(at);
  }
};

// Activations, int8 per block of 32 inputs, in tiles of 16 rows so that a block of a tile is contiguous and a kernel
// finds all its rows at fixed distances. Memory is there for whole tiles.
struct Rows {
  int8_t* q;       // [tile, block, 16 rows, 32]
  float* factors;  // [tile, block, 2, 16 rows]: the scale; and scale * sum of the quants, for minima
  int32_t* total;  // [tile, block, 2, 16 rows]: sum of the quants; and of the first half of them
  int32_t k;

  int blocks() const { return k / kBlock; }
  size_t place(int row, int block) const { return (size_t(row / 16) * blocks() + block) * 16; }
  int8_t* quants(int row, int block) const { return q + (place(row, block) + row % 16) * kBlock; }
  float* scale(int row, int block) const { return factors + place(row, block) * 2 + row % 16; }
  float* sum(int row, int block) const { return scale(row, block) + 16; }
  int32_t* totals(int row, int block) const { return total + place(row, block) * 2 + row % 16; }
};

// Where a multiplication puts its results.
struct Out {
  float* data;
  size_t stride;
  const float* bias;  // or null
  bool add;           // add to what is there (the residual)
  int32_t row, group;  // what data[0] is

  float* at(int m, int g) const { return data + size_t(m - row) * stride + size_t(g - group) * kLanes; }
};

// Groups [g0, g1) of a matrix to multiply by.
struct Piece {
  const Matrix* w;
  int32_t g0, g1;
  Out out;
};

// How pages keep numbers; kernels/kv_views.py says the same in torch. 8 bits: a scale for each token and head; fewer: a scale
// and a minimum for each 32 numbers of it, numbers i and i + head_dim / 2 (2 bits: every head_dim / 4) in one byte. Of
// KIVI's keys, a scale and a minimum for each channel over kKeys tokens: for each of these runs [head][2][head_dim].
enum KvKind { kFloat32, kFloat16, kInt8, kFp8, kInt4, kKivi4, kKivi2 };

struct Paged {
  uint8_t* k;        // K of this layer in page 0; V lies v_offset bytes further
  uint16_t* scales;  // fp16, of that K; those of V lie v_scales() further
  size_t page_stride, v_offset;  // bytes
  int32_t tokens_per_page, kv_heads, head_dim, kind;

  size_t head_bytes() const {
    if (kind <= kFloat16) return kind == kFloat32 ? head_dim * 4 : head_dim * 2;
    return kind == kKivi2 ? head_dim / 4 : kind >= kInt4 ? head_dim / 2 : head_dim;
  }
  size_t token_stride() const { return kv_heads * head_bytes(); }
  int head_scales() const { return kind >= kInt4 ? head_dim / kBlock * 2 : kind > kFloat16; }
  size_t v_scales() const { return size_t(tokens_per_page) * kv_heads * head_scales(); }
  uint16_t* scales_of(int64_t page, int offset, int head) const {
    return scales + page * (page_stride / 2) + (size_t(offset) * kv_heads + head) * head_scales();
  }
};

// Queries that read the same KV: `rows` sequences whose first `shared` positions lie in the same pages.
// Where the keys of a row are. From position `base` on, where a tree of guesses begins, four bits of `path` each tell at
// which place from there on: the positions of a row's own branch, in order, whatever lies between them.
struct Table {
  const int32_t* pages;
  int32_t base;
  uint64_t path;

  int place(int position) const { return position < base ? position : base + int(path >> 4 * (position - base) & 15); }
};

constexpr int32_t kNoTree = INT32_MAX;

struct Query {
  const float* q;  // [heads, head_dim] of one token, scaled
  int32_t position;
  int32_t token;  // on the flat token axis: where its output goes
  const int32_t* pages;
  int32_t base = kNoTree;
  uint64_t path = 0;
  const int32_t* latest = nullptr;  // pages of its latest tokens, where they lie apart

  Table table() const { return {pages, base, path}; }
};

struct AttendArgs {
  Paged kv;
  int32_t heads, window;  // window 0: none
  const Query* queries;
  int32_t count;
  int32_t shared;  // leading KV positions all queries may read through queries[0].pages
  int32_t head_begin, head_end;  // KV heads to do
  Rows out;  // attention output, quantised [tokens, heads * head_dim]
  float* out_float;  // or, when head_dim is no multiple of 32 or a test asks, floats
  float* mass;       // or null: what all queries, which are then of one row, pay to each run is added, [KV heads, runs]
  int32_t mass_runs, mass_tokens;  // runs of so many tokens
  int32_t sparse = 0;  // not 0: the one query reads so many pages of each KV head
  int32_t sparse_local = 0, sparse_width = 0;  // tokens before it that it always reads; most pages of a table
  const uint16_t* bounds = nullptr;  // fp16, of page 0: [least and largest of keys][KV heads][head_dim]; null: by distance
  size_t bounds_stride = 0;          // numbers from page to page
  const Query* then = nullptr;  // whose keys will be wanted next, if that is known
  int32_t residual = 0;  // not 0: a query reads at least so many tokens before it from `latest`, in whole blocks
  Paged latest{};

  int rounded(int position) const { return position > residual ? (position - residual) / kKeys : 0; }  // blocks
};

// How one token is drawn.
struct Draw {
  uint32_t key[2];  // of the row's noise
  float temperature, log_min_p;
  double top_p;   // 1 or more: off
  int64_t top_k;  // the vocabulary or more: off
  bool greedy;    // the likeliest token, whatever else is said
};

struct Scratch {
  uint8_t* bytes;  // at least scratch_bytes(largest k), aligned to 64
};
// A group unpacked: quants as bytes [block, quad, 16 outputs, 4], then floats [block, 2, 16 outputs].
constexpr size_t scratch_bytes(size_t k) { return k * kLanes + k / kBlock * 2 * kLanes * sizeof(float); }

struct Kernels {
  const char* name;
  void (*begin)();  // once per thread and step
  void (*end)();
  void (*quantise)(const float* x, Rows out, int row);
  void (*norm_quantise)(const float* x, const float* weight, float eps, Rows out, int row);
  void (*norm)(const float* x, const float* weight, float eps, int k, float* out);
  void (*gemm)(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch);  // rows [m0, m1) of x
  void (*gate)(const float* gate, const float* up, Rows out, int row, int block);  // silu(gate) * up, one block
  void (*rope)(float* x, const float* cos, const float* sin, int half, float scale, int dim);
  void (*store_kv)(const float* x, const Paged& kv, uint8_t* to, uint16_t* scales);  // all heads of a token
  // kKeys tokens from position `first` on, read as floats, into a run of `kv` that begins at this offset of a page
  void (*round_run)(const Paged& latest, const int32_t* pages, int first, const Paged& kv, int64_t page, int offset,
                    float* scratch);  // attend_floats
  void (*attend)(const AttendArgs& args, float* scratch);
  size_t (*attend_floats)(const AttendArgs& args);
  int (*draw)(const float* logits, int vocab, const Draw& how, uint8_t* scratch);  // draw_bytes, aligned to 8
  size_t (*draw_bytes)(int vocab);
};

// The table of an instruction set whose functions carry these names in its namespace.
#define QUIRE_KERNELS(name, gemm) \
  {name, begin, end, quantise, norm_quantise, norm, gemm, gate, rope, store_kv, round_run, attend, attend_floats, \
   draw, draw_bytes}

const Kernels* kernels_base();
const Kernels* kernels_avx2();    // null where the build or the host lacks it
const Kernels* kernels_avx512();
const Kernels* kernels_amx();
const Kernels* kernels_neon();
const Kernels* kernels_i8mm();

bool pack(int32_t kind, const uint8_t* rows, int32_t first, int32_t count, const Matrix& into);
void scale_rows(const Matrix& m, const float* factors);  // each row by a factor
void unpack_row(const Matrix& m, int32_t row, float* out);
void unpack_quants(const Matrix& m, int g, int b, int lane, int8_t* out);  // 32 of one row
// Of one row's block: the scale of its first and of its second half, and the minimum.
void block_scales(const Matrix& m, int g, int b, int lane, float* scales, float* minimum);
float half_to_float(uint16_t h);
uint16_t float_to_half(float f);

}  // namespace quire
