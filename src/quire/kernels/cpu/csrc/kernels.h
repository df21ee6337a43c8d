// The table of kernels that each instruction set fills, and what they are called with: paged KV, queries, states of
// recurrent layers, draws. Refuses to know: Python, models, threads.
#pragma once

#include "common.h"

namespace quire {

constexpr int kKeys = 32;        // KV positions attended at a time, aligned to position 0
constexpr int kMostScales = 16;  // of a head: 4-bit heads have at most 256 numbers
constexpr int kMostTaps = 16;    // of a convolution
constexpr int kMostKeyDim = 256; // of a delta rule

// Of a token, or of a head.
struct Norm {
  const float *weight, *bias;  // no weight: there is no such norm; the bias may be null
  float eps;
  int32_t centred;  // a LayerNorm: the mean is taken off; else an RMS norm
};

// Of a gated MLP's gate, or of all that one without a gate has. The last is gpt-oss's: both clamped, one added to `up`.
enum Activation : int32_t { kSilu, kGelu, kGeluTanh, kQuickGelu, kRelu, kRelu2, kSwigluOai };

// How pages keep numbers; kernels/kv_views.py says the same in torch. 8 bits: a scale for each token and head; fewer: a scale
// and a minimum for each 32 numbers of it, numbers i and i + head_dim / 2 (2 bits: every head_dim / 4) in one byte. Of
// KIVI's keys, a scale and a minimum for each channel over kKeys tokens: for each of these runs [head][2][head_dim].
enum KvKind { kFloat32, kFloat16, kInt8, kFp8, kInt4, kKivi4, kKivi2 };

struct Paged {
  uint8_t* k;        // K of this layer in page 0; V lies v_offset bytes further
  uint16_t* scales;  // fp16, of that K; those of V lie v_scales further
  size_t page_stride, v_offset;  // bytes
  size_t v_scales;               // 0, as v_offset, where values are the keys
  int32_t tokens_per_page, kv_heads, head_dim, kind;

