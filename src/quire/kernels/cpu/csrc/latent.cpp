#include "latent.h"

namespace quire {

void LatentMixer::begin(float* queries, size_t query_stride, float* mixed, size_t mixed_stride, int attended_width,
                        int by_head_width, int compressed_width) {
  queries_ = queries;
  query_stride_ = query_stride;
  mixed_ = mixed;
  mixed_stride_ = mixed_stride;
  attended_ = attended_store_.need(c_.capacity, attended_width);
  by_head_ = by_head_store_.need(c_.capacity, by_head_width);
  compressed_ = compressed_store_.need(c_.capacity, compressed_width);
}

// The latent is normed, the part behind it rotated; a key has them the other way round.
void LatentMixer::store_key(const Latent& a, int token, float* made) {
  const StepGroup& group = c_.step->group[a.kv_group];
  const float* cos = pages_.angles(a.rotation, token);
  const int half = a.rotary / 2;
  c_.k.norm(made, a.kv_norm, a.rank, made);
  std::rotate(made, made + a.rank, made + key_width(a));
  c_.k.rope(made, cos, cos + half, half, 1.0f, a.rotary);
  pages_.store(group, pages_.paged(group, a.place, 1, key_width(a)), token, made, nullptr);
}

void LatentMixer::keys(const Latent& a, Rows x, Worker& w) {
  const int behind = queries_end(a);
  const Linear& first = a.q_down ? a.q_down : a.q_up;
  const Piece parts[] = {StepContext::whole(first, {mixed_, mixed_stride_, nullptr, false, 0, 0}),
                         StepContext::whole(a.kv_down, {mixed_ + behind, mixed_stride_, nullptr, false, 0, 0}),
                         StepContext::whole(a.k_rotary, {mixed_ + behind + a.rank, mixed_stride_, nullptr, false, 0, 0})};
  c_.multiply(parts, 3, x, w);
  c_.expect(a.q_down ? a.q_up.w : *a.k_up, w);
  c_.meet(w);
  Rows compressed = compressed_;
  compressed.k = a.q_down.w.n;
  c_.each_token(w, [&](int t) {
    float* made = mixed_ + t * mixed_stride_;
    store_key(a, t, made + behind);
    if (a.q_down) c_.k.norm_quantise(made, a.q_norm, compressed, t, nullptr);
  });
  if (!a.q_down) return;
  c_.meet(w);
  c_.multiply(a.q_up, compressed, {mixed_, mixed_stride_, nullptr, false, 0, 0}, w);
}

// Of each head, the rotated part to where it stays; the rest goes on by a product.
void LatentMixer::split_query(const Latent& a, int token, Rows rest) {
  const float *from = mixed_ + token * mixed_stride_, *cos = pages_.angles(a.rotation, token);
  float* to = queries_ + token * query_stride_;
  const int half = a.rotary / 2;
  for (int h = 0; h < a.heads; h++, from += a.rotary + a.rest, to += key_width(a)) {
    std::copy_n(from, a.rotary, to);
    c_.k.rope(to, cos, cos + half, half, a.scale, a.rotary);
    c_.k.quantise(from + a.rotary, rest, h * c_.capacity + token);
  }
}

// Each head's rows by its matrix; heads' results are so many numbers `apart`.
void LatentMixer::by_head(const Matrix* matrices, int heads, Rows x, Out out, size_t apart, Worker& w) {
  const int tokens = c_.step->tokens, row_chunks = (tokens + kRowChunk - 1) / kRowChunk, groups = matrices->groups();
  const int parts = heads * row_chunks < 4 * c_.pool.size() ? std::min(groups, 4) : 1;
  c_.each(heads * parts * row_chunks, w, [&](int item) {
    const int m0 = item % row_chunks * kRowChunk, m1 = std::min(m0 + kRowChunk, tokens);
    const int h = item / row_chunks / parts, part = item / row_chunks % parts, first = h * c_.capacity;
    Piece piece{matrices + h, groups * part / parts, groups * (part + 1) / parts, out};
    piece.out.data += h * apart;
    piece.out.row = first;
    c_.k.gemm(&piece, 1, x, first + m0, first + m1, c_.scratch(w));
  });
}

void LatentMixer::mix(const Latent& a, int layer, Rows x, const Norm& post, Worker& w) {
  keys(a, x, w);
  c_.meet(w);
  Rows rest = by_head_, latents = by_head_, values = attended_;
  rest.k = a.rest;
  latents.k = a.rank;
  values.k = attended_width(a);
  c_.each_token(w, [&](int t) { split_query(a, t, rest); });
  c_.meet(w);
  by_head(a.k_up, a.heads, rest, {queries_ + a.rotary, query_stride_, nullptr, false, 0, 0, a.scale}, key_width(a), w);
  c_.meet(w);
  AttendArgs shape{};
  shape.kv = pages_.paged(c_.step->group[a.kv_group], a.place, 1, key_width(a));
  shape.heads = a.heads;
  shape.out = latents;
  shape.values_from = a.rotary;
  shape.head_rows = c_.capacity;
  pages_.attend(a.kv_group, shape, a.place, false, w);
  c_.meet(w);
  by_head(a.v_up, a.heads, latents, {mixed_, mixed_stride_, nullptr, false, 0, 0}, a.value_dim, w);
  c_.expect(a.o.w, w);
  c_.meet(w);
  c_.each_token(w, [&](int t) { c_.k.quantise(mixed_ + t * mixed_stride_, values, t); });
  c_.meet(w);
  const Adapted on(layer, &AdapterLayer::o);
  c_.multiply_into_residual(a.o, values, post, w, &on);
}

}  // namespace quire
