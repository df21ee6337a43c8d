// Multi-head latent attention as a mixer, in its absorbed form: pages are never expanded to heads.
// Refuses to know: norms before it and behind it, who owns which page.
#pragma once

#include "attention.h"

namespace quire {

class LatentMixer {
 public:
  LatentMixer(StepContext& c, PagedAttention& pages) : c_(c), pages_(pages) {}

  static int key_width(const Latent& a) { return a.rotary + a.rank; }
  static int width(const Latent& a) { return a.heads * key_width(a); }  // of queries
  static int query_width(const Latent& a) { return a.heads * (a.rotary + a.rest); }
  // Before queries are in the latents' space: they (or what they are made of) and then latents and keys; later, values.
  static int mixed_width(const Latent& a) { return std::max({queries_end(a) + key_width(a), a.heads * a.value_dim}); }
  static int attended_width(const Latent& a) { return a.heads * a.value_dim; }
  static int by_head_width(const Latent& a) { return a.heads * std::max(a.rest, a.rank); }

  void begin(float* queries, size_t query_stride, float* mixed, size_t mixed_stride, int attended_width, int by_head_width,
             int compressed_width);
  void keys(const Latent& a, Rows x, Worker& w);
  void mix(const Latent& a, int layer, Rows x, const Norm& post, Worker& w);

 private:
  static int queries_end(const Latent& a) { return std::max(query_width(a), a.q_down.w.n); }
  void store_key(const Latent& a, int token, float* made);
  void split_query(const Latent& a, int token, Rows rest);
  void by_head(const Matrix* matrices, int heads, Rows x, Out out, size_t apart, Worker& w);

  StepContext& c_;
  PagedAttention& pages_;
  float *queries_ = nullptr, *mixed_ = nullptr;
  size_t query_stride_ = 0, mixed_stride_ = 0;
  RowBuffer attended_store_, by_head_store_, compressed_store_;
  Rows attended_{}, by_head_{}, compressed_{};  // by_head: rows of the first head, those of the second, ...
};

}  // namespace quire
