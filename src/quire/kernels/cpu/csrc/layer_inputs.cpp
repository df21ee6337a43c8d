#include "layer_inputs.h"

#include <cmath>

namespace quire {

void LayerInputs::begin() {
  const int width = c_.d.input_width;
  if (!width) return;
  inputs_.need(size_t(c_.capacity) * c_.d.layers * width);
  gates_.need(size_t(c_.capacity) * width);
  rows_.need(c_.capacity, c_.d.hidden, c_.pool.size(), false);
  gated_ = gated_store_.need(c_.capacity, width);
}

void LayerInputs::make(Worker& w) {
  const int width = c_.d.input_width, all = c_.d.layers * width;
  const Linear product{c_.d.input_product, nullptr};
  const Normed x = c_.normalise(Norm{}, rows_, false, w);
  c_.multiply(product, x.rows, {inputs_.data(), size_t(all), nullptr, false, 0, 0, 1.0f / std::sqrt(float(c_.d.hidden))}, w);
  c_.meet(w);
  c_.each_token(w, [&](int t) {
    std::vector<float> own(all);
    unpack_row(c_.d.input_table, int32_t(c_.step->ids[t]), own.data());
    const float scale = std::sqrt(float(width));
    for (int layer = 0; layer < c_.d.layers; layer++) {
      float *to = inputs_.data() + size_t(t) * all + layer * width, *from = own.data() + layer * width;
      c_.k.norm(to, c_.d.input_norm, width, to);
      for (int i = 0; i < width; i++) to[i] = (to[i] + from[i] * scale) * 0.70710678f;
    }
  });
  c_.meet(w);
}

void LayerInputs::mix(const LayerInput& a, int layer, Worker& w) {
  const int width = c_.d.input_width, hidden = c_.d.hidden;
  if (a.gate) {
    const Normed x = c_.normalise(Norm{}, rows_, false, w);
    c_.multiply(a.gate, x.rows, {gates_.data(), size_t(width), nullptr, false, 0, 0}, w);
    c_.meet(w);
    c_.each_token(w, [&](int t) {
      const float *gate = gates_.data() + size_t(t) * width, *own = inputs_.data() + (size_t(t) * c_.d.layers + layer) * width;
      for (int b = 0; b < width / kBlock; b++)
        c_.k.activate(Activation(a.activation), gate + b * kBlock, own + b * kBlock, gated_, t, b);
    });
    c_.meet(w);
    c_.multiply(a.up, gated_, {c_.leaving.data(), size_t(hidden), nullptr, false, 0, 0}, w);
    c_.meet(w);
  }
  c_.each_token(w, [&](int t) {
    float *to = c_.row(t), *from = c_.leaving.data() + size_t(t) * hidden;
    if (a.gate) {
      c_.k.norm(from, a.norm, hidden, from);
      c_.k.add_scaled(to, from, 1.0f, hidden);
    }
    for (int i = 0; i < hidden; i++) to[i] *= a.scale;
  });
  c_.meet(w);
}

}  // namespace quire
