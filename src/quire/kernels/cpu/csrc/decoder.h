// A whole decoder as data, and one step of it. Plain structs: Python fills them through ctypes, `structs.py` says the same.
// A layer is a mixer and a feed, each one of several kinds, with norms around them; what a layer has none of is null, or
// has no weight. Refuses to know: where weights came from, requests, sampling, how any of it is computed.
#pragma once

#include "kernels.h"

namespace quire {

struct Linear {
  Matrix w;           // without rows: there is none
  const float* bias;  // or null; padded to 16

  explicit operator bool() const { return w.n > 0; }
};

struct Rotation {
  const float* inverse_frequencies;  // [half]
  int32_t half;
  float scale;
};

struct Attention {
  Linear q, gate, k, v, o;  // no k: keys and values are another layer's; no v: values are the keys before norm and rotation
  Norm q_norm, k_norm, v_norm;
  const float* sinks;  // [heads] or null
  int32_t heads, kv_heads, head_dim;
  int32_t rotation;  // which of the decoder's; -1: none
  int32_t norms_all;  // q_norm and k_norm are of all heads at once, not of each
  int32_t window, chunked;  // window 0: none
  int32_t sparse;  // whether queries may read only some pages
  int32_t kv_group, place;  // which page table, and which layer of its pages
  int32_t scaling_period, scaling_offset;  // period not 0: queries times 1 + weight * log(1 + (position + offset) / period)
  float scaling_weight, scale, softcap;
};

// Multi-head latent attention in its absorbed form: a key is [rotated part, latent], which all heads share.
struct Latent {
  Linear q_down, q_up;       // no q_down: queries are not compressed. Of each head: the rotated part, then the other
  Linear kv_down, k_rotary;  // latents; the part of a key that is rotated
  Linear o;
  const Matrix *k_up, *v_up;  // [heads]: from a query to the latents' space, and from there to values
  Norm q_norm, kv_norm;
  int32_t heads, rank, rest, rotary, value_dim;  // rest: numbers of a query that are not rotated
  int32_t rotation, kv_group, place;
  float scale;
};

// Where a recurrent layer keeps its states: in cell 0; others lie `Step::cell_stride` further on each.
struct State {
  float* window;  // [taps - 1, channels]: inputs of the convolution
  float* matrix;
};

struct Convolution {
  const float *weight, *bias;  // [taps, channels]; [channels] or null
  int32_t taps, channels;
};

struct GatedDelta {
  Linear q, k, v, z, o;
  const float *ba, *decay, *dt_bias;  // [2 * value heads, hidden]; -exp(A) and the bias of dt, [value heads]
  Convolution conv;                   // of q, k and v
  GatedNorm norm;
  State state;
  int32_t key_heads, value_heads, key_dim, value_dim;
  int32_t tiled;  // key heads serve value heads in turn, not neighbours
};

struct Mamba2 {
  Linear gate, xbc, dt, o;
  const float *decay, *dt_bias, *d;  // [heads]: -exp(A); the bias of dt; what of the input is added
  Convolution conv;                  // of x, B and C
  GatedNorm norm;
  State state;
  int32_t heads, head_dim, groups, state_size;
  float dt_least, dt_most;
};

struct ShortConv {
  Linear b, c, x, o;
  Convolution conv;
  State state;
};

struct Mlp {
  Linear gate, up, down;  // no gate: the activation is of `up`
  int32_t width, activation;
};

struct Router {
  const float *weight, *bias;  // [experts, hidden]; [experts] or null
  const float* correction;     // or null: added to scores by which experts are chosen, not weighed
  const float* scales;         // or null: of each expert's weight
  int32_t sigmoid, normalised, weighs_input;
  int32_t groups, top_groups, best_two;  // groups of experts, of which some are chosen from: by their best, or best two
  float logit_scale, scale;
};

struct Experts {
  Router router;
  const Mlp* expert;  // [count]
  Mlp shared;         // no `up`: none
  const float* shared_gate;  // [hidden] or null
  Norm router_norm, norm, post_norm, shared_post_norm;  // where experts and router are normed apart from the shared one
  int32_t count, top_k;
};

// What a layer does with its own embedding of a token, behind mixer and feed (Gemma 4).
struct LayerInput {
  Linear gate, up;  // none: only the scale
  Norm norm;
  int32_t activation;
  float scale;  // of all that leaves the layer
};

enum Parallel { kInTurn, kOneNorm, kOwnNorms };  // mixer and feed read the same residual, behind one norm or their own

struct Layer {
  const Attention* attention;
  const Latent* latent;
  const GatedDelta* delta;
  const Mamba2* mamba;
  const ShortConv* conv;
  const Mlp* mlp;
  const Experts* experts;
  const LayerInput* input;
  Norm mixer_norm, mixer_post_norm, feed_norm, feed_post_norm;
  int32_t parallel;
};

struct Decoder {
  int32_t hidden, layers, rotations;
  float embedding_scale, residual_scale, logit_scale, logit_softcap;
  Matrix embed, head;
  const float* positions;  // or null: learned ones [most positions, hidden], the first `position_offset` of them unused
  int32_t most_positions, position_offset;
  Norm final_norm;
  const Rotation* rotation;
  const Layer* layer;
  Matrix input_table, input_product;  // of per-layer embeddings, [.., layers * input_width]; no rows: there are none
  Norm input_norm;
  int32_t input_width;
};

// What a LoRA adapter adds to a matrix's product: b (scale * a x). Without rows: nothing.
struct LowRank {
  Matrix a, b;
  float scale;
};

struct AdapterLayer {
  LowRank q, attention_gate, k, v, o, gate, up, down;
};

struct StepGroup {
  const int32_t* page_table;  // [rows, table_stride]
  int64_t table_stride;
  const int64_t* kv_slots;  // [tokens]
  int32_t tokens_per_page, layers;  // layers that share its pages
  const uint16_t* bounds;           // fp16 [pages, layers, 2, KV heads, head_dim] or null: see `AttendArgs`
  int32_t kind, latest;             // `KvKind` of its pages; the group of its layers' latest tokens, or -1
  int32_t parts;                    // 2: keys and values; 1: values are a part of the keys
};

// Tokens of one sequence that go on from the state in one cell and leave theirs in another.
struct Segment {
  int32_t start, tokens, source, target;
};

struct Step {
  int32_t tokens, rows;
  const int64_t *ids, *positions;
  const int32_t* query_start;  // [rows + 1]
  const StepGroup* group;
  int32_t groups, residual;  // tokens that queries read from `latest`, at least
  uint8_t* pool;
  int64_t pages, page_bytes;
  const Segment* segments;  // of recurrent layers, round by round: at most one of a sequence in each
  const int32_t* rounds;    // [round_count + 1]
  int32_t round_count, cells;
  int64_t cell_stride;  // numbers
  float* hidden;        // [tokens, hidden], out
  int32_t layers;  // run so many, and of the next, if there is one, keys and values; `hidden` only after all of them
  const int32_t* taps;  // [tap_count] layers whose output is shown too, ascending
  float* tapped;        // [tap_count, rows, hidden], out: of each row's last token
  int32_t tap_count;
  const int32_t* tree_base;   // [rows] or null: see `Table`; rows of a tree have one token
  const int64_t* tree_path;   // [rows]
  const uint8_t* asks;  // [rows] or null: rows that want to know what they pay to tokens of their only group
  float* mass;          // [rows, mass_runs], out: of those rows
  int32_t mass_runs, mass_tokens;  // runs of so many tokens, for which what is paid is added up
  const int64_t* adapters;             // [tokens] or null: the adapter of each; 0: none
  const AdapterLayer* const* adapter;  // [adapter_count], layers of each; null: no such one
  int32_t adapter_count, adapter_rank;  // rank: columns of every `b`
  const int32_t* sparse;  // [rows] or null: pages that a query of the row reads of each KV head; 0: all
  int32_t sparse_local;   // tokens before a query that it always reads
  const uint8_t* observed;          // [layers] or null: those after which `written` is called, by the caller's thread
  void (*written)(int32_t layer);  // its keys and values, and those of all before it, are in their pages
};

enum Refusal { kBadToken = 1, kBadSlot = 2, kBadPage = 3, kBadShape = 4, kBadAdapter = 5, kBadCell = 6 };

}  // namespace quire
