// KIVI (Liu et al. 2024): a run of kKeys tokens rounded to 4 or 2 bits, keys channel by channel, values token by token.
// Included by `attend.h`, after `attend_block.h`. Refuses to know: which tokens are read rounded.

// Keys of one head, [dim / W][kKeys][W] floats.
template <int Bits>
inline void round_keys(const float* k, int dim, uint8_t* to, size_t step, uint16_t* scales) {
  constexpr float most_steps = (1 << Bits) - 1;
  vf low[kBlock * kMostScales / 2 / W], inverse[kBlock * kMostScales / 2 / W];
  for (int d = 0; d < dim; d += W) {
    vf least = load(k + d * kKeys), most = least;
    for (int j = 1; j < kKeys; j++) {
      vf x = load(k + d * kKeys + j * W);
      least = minimum(least, x);
      most = maximum(most, x);
    }
    store_half(scales + dim + d, within(least, -65504.0f, 65504.0f));
    low[d / W] = load_half(scales + dim + d);
    store_half(scales + d, within((most - low[d / W]) / most_steps, 0.0f, 65504.0f));
    vf scale = load_half(scales + d);
    inverse[d / W] = scale > 0 ? 1.0f / scale : vf{};
  }
  for (int j = 0; j < kKeys; j++, to += step)
    store_steps<Bits>(dim, to, [&](int i) {
      return nearest(within((load(k + i * kKeys + j * W) - low[i / W]) * inverse[i / W], 0.0f, most_steps));
    });
}

template <int Bits>
inline void round_run(const Paged& latest, const Table& table, int first, const Paged& kv, int64_t page, int offset,
                      float* scratch) {
  const int dim = kv.head_dim;
  float *k = scratch, *v = scratch + kKeys * dim, token[kBlock * kMostScales / 2];
  uint8_t* to = kv.k + size_t(page) * kv.page_stride + offset * kv.token_stride();
  for (int head = 0; head < kv.kv_heads; head++, to += kv.head_bytes()) {
    gather(latest, table, head, first, kKeys, k, v);
    round_keys<Bits>(k, dim, to, kv.token_stride(), kv.scales_of(page, offset, 0) + head * 2 * dim);
    for (int j = 0; j < kKeys; j++) {
      for (int d = 0; d < dim; d += W) store(token + d, load(v + d * kKeys + j * W));
      store_blocks<Bits>(token, dim, to + kv.v_offset + j * kv.token_stride(),
                         kv.scales_of(page, offset + j, head) + kv.v_scales);
    }
  }
}

void round_run(const Paged& latest, const int32_t* pages, int first, const Paged& kv, int64_t page, int offset,
               float* scratch) {
  const auto round = kv.kind == kKivi2 ? round_run<2> : round_run<4>;
  round(latest, {pages, kNoTree, 0}, first, kv, page, offset, scratch);
}
