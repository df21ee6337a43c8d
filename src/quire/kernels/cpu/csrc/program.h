// A whole decoder as data, and one step of it. Plain structs: Python fills them through ctypes.
// Refuses to know: where weights came from, requests, sampling.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "common.h"
#include "pool.h"

namespace quire {

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *input_norm, *post_norm;
  const float *q_norm, *k_norm;                  // or null
  const float *q_bias, *k_bias, *v_bias, *o_bias;  // or null; padded to 16
  int32_t kv_group, place;                       // which page table, and which layer of its pages
  int32_t window;                                // 0: none
  float scale;
};

struct Decoder {
  int32_t hidden, heads, kv_heads, head_dim, intermediate, rotary, layers;
  float eps, rope_scale;
  Matrix embed, head;
  const float *final_norm, *inverse_frequencies;
  const Layer* layer;  // [layers]
};

// What a LoRA adapter adds to a matrix's product: b (scale * a x). Without rows: nothing.
struct LowRank {
  Matrix a, b;
  float scale;
};

struct AdapterLayer {
  LowRank q, k, v, o, gate, up, down;
};

constexpr int kLayerStages = 9;  // beside those of adapters

struct StepGroup {
  const int32_t* page_table;  // [rows, table_stride]
  int64_t table_stride;
  const int64_t* kv_slots;  // [tokens]
  int32_t tokens_per_page, layers;  // layers that share its pages
  const uint16_t* bounds;           // fp16 [pages, layers, 2, KV heads, head_dim] or null: see `AttendArgs`
  int32_t kind, latest;             // `KvKind` of its pages; the group of its layers' latest tokens, or -1
};

struct Step {
  int32_t tokens, rows;
  const int64_t *ids, *positions;
  const int32_t* query_start;  // [rows + 1]
  const StepGroup* group;
  int32_t groups, residual;  // tokens that queries read from `latest`, at least
  uint8_t* pool;
  int64_t pages, page_bytes;
  float* hidden;   // [tokens, hidden], out
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
  const int32_t* sparse;         // [rows] or null: pages that a query of the row reads of each KV head; 0: all
  const uint8_t* sparse_layers;  // [layers] which of them do
  int32_t sparse_local;          // tokens before a query that it always reads
  const uint8_t* observed;          // [layers] or null: those after which `written` is called, by the caller's thread
  void (*written)(int32_t layer);  // its keys and values, and those of all before it, are in their pages
};

class Program {
 public:
  Program(const Decoder& decoder, const Kernels& kernels, Pool& pool);

  // 0, or a code of `Refusal`.
  int forward(const Step& step);
  void logits(const float* hidden, int rows, float* out, size_t stride);

 private:
  struct Item {  // attention work: queries [first, first + count) of a group's list
    int32_t first, count, shared;
    int64_t cost;
    int32_t asking;  // which of the items that ask for mass, or -1
    int32_t sparse = 0;  // pages that its only query reads; 0: all
  };
  struct Plan {
    std::vector<Query> queries;
    std::vector<Item> items;
    std::vector<int> asking;  // row of each item that asks for mass
  };
  static constexpr int kMost = 3;  // matrices multiplied in one stage
  enum Product { kQkv, kO, kGateUp, kDown, kProducts };  // of a layer
  struct Run {  // neighbours with the same adapter
    int64_t adapter;
    int32_t m0, m1;
  };
  struct Adapted {  // matrices that are multiplied in one stage, as adapters know them
    const Step& step;
    int layer;
    Product product;
    int count = 0;
    LowRank AdapterLayer::*parts[kMost] = {};
    Adapted(const Step& step, int layer, Product product);
    const LowRank& of(const Run& run, int part) const { return step.adapter[run.adapter][layer].*parts[part]; }
  };

  void reserve(int tokens);
  void plan(const Step& step, const StepGroup& group, Plan& plan) const;
  void share(const Step& step, const StepGroup& group, const std::vector<int>& rows, Plan& plan) const;
  Paged paged(const Step& step, const StepGroup& group, int place) const;
  void round(const Step& step, const Layer& layer, int stage, int worker);
  void embed(const Step& step, int stage, int worker);
  Paged qkv(const Step& step, const Layer& layer, int index, int worker);
  void layer(const Step& step, const Layer& layer, int index, int worker);
  void multiply(int stage, const Piece* whole, int count, Rows x, int rows, int worker, const Adapted& on);
  void find_runs(const Step& step);
  bool updates(const Adapted& on) const { return !runs_.empty() && updated_[on.layer * kProducts + on.product]; }
  void shrink(const Adapted& on, Rows x, int worker);
  void expand(const Adapted& on, int part, const Piece& piece, int m0, int m1, int worker);
  Rows normalise(int stage, const float* weight, int tokens, int worker, Ahead& next);
  void rotate(const Step& step, const Layer& layer, const Paged& kv, int stage, int worker);
  void attend(const Step& step, const Layer& layer, const Paged& kv, int stage, int worker);
  void pay(const Step& step) const;
  void tap(const Step& step, int index, int worker);
  void gate_up(const Layer& layer, Rows x, int tokens, int stage, int worker, const Adapted& on);
  Ahead ahead(const Matrix& w, int worker) const;
  template <typename Visit>
  void each_token(int stage, int worker, int tokens, Visit visit);
  static Piece whole(const Matrix& w, Out out) { return {&w, 0, w.groups(), out}; }
  Scratch scratch(int worker) { return {scratch_.data() + worker * scratch_stride_}; }

  const Decoder d_;
  const std::vector<Layer> layers_;
  const Kernels& k_;
  Pool& pool_;
  int qkv_, capacity_ = 0;
  size_t scratch_stride_ = 0;

  template <typename T>
  struct Buffer {  // aligned, grows, never keeps contents
    std::unique_ptr<T[]> owner;
    size_t size = 0;
    void need(size_t count) {
      if (count + 64 / sizeof(T) > size) owner.reset(new T[size = count + 64 / sizeof(T)]());
    }
    T* data() const {
      return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(owner.get()) + 63) & ~uintptr_t(63));
    }
  };
  struct RowBuffers {
    Buffer<int8_t> q;
    Buffer<float> factors;
    Buffer<int32_t> total;
    Rows reserve(int rows, int k);
  };

  Buffer<float> x_, qkv_buffer_, angles_, gates_, attend_scratch_, mass_;
  Buffer<uint8_t> scratch_;
  RowBuffers normed_store_, attended_store_, gated_store_, head_store_;
  Rows normed_{}, attended_{}, gated_{};
  std::vector<RowBuffers> own_store_;  // a few normed rows of each worker
  std::vector<Rows> own_;
  std::vector<Plan> plans_;
  std::vector<std::pair<int, int>> run_ends_;  // (token, row) of tokens that end a run of kKeys
  size_t attend_stride_ = 0;

  std::vector<Run> runs_;              // by adapter
  std::vector<char> updated_;          // [layers, products]: whether an adapter of the step has a part in it
  Buffer<float> low_floats_;           // [workers, rows of a run, rank]
  RowBuffers low_store_[kMost];
  Rows low_[kMost]{};
};

enum Refusal { kBadToken = 1, kBadSlot = 2, kBadPage = 3, kBadShape = 4, kBadAdapter = 5 };

}  // namespace quire
