// Feeds: one MLP for every token, or experts that a router chooses for each.
//
//   scores ─► top k ─► rows sorted by expert ─► gate and up, activation ─► down ─► weighed, added up
//
// Refuses to know: mixers, what tokens mean.
#pragma once

#include <vector>

#include "step_context.h"

namespace quire {

class Feeds {
 public:
  explicit Feeds(StepContext& c) : c_(c) {}

  struct Widths {  // the most of any layer: an MLP's, an expert's; how many experts, and how many of them for a token
    int mlp = 0, expert = 0, experts = 0, top_k = 0;
  };
  void begin(const Widths& most);

  void mlp(const Mlp& a, int layer, Rows x, const Norm& post, Worker& w);
  void experts(const Experts& a, const Norm& post, const Normed& x, Worker& w);

 private:
  struct Job {  // rows [m0, m1) through one MLP, `units` parts of it for every chunk of rows, numbered from `first` on
    const Mlp* mlp;
    int m0, m1, first, chunk;
  };
  struct Jobs {
    std::vector<Job> list;
    int items = 0;

    void add(const Mlp& mlp, int m0, int m1, int units, int inputs);
    const Job& of(int item) const;
  };
  struct Part {  // of a job: which unit, which rows
    const Mlp& mlp;
    int unit, m0, m1;
  };
  static Part part_of(const Jobs& jobs, int item);

  void up(const Jobs& jobs, Rows x, Rows out, Worker& w, const Adapted* on = nullptr);
  void down(const Jobs& jobs, Rows x, float* out, Worker& w);
  static void hide_groups(const Router& r, std::vector<float>& choice);
  void choose(const Experts& a, int token);
  void sort(const Experts& a);
  void gather(const Experts& a, Rows from, int token);
  void combine(const Experts& a, const Norm& post, int token);

  StepContext& c_;
  Buffer<float> up_scratch_;  // [workers, 2, kRowChunk, kBlock]
  RowBuffer gated_store_, sorted_store_, sorted_gated_store_;
  Rows gated_{}, sorted_{}, sorted_gated_{};
  NormedRows router_input_, expert_input_;
  Buffer<float> scores_, expert_out_, shared_out_;  // [tokens, experts]; [sorted rows, hidden]; [tokens, hidden]
  std::vector<int32_t> chosen_, place_;             // [tokens, top_k]: experts, and which sorted rows are theirs
  std::vector<float> weights_, shared_weights_;
  Jobs up_jobs_, down_jobs_;  // of the experts that are chosen
};

}  // namespace quire