  size_t head_bytes() const {
    if (kind <= kFloat16) return kind == kFloat32 ? head_dim * 4 : head_dim * 2;
    return kind == kKivi2 ? head_dim / 4 : kind >= kInt4 ? head_dim / 2 : head_dim;
  }
  size_t token_stride() const { return kv_heads * head_bytes(); }
  int head_scales() const { return kind >= kInt4 ? head_dim / kBlock * 2 : kind > kFloat16; }
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
  bool chunked;           // windows do not slide: a query sees from the last multiple of `window` on
  float softcap;          // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks;     // [heads] or null: a score of nothing, of each head
  const float* gate;      // or null: what is attended is multiplied with its sigmoid; of token 0, [heads, head_dim]
  size_t gate_stride;     // from token to token
  const Query* queries;
  int32_t count;
  int32_t shared;  // leading KV positions all queries may read through queries[0].pages
  int32_t head_begin, head_end;  // KV heads to do
  Rows out;  // attention output, quantised [tokens, heads * head_dim]
  int32_t values_from, head_rows;  // not 0 (latent attention): values are the keys from this dimension on, and a head's
                                   // output goes to rows of its own, so many further on than those of the head before
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
  int first_seen(int position) const {
    if (!window || position < window) return 0;
    return chunked ? position / window * window : position - window + 1;
  }
};

// How one token is drawn.
struct Draw {
  uint32_t key[2];  // of the row's noise
  float temperature, log_min_p;
  double top_p;   // 1 or more: off
  int64_t top_k;  // the vocabulary or more: off
  bool greedy;    // the likeliest token, whatever else is said
};

// Where a token's log-probability goes, its rank (1: none is likelier), and those of the likeliest.
struct Scores {
  float* logprob;
  int32_t *rank, *top_ids;
  float* top_logprobs;
};

// A depthwise convolution at one token: its input and those before it, oldest first, channel by channel.
struct ConvolveArgs {
  const float* in[kMostTaps];
  const float *weight, *bias;  // [taps, channels]; [channels] or null
  int32_t taps, channels;
  bool silu;
};

// Some columns of a head's matrix S [key_dim, columns] on its way through tokens: S' = decay S, and then
// S = S' + k (beta (v - k S')), output q S.
struct DeltaArgs {
  const float *q, *k, *v, *decay, *beta;  // of the first token; v, the state and the output at the first of the columns
  size_t stride, gate_stride, out_stride;  // from token to token: of q, k and v; of decay and beta; of the output
  int32_t tokens, key_dim, columns;        // columns: a multiple of 16
  const float* from;                       // the state before, and after; they may be the same
  float* state;
  size_t state_stride;  // from row to row
  float* out;
};

// Some rows of a head's matrix S [rows, state_size] on its way through tokens: S = decay S + dt x B, output S C + d x.
struct StateSpaceArgs {
  const float *x, *b, *c, *dt, *decay;  // of the first token; x, the state and the output at the first of the rows
  size_t stride, gate_stride, out_stride;
  int32_t tokens, rows, state_size;  // state_size: a multiple of 16
  float d;
  const float* from;  // the state before, and after
  float* state;
  float* out;
};

// RMS norms of parts of a row, times SiLU of a gate before them or behind them.
struct GatedNorm {
  const float* weight;  // [width], or [part] for all parts
  int32_t width, part, weights;
  float eps;
  bool gate_first;
};

struct Scratch {
  uint8_t* bytes;  // at least scratch_bytes(largest k), aligned to 64
};
// A group unpacked: quants as bytes [block, quad, 16 outputs, 4], then floats [block, 4, 16 outputs].
constexpr size_t scratch_bytes(size_t k) { return k * kLanes + k / kBlock * 4 * kLanes * sizeof(float); }

struct Kernels {
  const char* name;
  void (*begin)();  // once per thread and step
  void (*end)();
  void (*quantise)(const float* x, Rows out, int row);
  void (*norm_quantise)(const float* x, const Norm& norm, Rows out, int row, float* floats);  // floats: too, or null
  void (*norm)(const float* x, const Norm& norm, int k, float* out);
  void (*gemm)(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch);  // rows [m0, m1) of x
  // One block of act(gate) * up, or of act(gate) where there is no `up`.
  void (*activate)(Activation kind, const float* gate, const float* up, Rows out, int row, int block);
  // Rows [m0, m1) of x [, k] by outputs [n0, n1) of w [n, k], all of them floats.
  void (*float_product)(const float* w, int n0, int n1, const float* x, int m0, int m1, int k, float* out, int n);
  void (*add_scaled)(float* to, const float* from, float factor, int count);
  void (*scale_and_cap)(float* x, size_t count, float scale, float softcap);
  void (*rope)(float* x, const float* cos, const float* sin, int half, float scale, int dim);
  void (*store_kv)(const float* x, const Paged& kv, uint8_t* to, uint16_t* scales);  // all heads of a token
  // kKeys tokens from position `first` on, read as floats, into a run of `kv` that begins at this offset of a page
  void (*round_run)(const Paged& latest, const int32_t* pages, int first, const Paged& kv, int64_t page, int offset,
                    float* scratch);  // attend_floats
  void (*convolve)(const ConvolveArgs& args, float* out);
  void (*delta_rule)(const DeltaArgs& args);
  void (*state_space)(const StateSpaceArgs& args);
  void (*gated_norm)(const float* x, const float* gate, const GatedNorm& how, Rows out, int row);
  void (*attend)(const AttendArgs& args, float* scratch);
  size_t (*attend_floats)(const AttendArgs& args);
  int (*draw)(const float* logits, int vocab, const Draw& how, uint8_t* scratch);  // draw_bytes, aligned to 8
  void (*score)(const float* logits, int vocab, int token, int top, const Scores& out, uint8_t* scratch);  // as `draw`
  size_t (*draw_bytes)(int vocab);
};

// The table of an instruction set whose functions carry these names in its namespace.
#define QUIRE_KERNELS(name, gemm) \
  {name, begin, end, quantise, norm_quantise, norm, gemm, activate, float_product, add_scaled, scale_and_cap, rope, store_kv, \
   round_run, convolve, delta_rule, state_space, gated_norm, attend, attend_floats, draw, score, draw_bytes}

const Kernels* kernels_base();
const Kernels* kernels_avx2();    // null where the build or the host lacks it
const Kernels* kernels_avx512bw();
const Kernels* kernels_avx512();
const Kernels* kernels_amx();
const Kernels* kernels_neon();
const Kernels* kernels_i8mm();

}  // namespace quire
