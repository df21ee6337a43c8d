// What all stages of a step share: the threads and how work is shared out among them, the residual stream, norms of it and
// products by packed matrices. Refuses to know: which layers there are, what mixers and feeds do.
#pragma once

#include <algorithm>
#include <vector>

#include "adapters.h"
#include "buffers.h"
#include "decoder.h"
#include "pool.h"

namespace quire {

// One of the threads on its way through a step. All take the same stages in the same order.
struct Worker {
  int index;
  int stage = 0;
  Ahead next{nullptr, nullptr};  // what it will read next, asked for while it waits
};

// A norm of the residual stream, ready to be multiplied.
struct Normed {
  Rows rows;
  const float* floats;  // or null, if nobody asked for them
};

constexpr int kAlone = 2;  // rows that every worker norms for itself

// Memory for such: for all to read, and of a few rows for each worker by itself.
struct NormedRows {
  Rows rows{};
  std::vector<Rows> own;
  Buffer<float> floats, own_floats;

  void need(int tokens, int width, int workers, bool as_floats) {
    rows = store_.need(tokens, width);
    own_store_.resize(workers);
    own.clear();
    for (RowBuffer& store : own_store_) own.push_back(store.need(kAlone, width));
    if (!as_floats) return;
    floats.need(size_t(tokens) * width);
    own_floats.need(size_t(workers) * kAlone * width);
  }

 private:
  RowBuffer store_;
  std::vector<RowBuffer> own_store_;
};

class StepContext {
 public:
  StepContext(const Decoder& decoder, const Kernels& kernels, Pool& pool);

  // `widest`: the most inputs of any matrix.
  void begin(const Step& step, int widest);

  template <typename Visit>
  void each(int total, Worker& w, Visit visit) {
    const int stage = w.stage++;
    for (int item; (item = pool.take(stage, w.index, total)) < total;) visit(item);
  }
  template <typename Visit>
  void each_token(Worker& w, Visit visit) {
    const int tokens = step->tokens, chunk = chunk_for(tokens);
    each((tokens + chunk - 1) / chunk, w, [&](int i) {
      for (int t = i * chunk; t < std::min((i + 1) * chunk, tokens); t++) visit(t);
    });
  }
  int chunk_for(int total) const { return std::max(1, total / (pool.size() * 4)); }
  void meet(Worker& w) { pool.barrier(w.next); }
  void expect(const Matrix& next, Worker& w) const;  // what it will begin to multiply by after the next barriers

  // The residual stream normed and quantised, or quantised alone; `floats`: as floats too.
  Normed normalise(const Norm& norm, NormedRows& into, bool floats, Worker& w);

  // `count` matrices by the same rows, of which there are as many as tokens unless `rows` says so.
  void multiply(const Piece* pieces, int count, Rows x, Worker& w, const Adapted* on = nullptr, int rows = -1);
  void multiply(const Linear& by, Rows x, Out out, Worker& w, const Adapted* on = nullptr);

  // Where a mixer's or a feed's last product goes, and how it gets on into the residual stream behind a norm.
  Out residual(const Norm& post) const;
  void leave(const Norm& post, Worker& w);
  void multiply_into_residual(const Linear& by, Rows x, const Norm& post, Worker& w, const Adapted* on);

  float* row(int token) const { return x.data() + size_t(token) * d.hidden; }
  Scratch scratch(const Worker& w) const { return {scratch_.data() + w.index * scratch_stride_}; }
  static Piece whole(const Linear& by, Out out) {
    out.bias = by.bias;
    return {&by.w, 0, by.w.groups(), out};
  }

  const Decoder& d;
  const Kernels& k;
  Pool& pool;
  const Step* step = nullptr;
  int capacity = 0;           // rows that buffers have, at least: whole tiles
  Buffer<float> x, leaving;   // [tokens, hidden]: the residual stream; what is to be normed on its way into it
  Adapters adapters;

 private:
  Buffer<uint8_t> scratch_;
  size_t scratch_stride_ = 0;
};

constexpr int kRowChunk = 128;  // most rows of a multiplication taken at a time: a multiple of 16

// ... of so many, evenly, and as few as the second-level cache holds beside weights: all are read for each group, a byte and
// three quarters for each input.
int row_chunk(int inputs, int rows);

}  // namespace quire
