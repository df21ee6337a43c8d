// Attention as a mixer: queries, keys and values of a step's tokens, keys and values to their pages, and what queries
// attend to there. Refuses to know: norms before it and behind it, who owns which page.
#pragma once

#include <utility>
#include <vector>

#include "attend_plan.h"
#include "step_context.h"

namespace quire {

// What mixers over pages share: plans of who is attended together, rotations, pages.
class PagedAttention {
 public:
  explicit PagedAttention(StepContext& c) : c_(c) {}

  // For queries in `q`, `stride` numbers a token.
  void begin(const float* q, size_t stride, int most_kv_heads);
  void end();  // what rows paid is added up

  void turn(int token);  // works out by which angles
  const float* angles(int rotation, int token) const { return angles_.data() + token * angle_width_ + angles_of_[rotation]; }
  Paged paged(const StepGroup& group, int place, int kv_heads, int head_dim) const;
  void store(const StepGroup& group, const Paged& kv, int token, const float* k, const float* v) const;
  // `shape`: what is common to all queries. Quantises into its `out`.
  void attend(int group, const AttendArgs& shape, int place, bool sparse, Worker& w);
  void round_runs(const StepGroup& group, int place, int kv_heads, int head_dim, Worker& w);
  // Scratch that attention of such heads takes.
  void expect(int group, int heads, int kv_heads, int head_dim);

 private:
  StepContext& c_;
  std::vector<AttendPlan> plans_;              // by KV group
  std::vector<std::pair<int, int>> run_ends_;  // (token, row) of tokens that end a run of kKeys
  std::vector<size_t> angles_of_;              // by rotation: where those of a token begin
  size_t angle_width_ = 0;
  Buffer<float> angles_, scratch_, mass_;
  size_t stride_ = 0;
  int mass_heads_ = 0;
};

class AttentionMixer {
 public:
  AttentionMixer(StepContext& c, PagedAttention& pages) : c_(c), pages_(pages) {}

  static int width(const Attention& a) {  // of queries, gates, keys and values
    return (a.heads * (a.gate ? 2 : 1) + (a.k ? 2 * a.kv_heads : 0)) * a.head_dim;
  }
  static int attended_width(const Attention& a) { return a.heads * a.head_dim; }

  void begin(float* qkv, size_t stride, int attended_width);
  void keys(const Attention& a, int layer, Rows x, Worker& w);  // queries too; keys and values in their pages
  void mix(const Attention& a, int layer, Rows x, const Norm& post, Worker& w);

 private:
  void rotate(const Attention& a, const StepGroup& group, const Paged& kv, int token);

  StepContext& c_;
  PagedAttention& pages_;
  float* qkv_ = nullptr;
  size_t stride_ = 0;
  RowBuffer attended_store_;
  Rows attended_{};
};

}  // namespace quire
