// LoRA adapters of a step: which rows have which, and what their updates add to products.
//
//   shrink:  low = quantised(scale * a x), of every run of rows with the same adapter, once the rows are there
//   expand:  b low is added to what the base's product has written, piece by piece, while that is in the cache
//
// Refuses to know: which matrices a layer has.
#pragma once

#include <vector>

#include "buffers.h"
#include "decoder.h"

namespace quire {

class StepContext;
struct Worker;

constexpr int kMostPieces = 4;  // matrices multiplied in one stage

// Matrices that are multiplied in one stage, as adapters know them.
struct Adapted {
  int layer;
  int count = 0;
  LowRank AdapterLayer::*parts[kMostPieces] = {};

  explicit Adapted(int layer) : layer(layer) {}
  Adapted(int layer, LowRank AdapterLayer::*part) : layer(layer) { add(part); }
  void add(LowRank AdapterLayer::*part) { parts[count++] = part; }
};

class Adapters {
 public:
  explicit Adapters(StepContext& c) : c_(c) {}
  void begin();  // a step
  void forget() { runs_.clear(); }  // what comes next has none
  bool any() const { return !runs_.empty(); }
  bool update(const Adapted& on) const;  // whether an adapter of the step has a part in these products
  void shrink(const Adapted& on, Rows x, Worker& w);
  void expand(const Adapted& on, int part, const Piece& piece, int m0, int m1, const Worker& w) const;

 private:
  struct Run {  // neighbours with the same adapter
    int64_t adapter;
    int32_t m0, m1;
  };
  const LowRank& of(const Adapted& on, const Run& run, int part) const;

  StepContext& c_;
  std::vector<Run> runs_;         // by adapter
  std::vector<int64_t> present_;  // adapters of the step
  Buffer<float> floats_;          // [workers, rows of a run, rank]
  RowBuffer store_[kMostPieces];
  Rows low_[kMostPieces]{};
};

}  // namespace quire
