// LoRA adapters of a step: which rows have which, and what their updates add to the products of a layer.
//
//   shrink:  low = quantised(scale * a x), of every run of rows with the same adapter, once the rows are there
//   expand:  b low is added to what the base's product has written, piece by piece, while that is in the cache
#include <algorithm>

#include "program.h"

namespace quire {

namespace {

constexpr int kTile = 16;     // rows of `Rows` that lie together
constexpr int kRunRows = 64;  // of a run, from the first of a tile on: whole tiles but for the last
constexpr int kFewRows = 4;   // of a run that begins within a tile, and ends there: no kernel takes more at once

}  // namespace

void Program::find_runs(const Step& step) {
  runs_.clear();
  for (int t = 0, end; step.adapters && t < step.tokens; t = end) {
    const int inside = t % kTile, most = inside ? std::min(kTile - inside, kFewRows) : kRunRows;
    for (end = t + 1; end < step.tokens && end - t < most && step.adapters[end] == step.adapters[t];) end++;
    if (step.adapters[t]) runs_.push_back({step.adapters[t], t, end});
  }
  if (runs_.empty()) return;
  std::stable_sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.adapter < b.adapter; });
  updated_.assign(size_t(d_.layers) * kProducts, 0);
  for (size_t i = 0; i < runs_.size(); i++) {
    if (i && runs_[i].adapter == runs_[i - 1].adapter) continue;
    for (int layer = 0; layer < d_.layers; layer++)
      for (int product = 0; product < kProducts; product++) {
        const Adapted on(step, layer, Product(product));
        for (int part = 0; part < on.count; part++) updated_[layer * kProducts + product] |= on.of(runs_[i], part).a.n > 0;
      }
  }
  low_floats_.need(size_t(pool_.size()) * kRunRows * step.adapter_rank);
  for (int i = 0; i < kMost; i++) low_[i] = low_store_[i].reserve(step.tokens, step.adapter_rank);
}

Program::Adapted::Adapted(const Step& step, int layer, Product product) : step(step), layer(layer), product(product) {
  auto add = [&](LowRank AdapterLayer::*part) { parts[count++] = part; };
  if (product == kQkv) add(&AdapterLayer::q), add(&AdapterLayer::k), add(&AdapterLayer::v);
  if (product == kO) add(&AdapterLayer::o);
  if (product == kGateUp) add(&AdapterLayer::gate), add(&AdapterLayer::up);
  if (product == kDown) add(&AdapterLayer::down);
}

void Program::shrink(const Adapted& on, Rows x, int worker) {
  if (!updates(on)) return;
  const int rank = on.step.adapter_rank, total = int(runs_.size()) * on.count;
  const int stage = (d_.layers * kLayerStages + 2) + on.layer * kProducts + on.product;
  float* floats = low_floats_.data() + size_t(worker) * kRunRows * rank;
  for (int item; (item = pool_.take(stage, worker, total)) < total;) {
    const Run& run = runs_[item / on.count];
    const int part = item % on.count;
    const LowRank& update = on.of(run, part);
    if (!update.a.n) continue;
    const Piece piece = whole(update.a, {floats, size_t(rank), nullptr, false, run.m0, 0});
    k_.gemm(&piece, 1, x, run.m0, run.m1, scratch(worker));
    for (int m = run.m0; m < run.m1; m++) {
      float* row = floats + size_t(m - run.m0) * rank;
      for (int i = 0; i < update.a.n; i++) row[i] *= update.scale;
      std::fill(row + update.a.n, row + rank, 0.0f);
      k_.quantise(row, low_[part], m);
    }
  }
  pool_.barrier();
}

void Program::expand(const Adapted& on, int part, const Piece& piece, int m0, int m1, int worker) {
  for (const Run& run : runs_) {
    const int first = std::max(run.m0, m0), last = std::min(run.m1, m1);
    if (first >= last) continue;
    const LowRank& update = on.of(run, part);
    if (!update.b.n) continue;
    Piece added{&update.b, piece.g0, piece.g1, piece.out};
    added.out.bias = nullptr;
    added.out.add = true;
    k_.gemm(&added, 1, low_[part], first, last, scratch(worker));
  }
}

}  // namespace quire
