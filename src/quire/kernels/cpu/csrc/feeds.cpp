#include "feeds.h"

#include <cmath>

namespace quire {

namespace {

constexpr int kTile = 16;        // rows of `Rows` that lie together: every expert's begin with one
constexpr int kDownGroups = 16;  // groups of outputs of an expert's last product taken at a time
constexpr int kFewTokens = 8;    // whose experts one worker chooses sooner than all meet
constexpr float kNever = -1e38f;

int pieces(int total, int size) { return (total + size - 1) / size; }

int down_units(const Mlp& a) { return pieces(a.down.w.groups(), kDownGroups); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void Feeds::Jobs::add(const Mlp& mlp, int m0, int m1, int units, int inputs) {
  const int chunk = row_chunk(inputs, m1 - m0);
  list.push_back({&mlp, m0, m1, items, chunk});
  items += units * pieces(m1 - m0, chunk);
}

const Feeds::Job& Feeds::Jobs::of(int item) const {
  auto beyond = std::upper_bound(list.begin(), list.end(), item, [](int i, const Job& job) { return i < job.first; });
  return *--beyond;
}

// Row chunks innermost: they find the weights in the cache.
Feeds::Part Feeds::part_of(const Jobs& jobs, int item) {
  const Job& job = jobs.of(item);
  const int chunks = pieces(job.m1 - job.m0, job.chunk), at = item - job.first, m0 = job.m0 + at % chunks * job.chunk;
  return {*job.mlp, at / chunks, m0, std::min(m0 + job.chunk, job.m1)};
}

void Feeds::begin(const Widths& most) {
  up_scratch_.need(size_t(c_.pool.size()) * 2 * kRowChunk * kBlock);
  gated_ = gated_store_.need(c_.capacity, most.mlp);
  if (!most.experts) return;
  const int tokens = c_.step->tokens, pairs = tokens * most.top_k, hidden = c_.d.hidden;
  const int rows = pairs + kTile * std::min(pairs, most.experts);
  sorted_ = sorted_store_.need(rows, hidden);
  sorted_gated_ = sorted_gated_store_.need(rows, most.expert);
  router_input_.need(c_.capacity, hidden, c_.pool.size(), true);
  expert_input_.need(c_.capacity, hidden, c_.pool.size(), false);
  scores_.need(size_t(tokens) * most.experts);
  expert_out_.need(size_t(rows) * hidden);
  shared_out_.need(size_t(tokens) * hidden);
  chosen_.resize(pairs);
  place_.resize(pairs);
  weights_.resize(pairs);
  shared_weights_.resize(tokens);
}

// Gate and up for a block of outputs of many rows, and the activation while they are in the cache.
void Feeds::up(const Jobs& jobs, Rows x, Rows out, Worker& w, const Adapted* on) {
  float* gates = up_scratch_.data() + size_t(w.index) * 2 * kRowChunk * kBlock;
  float* ups = gates + kRowChunk * kBlock;
  const bool updates = on && c_.adapters.update(*on);
  if (updates) c_.adapters.shrink(*on, x, w);
  c_.each(jobs.items, w, [&](int item) {
    const auto [a, b, m0, m1] = part_of(jobs, item);
    Piece parts[2];
    int count = 0;
    if (a.gate) parts[count++] = {&a.gate.w, 2 * b, 2 * b + 2, {gates, kBlock, a.gate.bias, false, m0, 2 * b}};
    parts[count++] = {&a.up.w, 2 * b, 2 * b + 2, {ups, kBlock, a.up.bias, false, m0, 2 * b}};
    c_.k.gemm(parts, count, x, m0, m1, c_.scratch(w));
    for (int j = 0; updates && j < count; j++) c_.adapters.expand(*on, j, parts[j], m0, m1, w);
    for (int m = m0; m < m1; m++) {
      const float *g = gates + (m - m0) * kBlock, *u = ups + (m - m0) * kBlock;
      c_.k.activate(Activation(a.activation), a.gate ? g : u, a.gate ? u : nullptr, out, m, b);
    }
  });
}

void Feeds::down(const Jobs& jobs, Rows x, float* out, Worker& w) {
  c_.each(jobs.items, w, [&](int item) {
    const auto [a, unit, m0, m1] = part_of(jobs, item);
    const int g0 = unit * kDownGroups, g1 = std::min(g0 + kDownGroups, a.down.w.groups());
    const Piece piece{&a.down.w, g0, g1, {out, size_t(c_.d.hidden), a.down.bias, false, 0, 0}};
    c_.k.gemm(&piece, 1, x, m0, m1, c_.scratch(w));
  });
}

void Feeds::mlp(const Mlp& a, int layer, Rows x, const Norm& post, Worker& w) {
  Adapted into(layer);
  if (a.gate) into.add(&AdapterLayer::gate);
  into.add(&AdapterLayer::up);
  const Adapted out(layer, &AdapterLayer::down);
  Jobs whole;
  whole.add(a, 0, c_.step->tokens, a.width / kBlock, a.up.w.k);
  Rows gated = gated_;
  gated.k = a.width;
  up(whole, x, gated, w, &into);
  c_.expect(a.down.w, w);
  c_.meet(w);
  c_.multiply_into_residual(a.down, gated, post, w, &out);
}

void Feeds::experts(const Experts& a, const Norm& post, const Normed& x, Worker& w) {
  const int tokens = c_.step->tokens, runs = pieces(tokens, kTile), chunks = pieces(a.count, kTile);
  const bool apart = a.router_norm.weight, few = tokens <= kFewTokens;
  const float* seen = apart ? c_.normalise(a.router_norm, router_input_, true, w).floats : x.floats;
  const Rows routed = apart ? c_.normalise(a.norm, expert_input_, false, w).rows : x.rows;
  c_.each(runs * chunks, w, [&](int item) {
    const int e0 = item / runs * kTile, m0 = item % runs * kTile;
    c_.k.float_product(a.router.weight, e0, std::min(e0 + kTile, a.count), seen, m0, std::min(m0 + kTile, tokens),
                       c_.d.hidden, scores_.data(), a.count);
  });
  c_.meet(w);
  auto decide = [&](int t) {
    choose(a, t);
    if (!a.shared_gate) return;
    c_.k.float_product(a.shared_gate, 0, 1, x.floats, t, t + 1, c_.d.hidden, shared_weights_.data(), 1);
    shared_weights_[t] = sigmoid(shared_weights_[t]);
  };
  if (!few) {
    c_.each_token(w, decide);
    c_.meet(w);
  }
  if (w.index == 0) {
    for (int t = 0; few && t < tokens; t++) decide(t);
    sort(a);
  }
  c_.meet(w);
  c_.each_token(w, [&](int t) { gather(a, routed, t); });
  c_.meet(w);
  Rows gated = sorted_gated_, shared = gated_;
  gated.k = a.expert->width;
  shared.k = a.shared.width;
  Jobs beside, beside_down;
  if (a.shared.up) {
    beside.add(a.shared, 0, tokens, a.shared.width / kBlock, a.shared.up.w.k);
    beside_down.add(a.shared, 0, tokens, down_units(a.shared), a.shared.down.w.k);
  }
  up(up_jobs_, sorted_, gated, w);
  up(beside, x.rows, shared, w);
  c_.meet(w);
  down(down_jobs_, gated, expert_out_.data(), w);
  down(beside_down, shared, shared_out_.data(), w);
  c_.meet(w);
  c_.each_token(w, [&](int t) { combine(a, post, t); });
  c_.meet(w);
}

// Hides all groups of experts but the best.
void Feeds::hide_groups(const Router& r, std::vector<float>& choice) {
  const int size = int(choice.size()) / r.groups;
  std::vector<float> best(r.groups);
  for (int g = 0; g < r.groups; g++) {
    float first = kNever, second = kNever;
    for (int e = g * size; e < (g + 1) * size; e++) {
      second = std::max(second, std::min(first, choice[e]));
      first = std::max(first, choice[e]);
    }
    best[g] = r.best_two ? first + second : first;
  }
  std::vector<char> kept(r.groups);
  for (int i = 0; i < r.top_groups; i++) {
    const auto at = std::max_element(best.begin(), best.end());
    kept[at - best.begin()] = 1;
    *at = 2 * kNever;
  }
  for (size_t e = 0; e < choice.size(); e++)
    if (!kept[e / size]) choice[e] = kNever;
}

// Which experts a token goes through, and how much each counts.
void Feeds::choose(const Experts& a, int token) {
  const Router& r = a.router;
  float *scores = scores_.data() + size_t(token) * a.count, *weights = weights_.data() + size_t(token) * a.top_k;
  float top = kNever, total = 0, sum = 0;
  for (int e = 0; e < a.count; e++) {
    scores[e] = (r.bias ? scores[e] + r.bias[e] : scores[e]) * r.logit_scale;
    top = std::max(top, scores[e]);
  }
  for (int e = 0; e < a.count; e++) total += scores[e] = r.sigmoid ? sigmoid(scores[e]) : std::exp(scores[e] - top);
  for (int e = 0; !r.sigmoid && e < a.count; e++) scores[e] /= total;
  std::vector<float> choice(scores, scores + a.count);
  for (int e = 0; r.correction && e < a.count; e++) choice[e] += r.correction[e];
  if (r.groups > 1) hide_groups(r, choice);
  for (int i = 0; i < a.top_k; i++) {
    const int e = int(std::max_element(choice.begin(), choice.end()) - choice.begin());
    chosen_[size_t(token) * a.top_k + i] = e;
    choice[e] = 2 * kNever;
    sum += weights[i] = scores[e];
  }
  for (int i = 0; i < a.top_k; i++) {
    const int e = chosen_[size_t(token) * a.top_k + i];
    weights[i] *= r.scale / (r.normalised ? sum + 1e-20f : 1.0f) * (r.scales ? r.scales[e] : 1.0f);
  }
}

// Rows of each expert, and the work there is to do with them.
void Feeds::sort(const Experts& a) {
  const int pairs = c_.step->tokens * a.top_k;
  std::vector<int> count(a.count), next(a.count);
  for (int i = 0; i < pairs; i++) count[chosen_[i]]++;
  up_jobs_ = down_jobs_ = {};
  for (int e = 0, row = 0; e < a.count; e++) {
    if (!count[e]) continue;
    next[e] = row;
    const Mlp& mlp = a.expert[e];
    up_jobs_.add(mlp, row, row + count[e], mlp.width / kBlock, mlp.up.w.k);
    down_jobs_.add(mlp, row, row + count[e], down_units(mlp), mlp.down.w.k);
    row = pieces(row + count[e], kTile) * kTile;
  }
  for (int i = 0; i < pairs; i++) place_[i] = next[chosen_[i]]++;
}

// A token's row to where its experts read it, times their weights if inputs are weighed.
void Feeds::gather(const Experts& a, Rows from, int token) {
  for (int i = token * a.top_k; i < (token + 1) * a.top_k; i++) {
    const int to = place_[i];
    const float factor = a.router.weighs_input ? weights_[i] : 1.0f;
    for (int b = 0; b < from.blocks(); b++) {
      std::copy_n(from.quants(token, b), kBlock, sorted_.quants(to, b));
      for (int i : {0, 16, 32}) {
        sorted_.scale(to, b)[i] = from.scale(token, b)[i] * factor;
        sorted_.excesses(to, b)[i] = from.excesses(token, b)[i];
      }
    }
  }
}

void Feeds::combine(const Experts& a, const Norm& post, int token) {
  const int hidden = c_.d.hidden;
  float *mixed = c_.leaving.data() + size_t(token) * hidden, *shared = shared_out_.data() + size_t(token) * hidden;
  std::fill_n(mixed, hidden, 0.0f);
  for (int i = token * a.top_k; i < (token + 1) * a.top_k; i++) {
    const float weight = a.router.weighs_input ? 1.0f : weights_[i];
    c_.k.add_scaled(mixed, expert_out_.data() + size_t(place_[i]) * hidden, weight, hidden);
  }
  if (a.post_norm.weight) c_.k.norm(mixed, a.post_norm, hidden, mixed);
  if (a.shared.up) {
    if (a.shared_post_norm.weight) c_.k.norm(shared, a.shared_post_norm, hidden, shared);
    c_.k.add_scaled(mixed, shared, a.shared_gate ? shared_weights_[token] : 1.0f, hidden);
  }
  if (post.weight) c_.k.norm(mixed, post, hidden, mixed);
  c_.k.add_scaled(c_.row(token), mixed, c_.d.residual_scale, hidden);
}

}  // namespace quire
