#include "program.h"

namespace quire {

namespace {

// Stages that a layer goes through at most.
int stages(const Layer& layer, int rounds) {
  const int mixer = layer.attention ? 9 : layer.latent ? 14 : 9 + 4 * rounds;
  return mixer + (layer.mlp ? 7 : layer.experts ? 14 : 0) + (layer.input ? 7 : 0) + (layer.parallel == kOwnNorms);
}

}  // namespace

Program::Program(const Decoder& decoder, const Kernels& kernels, Pool& pool)
    : d_(decoder),
      layers_(decoder.layer, decoder.layer + decoder.layers),
      c_(d_, kernels, pool),
      pages_(c_),
      attention_(c_, pages_),
      latent_(c_, pages_),
      recurrent_(c_),
      feeds_(c_),
      inputs_(c_) {
  most_.any = d_.hidden;
  for (const Layer& layer : layers_) measure(layer);
}

// What a layer takes, if that is more than those before it.
void Program::measure(const Layer& layer) {
  auto more = [](int& most, int here) { most = std::max(most, here); };
  if (const Attention* a = layer.attention) {
    more(most_.inputs, AttentionMixer::width(*a));
    more(most_.attended, AttentionMixer::attended_width(*a));
    more(most_.kv_heads, a->kv_heads);
    more(most_.any, AttentionMixer::attended_width(*a));
  }
  if (const Latent* a = layer.latent) {
    more(most_.inputs, LatentMixer::width(*a));
    more(most_.mixed, LatentMixer::mixed_width(*a));
    more(most_.attended, LatentMixer::attended_width(*a));
    more(most_.by_head, LatentMixer::by_head_width(*a));
    more(most_.compressed, a->q_down.w.n);
    more(most_.kv_heads, 1);
    more(most_.any, std::max({a->q_down.w.n, a->rest, a->rank, LatentMixer::attended_width(*a)}));
  }
  if (layer.delta || layer.mamba || layer.conv) {
    const RecurrentMixers::Widths here = layer.delta   ? RecurrentMixers::widths(*layer.delta)
                                         : layer.mamba ? RecurrentMixers::widths(*layer.mamba)
                                                       : RecurrentMixers::widths(*layer.conv);
    more(most_.inputs, here.inputs);
    more(most_.mixed, here.mixed);
    more(most_.recurrent.gates, here.gates);
    more(most_.recurrent.out, here.out);
    more(most_.recurrent.state, here.state);
    more(most_.any, here.out);
  }
  if (layer.mlp) more(most_.feeds.mlp, layer.mlp->width);
  if (const Experts* a = layer.experts) {
    more(most_.feeds.mlp, a->shared.width);
    more(most_.feeds.expert, a->expert->width);
    more(most_.feeds.experts, a->count);
    more(most_.feeds.top_k, a->top_k);
  }
  more(most_.any, std::max({most_.feeds.mlp, most_.feeds.expert, d_.input_width}));
}

void Program::begin(const Step& step) {
  c_.begin(step, std::max(most_.any, step.adapter_rank));
  c_.adapters.begin();
  float* products = products_.need(size_t(c_.capacity) * most_.inputs);
  float* mixed = mixed_.need(size_t(c_.capacity) * most_.mixed);
  const bool floats = most_.feeds.experts || most_.recurrent.gates;
  mixer_input_.need(c_.capacity, d_.hidden, c_.pool.size(), floats);
  feed_input_.need(c_.capacity, d_.hidden, c_.pool.size(), floats);
  pages_.begin(products, most_.inputs, most_.kv_heads);
  for (const Layer& layer : layers_) {
    if (const Attention* a = layer.attention) pages_.expect(a->kv_group, a->heads, a->kv_heads, a->head_dim);
    if (const Latent* a = layer.latent) pages_.expect(a->kv_group, a->heads, 1, LatentMixer::key_width(*a));
  }
  if (most_.attended) attention_.begin(products, most_.inputs, most_.attended);
  if (most_.by_head)
    latent_.begin(products, most_.inputs, mixed, most_.mixed, most_.attended, most_.by_head, most_.compressed);
  if (most_.recurrent.out) recurrent_.begin(products, most_.inputs, mixed, most_.mixed, most_.recurrent);
  feeds_.begin(most_.feeds);
  inputs_.begin();
}

int Program::forward(const Step& step) {
  if (int refused = refusal(step, d_)) return refused;
  if (step.tokens == 0) return 0;
  begin(step);
  int all = 12;
  for (const Layer& layer : layers_) all += stages(layer, step.round_count);
  c_.pool.run(all, [&](int index) {
    const FlushDenormals flush;
    Worker w{index};
    c_.k.begin();
    embed(w);
    c_.meet(w);
    if (d_.input_width) inputs_.make(w);
    for (int i = 0; i < std::min(step.layers, d_.layers); i++) {
      layer(i, w);
      if (step.tap_count) tap(i, w);
      if (step.observed && step.observed[i] && index == 0) step.written(i);
    }
    if (step.layers < d_.layers) {
      keys(step.layers, w);
    } else {
      c_.each_token(w, [&](int t) {
        float* to = step.hidden + size_t(t) * d_.hidden;
        c_.k.norm(c_.row(t), d_.final_norm, d_.hidden, to);
      });
    }
    c_.k.end();
  });
  pages_.end();
  return 0;
}

void Program::embed(Worker& w) {
  const Step& step = *c_.step;
  c_.each(step.tokens, w, [&](int t) {
    float* to = c_.row(t);
    unpack_row(d_.embed, int32_t(step.ids[t]), to);
    for (int i = 0; d_.embedding_scale != 1.0f && i < d_.hidden; i++) to[i] *= d_.embedding_scale;
    const float* place = d_.positions + size_t(step.positions[t] + d_.position_offset) * d_.hidden;
    if (d_.positions) c_.k.add_scaled(to, place, 1.0f, d_.hidden);
    pages_.turn(t);
  });
}

// The matrix that a layer reads first.
const Matrix& Program::first(const Layer& layer) const {
  if (layer.attention) return layer.attention->q.w;
  if (layer.latent) return layer.latent->q_down ? layer.latent->q_down.w : layer.latent->q_up.w;
  return layer.delta ? layer.delta->q.w : layer.mamba ? layer.mamba->gate.w : layer.conv->b.w;
}

void Program::layer(int index, Worker& w) {
  const Layer& layer = layers_[index];
  c_.expect(first(layer), w);
  const bool routed = layer.experts && layer.parallel == kOneNorm;
  const Normed x = c_.normalise(layer.mixer_norm, mixer_input_, layer.delta || routed, w);
  Normed y = x;
  if (layer.parallel == kOwnNorms) y = c_.normalise(layer.feed_norm, feed_input_, layer.experts, w);
  mix(layer, index, x, w);
  if (layer.mlp || layer.experts) {
    if (layer.mlp) c_.expect(layer.mlp->gate ? layer.mlp->gate.w : layer.mlp->up.w, w);
    if (layer.parallel == kInTurn) y = c_.normalise(layer.feed_norm, feed_input_, layer.experts, w);
    if (layer.mlp) feeds_.mlp(*layer.mlp, index, y.rows, layer.feed_post_norm, w);
    else feeds_.experts(*layer.experts, layer.feed_post_norm, y, w);
  }
  if (layer.input) inputs_.mix(*layer.input, index, w);
}

void Program::mix(const Layer& layer, int index, const Normed& x, Worker& w) {
  const Norm& post = layer.mixer_post_norm;
  if (layer.attention) return attention_.mix(*layer.attention, index, x.rows, post, w);
  if (layer.latent) return latent_.mix(*layer.latent, index, x.rows, post, w);
  if (layer.delta) return recurrent_.mix(*layer.delta, index, x, post, w);
  if (layer.mamba) return recurrent_.mix(*layer.mamba, index, x, post, w);
  recurrent_.mix(*layer.conv, index, x, post, w);
}

// Only the keys and values of a layer.
void Program::keys(int index, Worker& w) {
  const Layer& layer = layers_[index];
  const Normed x = c_.normalise(layer.mixer_norm, mixer_input_, false, w);
  if (layer.attention) attention_.keys(*layer.attention, index, x.rows, w);
  if (layer.latent) latent_.keys(*layer.latent, x.rows, w);
}

// The residual behind a layer, if it was asked for. Nobody writes to it before all have met again.
void Program::tap(int index, const Worker& w) {
  const Step& step = *c_.step;
  for (int i = 0; i < step.tap_count; i++) {
    if (step.taps[i] != index) continue;
    float* to = step.tapped + size_t(i) * step.rows * d_.hidden;
    for (int r = c_.pool.start(w.index, step.rows); r < c_.pool.start(w.index + 1, step.rows); r++)
      std::copy_n(c_.row(std::max(0, step.query_start[r + 1] - 1)), d_.hidden, to + size_t(r) * d_.hidden);
  }
}

void Program::logits(const float* hidden, int rows, float* out, size_t stride) {
  if (rows <= 0) return;
  Step nothing{};
  nothing.tokens = rows;
  c_.begin(nothing, most_.any);
  c_.adapters.forget();  // they leave the head as it is
  const Rows x = head_store_.need(rows, d_.hidden);
  const bool changed = d_.logit_scale != 1.0f || d_.logit_softcap;
  c_.pool.run(3, [&](int index) {
    const FlushDenormals flush;
    Worker w{index};
    c_.k.begin();
    c_.expect(d_.head, w);
    c_.each(rows, w, [&](int t) { c_.k.quantise(hidden + size_t(t) * d_.hidden, x, t); });
    c_.meet(w);
    c_.multiply({d_.head, nullptr}, x, {out, stride, nullptr, false, 0, 0}, w);
    if (changed) {
      constexpr int kPart = 4096;
      const int parts = (int(stride) + kPart - 1) / kPart;
      c_.meet(w);
      c_.each(rows * parts, w, [&](int i) {
        const size_t from = size_t(i % parts) * kPart, count = std::min(size_t(kPart), stride - from);
        c_.k.scale_and_cap(out + i / parts * stride + from, count, d_.logit_scale, d_.logit_softcap);
      });
    }
    c_.k.end();
  });
  c_.step = nullptr;
}

}  // namespace quire
