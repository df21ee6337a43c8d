// Mixers that keep a state of fixed size of each sequence: Gated DeltaNet, Mamba-2, short convolutions.
//
// A step's tokens are in segments, each of which goes on from the state in one cell and leaves its own in another; segments
// of one sequence follow each other, round by round. Refuses to know: who owns which cell, what a state is for.
#pragma once

#include <vector>

#include "step_context.h"

namespace quire {

class RecurrentMixers {
 public:
  explicit RecurrentMixers(StepContext& c) : c_(c) {}

  struct Widths {  // numbers of a token: of its inputs' products, behind the convolution, of what gates, of the output
    int inputs = 0, mixed = 0, gates = 0, out = 0, state = 0;  // state: numbers of a cell that one layer has
  };
  static Widths widths(const GatedDelta& a);
  static Widths widths(const Mamba2& a);
  static Widths widths(const ShortConv& a);

  void begin(float* inputs, size_t inputs_stride, float* mixed, size_t mixed_stride, const Widths& most);

  void mix(const GatedDelta& a, int layer, const Normed& x, const Norm& post, Worker& w);
  void mix(const Mamba2& a, int layer, const Normed& x, const Norm& post, Worker& w);
  void mix(const ShortConv& a, int layer, const Normed& x, const Norm& post, Worker& w);

 private:
  float* inputs(int token) const { return inputs_ + token * inputs_stride_; }
  float* mixed(int token) const { return mixed_ + token * mixed_stride_; }
  // A part of a layer's state in a cell; and as it was before this round.
  float* in_cell(float* of_first, int cell) const { return of_first + size_t(cell) * c_.step->cell_stride; }
  const float* before(const State& state, const float* part, int segment) const;
  void convolve(const State& state, const Convolution& conv, int token, size_t channel, bool silu) const;
  void move_window(const State& state, const Convolution& conv, const Segment& one, const float* window, size_t channel) const;
  // Round by round: `at_token` once its convolution is there, then `pass` for each of `items` parts of every segment.
  template <typename AtToken, typename Pass>
  void rounds(const State& state, const Convolution& conv, int matrix, size_t channel, bool silu, int items, Worker& w,
              AtToken at_token, Pass pass);
  void leave(const Linear& o, int layer, Rows out, const Norm& post, Worker& w);
  Rows out(int width) const {
    Rows rows = out_;
    rows.k = width;
    return rows;
  }

  StepContext& c_;
  float *inputs_ = nullptr, *mixed_ = nullptr;
  size_t inputs_stride_ = 0, mixed_stride_ = 0, gates_width_ = 0, copy_stride_ = 0;
  Buffer<float> gates_, copies_;  // [tokens, ..]; states as they were, by segment, of rounds that are not apart
  RowBuffer out_store_;
  Rows out_{};
  std::vector<int32_t> segment_of_;                // by token
  std::vector<std::vector<int32_t>> round_tokens_;  // by round
  std::vector<char> apart_;  // by round: no cell is written by one segment and read by another
};

}  // namespace quire
