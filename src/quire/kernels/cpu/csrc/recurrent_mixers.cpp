#include "recurrent_mixers.h"

#include <cmath>

namespace quire {

namespace {

constexpr int kColumns = 32;  // of a state, which go through a step's tokens together
constexpr int kStateRows = 16;

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

int numbers(const Convolution& conv) { return (conv.taps - 1) * conv.channels; }

int matrix(const GatedDelta& a) { return a.value_heads * a.key_dim * a.value_dim; }
int matrix(const Mamba2& a) { return a.heads * a.head_dim * a.state_size; }

// x of length one, times a factor.
void make_unit(float* x, int n, float factor) {
  float squares = 0;
  for (int i = 0; i < n; i++) squares += x[i] * x[i];
  factor /= std::sqrt(squares + 1e-6f);
  for (int i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace

RecurrentMixers::Widths RecurrentMixers::widths(const GatedDelta& a) {
  const int values = a.value_heads * a.value_dim;
  return {a.conv.channels + values, a.conv.channels + values, 2 * a.value_heads, values, numbers(a.conv) + matrix(a)};
}

RecurrentMixers::Widths RecurrentMixers::widths(const Mamba2& a) {
  const int inner = a.heads * a.head_dim;
  return {inner + a.conv.channels + pad16(a.heads), a.conv.channels + inner, 2 * a.heads, inner, numbers(a.conv) + matrix(a)};
}

RecurrentMixers::Widths RecurrentMixers::widths(const ShortConv& a) {
  return {3 * a.conv.channels, a.conv.channels, 0, a.conv.channels, numbers(a.conv)};
}

void RecurrentMixers::begin(float* inputs, size_t inputs_stride, float* mixed, size_t mixed_stride, const Widths& most) {
  const Step& step = *c_.step;
  inputs_ = inputs;
  inputs_stride_ = inputs_stride;
  mixed_ = mixed;
  mixed_stride_ = mixed_stride;
  gates_width_ = most.gates;
  gates_.need(size_t(c_.capacity) * most.gates);
  out_ = out_store_.need(c_.capacity, most.out);
  segment_of_.assign(step.tokens, 0);
  round_tokens_.assign(step.round_count, {});
  apart_.assign(step.round_count, 1);
  int most_segments = 0;
  for (int r = 0; r < step.round_count; r++) {
    const Segment *first = step.segments + step.rounds[r], *end = step.segments + step.rounds[r + 1];
    for (const Segment* one = first; one < end; one++) {
      for (const Segment* other = first; other < end; other++)
        if (one != other && one->target == other->source) apart_[r] = 0;
      for (int t = one->start; t < one->start + one->tokens; t++) {
        segment_of_[t] = int32_t(one - step.segments);
        round_tokens_[r].push_back(t);
      }
    }
    if (!apart_[r]) most_segments = std::max(most_segments, int(end - first));
  }
  copy_stride_ = most.state;
  copies_.need(size_t(most_segments) * most.state);
}

// A part of a layer's state as a segment finds it: in its source, or where that is copied to because others write there.
const float* RecurrentMixers::before(const State& state, const float* part, int segment) const {
  const Step& step = *c_.step;
  int round = 0;
  while (segment >= step.rounds[round + 1]) round++;
  if (apart_[round]) return part + size_t(step.segments[segment].source) * step.cell_stride;
  return copies_.data() + size_t(segment - step.rounds[round]) * copy_stride_ + (part - state.window);
}

void RecurrentMixers::convolve(const State& state, const Convolution& conv, int token, size_t channel, bool silu) const {
  const int segment = segment_of_[token], seen = token - c_.step->segments[segment].start;
  const float* window = before(state, state.window, segment);
  ConvolveArgs args{{}, conv.weight, conv.bias, conv.taps, conv.channels, silu};
  for (int tap = 0; tap < conv.taps; tap++) {
    const int back = conv.taps - 1 - tap;
    args.in[tap] = back > seen ? window + size_t(seen + tap) * conv.channels : inputs(token - back) + channel;
  }
  c_.k.convolve(args, mixed(token));
}

// The last inputs behind a segment, in order: what stays of the window moves up, in place if need be.
void RecurrentMixers::move_window(const State& state, const Convolution& conv, const Segment& one, const float* window,
                                  size_t channel) const {
  float* to = in_cell(state.window, one.target);
  for (int i = 0; i < conv.taps - 1; i++, to += conv.channels) {
    const int token = one.tokens - (conv.taps - 1) + i;
    const float* from = token < 0 ? window + size_t(i + one.tokens) * conv.channels : inputs(one.start + token) + channel;
    std::copy_n(from, conv.channels, to);
  }
}

template <typename AtToken, typename Pass>
void RecurrentMixers::rounds(const State& state, const Convolution& conv, int matrix, size_t channel, bool silu, int items,
                             Worker& w, AtToken at_token, Pass pass) {
  const Step& step = *c_.step;
  for (int r = 0; r < step.round_count; r++) {
    const int first = step.rounds[r], count = step.rounds[r + 1] - first;
    if (!apart_[r]) {
      c_.each(count, w, [&](int i) {
        std::copy_n(in_cell(state.window, step.segments[first + i].source), numbers(conv) + matrix,
                    copies_.data() + i * copy_stride_);
      });
      c_.meet(w);
    }
    const std::vector<int32_t>& tokens = round_tokens_[r];
    c_.each(int(tokens.size()), w, [&](int i) {
      convolve(state, conv, tokens[i], channel, silu);
      at_token(tokens[i]);
    });
    c_.meet(w);
    c_.each(count * (items + 1), w, [&](int i) {
      const int segment = first + i / (items + 1), item = i % (items + 1);
      const Segment& one = step.segments[segment];
      if (item < items) return pass(one, segment, item);
      move_window(state, conv, one, before(state, state.window, segment), channel);
    });
    c_.meet(w);
  }
}

void RecurrentMixers::leave(const Linear& o, int layer, Rows out, const Norm& post, Worker& w) {
  c_.expect(o.w, w);
  c_.meet(w);
  const Adapted on(layer, &AdapterLayer::o);
  c_.multiply_into_residual(o, out, post, w, &on);
}

void RecurrentMixers::mix(const GatedDelta& a, int layer, const Normed& x, const Norm& post, Worker& w) {
  const int keys = a.key_heads * a.key_dim, channels = a.conv.channels, share = a.value_heads / a.key_heads;
  float* to = inputs_;
  Piece parts[kMostPieces];
  int count = 0;
  for (const Linear* by : {&a.q, &a.k, &a.v, &a.z}) {
    parts[count++] = StepContext::whole(*by, {to, inputs_stride_, nullptr, false, 0, 0});
    to += by->w.n;
  }
  c_.multiply(parts, count, x.rows, w);
  const int tokens = c_.step->tokens, chunk = std::max(4, c_.chunk_for(tokens) / 4 * 4);
  c_.each((tokens + chunk - 1) / chunk, w, [&](int i) {
    c_.k.float_product(a.ba, 0, 2 * a.value_heads, x.floats, i * chunk, std::min((i + 1) * chunk, tokens), c_.d.hidden,
                       gates_.data(), 2 * a.value_heads);
  });
  c_.meet(w);
  auto at_token = [&](int t) {
    for (int h = 0; h < a.key_heads; h++) {
      make_unit(mixed(t) + h * a.key_dim, a.key_dim, 1.0f / std::sqrt(float(a.key_dim)));
      make_unit(mixed(t) + keys + h * a.key_dim, a.key_dim, 1.0f);
    }
    float *beta = gates_.data() + size_t(t) * 2 * a.value_heads, *decay = beta + a.value_heads;
    for (int h = 0; h < a.value_heads; h++) {
      beta[h] = 1.0f / (1.0f + std::exp(-beta[h]));
      decay[h] = std::exp(a.decay[h] * softplus(decay[h] + a.dt_bias[h]));
    }
  };
  const int parts_of_head = (a.value_dim + kColumns - 1) / kColumns;
  auto pass = [&](const Segment& one, int segment, int item) {
    const int h = item / parts_of_head, column = item % parts_of_head * kColumns;
    const int key = a.tiled ? h % a.key_heads : h / share;
    const size_t of_head = size_t(h) * a.key_dim * a.value_dim + column;
    const float* q = mixed(one.start) + key * a.key_dim;
    const float* gates = gates_.data() + size_t(one.start) * 2 * a.value_heads + h;
    c_.k.delta_rule({q, q + keys, mixed(one.start) + 2 * keys + h * a.value_dim + column, gates + a.value_heads, gates,
                     mixed_stride_, size_t(2 * a.value_heads), mixed_stride_, one.tokens, a.key_dim,
                     std::min(kColumns, a.value_dim - column), before(a.state, a.state.matrix + of_head, segment),
                     in_cell(a.state.matrix, one.target) + of_head, size_t(a.value_dim),
                     mixed(one.start) + channels + h * a.value_dim + column});
  };
  rounds(a.state, a.conv, matrix(a), 0, true, a.value_heads * parts_of_head, w, at_token, pass);
  const Rows rows = out(a.value_heads * a.value_dim);
  c_.each_token(w, [&](int t) { c_.k.gated_norm(mixed(t) + channels, inputs(t) + channels, a.norm, rows, t); });
  leave(a.o, layer, rows, post, w);
}

void RecurrentMixers::mix(const Mamba2& a, int layer, const Normed& x, const Norm& post, Worker& w) {
  const int inner = a.heads * a.head_dim, channels = a.conv.channels, share = a.heads / a.groups;
  float *xbc = inputs_ + inner, *dt = xbc + channels;
  const Piece parts[] = {StepContext::whole(a.gate, {inputs_, inputs_stride_, nullptr, false, 0, 0}),
                         StepContext::whole(a.xbc, {xbc, inputs_stride_, nullptr, false, 0, 0}),
                         StepContext::whole(a.dt, {dt, inputs_stride_, nullptr, false, 0, 0})};
  c_.multiply(parts, 3, x.rows, w);
  c_.meet(w);
  auto at_token = [&](int t) {
    float* gates = gates_.data() + size_t(t) * 2 * a.heads;
    for (int h = 0; h < a.heads; h++) {
      const float step = softplus(inputs(t)[inner + channels + h] + a.dt_bias[h]);
      gates[h] = std::min(std::max(step, a.dt_least), a.dt_most);
      gates[a.heads + h] = std::exp(gates[h] * a.decay[h]);
    }
  };
  const int parts_of_head = (a.head_dim + kStateRows - 1) / kStateRows;
  auto pass = [&](const Segment& one, int segment, int item) {
    const int h = item / parts_of_head, row = item % parts_of_head * kStateRows;
    const size_t of_head = (size_t(h) * a.head_dim + row) * a.state_size;
    const float *seen = mixed(one.start), *b = seen + inner + h / share * a.state_size;
    const float* gates = gates_.data() + size_t(one.start) * 2 * a.heads + h;
    c_.k.state_space({seen + h * a.head_dim + row, b, b + a.groups * a.state_size, gates, gates + a.heads, mixed_stride_,
                      size_t(2 * a.heads), mixed_stride_, one.tokens, std::min(kStateRows, a.head_dim - row), a.state_size,
                      a.d[h], before(a.state, a.state.matrix + of_head, segment),
                      in_cell(a.state.matrix, one.target) + of_head, mixed(one.start) + channels + h * a.head_dim + row});
  };
  rounds(a.state, a.conv, matrix(a), inner, true, a.heads * parts_of_head, w, at_token, pass);
  const Rows rows = out(inner);
  c_.each_token(w, [&](int t) { c_.k.gated_norm(mixed(t) + channels, inputs(t), a.norm, rows, t); });
  leave(a.o, layer, rows, post, w);
}

void RecurrentMixers::mix(const ShortConv& a, int layer, const Normed& x, const Norm& post, Worker& w) {
  const int width = a.conv.channels;
  const Piece parts[] = {StepContext::whole(a.b, {inputs_, inputs_stride_, nullptr, false, 0, 0}),
                         StepContext::whole(a.c, {inputs_ + width, inputs_stride_, nullptr, false, 0, 0}),
                         StepContext::whole(a.x, {inputs_ + 2 * width, inputs_stride_, nullptr, false, 0, 0})};
  c_.multiply(parts, 3, x.rows, w);
  c_.meet(w);
  c_.each_token(w, [&](int t) {
    float *b = inputs(t), *times = b + 2 * width;
    for (int i = 0; i < width; i++) b[i] *= times[i];
  });
  c_.meet(w);
  const Rows rows = out(width);
  auto at_token = [&](int t) {
    float *mix = mixed(t), *gate = inputs(t) + width;
    for (int i = 0; i < width; i++) mix[i] *= gate[i];
    c_.k.quantise(mix, rows, t);
  };
  rounds(a.state, a.conv, 0, 0, false, 0, w, at_token, [](const Segment&, int, int) {});
  leave(a.o, layer, rows, post, w);
}

}  // namespace quire
