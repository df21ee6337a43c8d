// Per-layer embeddings (Gemma 4): a vector of each token for every layer, and what a layer does with its own.
#pragma once

#include "step_context.h"

namespace quire {

class LayerInputs {
 public:
  explicit LayerInputs(StepContext& c) : c_(c) {}

  void begin();
  void make(Worker& w);  // from token ids and the embeddings in the residual stream
  void mix(const LayerInput& a, int layer, Worker& w);

 private:
  StepContext& c_;
  Buffer<float> inputs_, gates_;  // [tokens, layers, width]; [tokens, width]
  NormedRows rows_;
  RowBuffer gated_store_;
  Rows gated_{};
};

}  // namespace quire
