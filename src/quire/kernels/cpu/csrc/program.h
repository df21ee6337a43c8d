// Runs a decoder: a team of threads goes through a step's stages together, meeting at barriers.
//
//   embed ─► [ norm ─► mixer ─► norm ─► feed ] x layers ─► norm
//
// Refuses to know: how a mixer or a feed computes, where weights came from, requests.
#pragma once

#include <vector>

#include "attention.h"
#include "feeds.h"
#include "latent.h"
#include "layer_inputs.h"
#include "recurrent_mixers.h"
#include "step_context.h"

namespace quire {

class Program {
 public:
  Program(const Decoder& decoder, const Kernels& kernels, Pool& pool);

  // 0, or a code of `Refusal`.
  int forward(const Step& step);
  void logits(const float* hidden, int rows, float* out, size_t stride);

 private:
  struct Widths {  // the most of any layer
    int inputs = 0, mixed = 0, attended = 0, by_head = 0, compressed = 0, kv_heads = 0, any = 0;
    RecurrentMixers::Widths recurrent;
    Feeds::Widths feeds;
  };

  void measure(const Layer& layer);
  void begin(const Step& step);
  void embed(Worker& w);
  void layer(int index, Worker& w);
  void mix(const Layer& layer, int index, const Normed& x, Worker& w);
  void keys(int index, Worker& w);
  void tap(int index, const Worker& w);
  const Matrix& first(const Layer& layer) const;

  const Decoder d_;
  const std::vector<Layer> layers_;
  Widths most_;
  StepContext c_;
  PagedAttention pages_;
  AttentionMixer attention_;
  LatentMixer latent_;
  RecurrentMixers recurrent_;
  Feeds feeds_;
  LayerInputs inputs_;
  NormedRows mixer_input_, feed_input_;
  Buffer<float> products_, mixed_;  // of tokens: what a mixer makes of its input at first, and further on
  RowBuffer head_store_;
};

}  // namespace quire
