#include "adapters.h"

#include <algorithm>

#include "step_context.h"

namespace quire {

namespace {

constexpr int kTile = 16;     // rows of `Rows` that lie together
constexpr int kRunRows = 64;  // of a run, from the first of a tile on: whole tiles but for the last
constexpr int kFewRows = 4;   // of a run that begins within a tile, and ends there: no kernel takes more at once

}  // namespace

void Adapters::begin() {
  const Step& step = *c_.step;
  runs_.clear();
  present_.clear();
  for (int t = 0, end; step.adapters && t < step.tokens; t = end) {
    const int inside = t % kTile, most = inside ? std::min(kTile - inside, kFewRows) : kRunRows;
    for (end = t + 1; end < step.tokens && end - t < most && step.adapters[end] == step.adapters[t];) end++;
    if (step.adapters[t]) runs_.push_back({step.adapters[t], t, end});
  }
  if (runs_.empty()) return;
  std::stable_sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.adapter < b.adapter; });
  for (const Run& run : runs_)
    if (present_.empty() || present_.back() != run.adapter) present_.push_back(run.adapter);
  floats_.need(size_t(c_.pool.size()) * kRunRows * step.adapter_rank);
  for (int i = 0; i < kMostPieces; i++) low_[i] = store_[i].need(step.tokens, step.adapter_rank);
}

const LowRank& Adapters::of(const Adapted& on, const Run& run, int part) const {
  return c_.step->adapter[run.adapter][on.layer].*on.parts[part];
}

bool Adapters::update(const Adapted& on) const {
  if (runs_.empty()) return false;
  for (int64_t adapter : present_)
    for (int part = 0; part < on.count; part++)
      if ((c_.step->adapter[adapter][on.layer].*on.parts[part]).a.n) return true;
  return false;
}

void Adapters::shrink(const Adapted& on, Rows x, Worker& w) {
  const int rank = c_.step->adapter_rank;
  float* floats = floats_.data() + size_t(w.index) * kRunRows * rank;
  c_.each(int(runs_.size()) * on.count, w, [&](int item) {
    const Run& run = runs_[item / on.count];
    const int part = item % on.count;
    const LowRank& update = of(on, run, part);
    if (!update.a.n) return;
    const Piece piece{&update.a, 0, update.a.groups(), {floats, size_t(rank), nullptr, false, run.m0, 0}};
    c_.k.gemm(&piece, 1, x, run.m0, run.m1, c_.scratch(w));
    for (int m = run.m0; m < run.m1; m++) {
      float* row = floats + size_t(m - run.m0) * rank;
      for (int i = 0; i < update.a.n; i++) row[i] *= update.scale;
      std::fill(row + update.a.n, row + rank, 0.0f);
      c_.k.quantise(row, low_[part], m);
    }
  });
  c_.meet(w);
}

void Adapters::expand(const Adapted& on, int part, const Piece& piece, int m0, int m1, const Worker& w) const {
  for (const Run& run : runs_) {
    const int first = std::max(run.m0, m0), last = std::min(run.m1, m1);
    if (first >= last) continue;
    const LowRank& update = of(on, run, part);
    if (!update.b.n) continue;
    Piece added{&update.b, piece.g0, piece.g1, piece.out};
    added.out.bias = nullptr;
    added.out.add = true;
    c_.k.gemm(&added, 1, low_[part], first, last, c_.scratch(w));
  }
}

}  // namespace quire
