#include "program.h"

#include <algorithm>
#include <cmath>

namespace quire {

namespace {

constexpr int kStages = kLayerStages;
constexpr int kRowChunk = 128;     // rows of a multiplication taken at a time: a multiple of 16
constexpr int kQueryTile = 16;     // query tokens attended together
constexpr int kAlone = 2;          // rows that every worker norms for itself
constexpr int kSharedLeast = 32;   // KV positions worth reading together
constexpr size_t kAhead = 1 << 17; // bytes of the next weights to ask for while waiting

int pad16(int n) { return (n + 15) / 16 * 16; }

int chunk_for(int total, int workers) { return std::max(1, total / (workers * 4)); }

int pieces(int total, int size) { return (total + size - 1) / size; }

}  // namespace

Rows Program::RowBuffers::reserve(int rows, int k) {
  rows = pad16(rows);
  size_t blocks = size_t(rows) * (k / kBlock);
  q.need(size_t(rows) * k);
  factors.need(blocks * 2);
  total.need(blocks * 2);
  return {q.data(), factors.data(), total.data(), k};
}

Program::Program(const Decoder& decoder, const Kernels& kernels, Pool& pool)
    : d_(decoder), layers_(decoder.layer, decoder.layer + decoder.layers), k_(kernels), pool_(pool) {
  qkv_ = (d_.heads + 2 * d_.kv_heads) * d_.head_dim;
  size_t widest = std::max({d_.hidden, d_.intermediate, d_.heads * d_.head_dim});
  scratch_stride_ = (scratch_bytes(widest) + 63) / 64 * 64;
  scratch_.need(scratch_stride_ * pool.size());
  own_store_ = std::vector<RowBuffers>(pool.size());
  for (RowBuffers& store : own_store_) own_.push_back(store.reserve(kAlone, d_.hidden));
  gates_.need(size_t(pool.size()) * 2 * kRowChunk * kBlock);
}

void Program::reserve(int tokens) {
  if (tokens <= capacity_) return;
  capacity_ = pad16(tokens);
  x_.need(size_t(capacity_) * d_.hidden);
  qkv_buffer_.need(size_t(capacity_) * qkv_);
  angles_.need(size_t(capacity_) * d_.rotary);
  normed_ = normed_store_.reserve(capacity_, d_.hidden);
  attended_ = attended_store_.reserve(capacity_, d_.heads * d_.head_dim);
  gated_ = gated_store_.reserve(capacity_, d_.intermediate);
}

static int check(const Step& s, int vocab) {
  for (int t = 0; s.adapters && t < s.tokens; t++) {
    const int64_t adapter = s.adapters[t];
    if (adapter < 0 || adapter >= s.adapter_count || (adapter && !s.adapter[adapter])) return kBadAdapter;
  }
  if (s.tokens < 0 || s.rows < 0 || s.layers < 0 || (s.asks && (s.groups != 1 || s.mass_tokens < 1))) return kBadShape;
  for (int t = 0; t < s.tokens; t++)
    if (s.ids[t] < 0 || s.ids[t] >= vocab) return kBadToken;
  for (int g = 0; g < s.groups; g++) {
    const StepGroup& group = s.group[g];
    const bool apart = group.latest >= 0;
    if (apart && (group.latest >= s.groups || group.tokens_per_page % kKeys || s.tree_base || s.sparse)) return kBadShape;
    int64_t slots = s.pages * group.tokens_per_page;
    for (int t = 0; t < s.tokens; t++)
      if (group.kv_slots[t] < 0 || group.kv_slots[t] >= slots) return kBadSlot;
    for (int r = 0; r < s.rows; r++) {
      if (s.query_start[r + 1] < s.query_start[r] || s.query_start[r + 1] > s.tokens) return kBadShape;
      int64_t need = 0, runs = 0;
      for (int t = s.query_start[r]; t < s.query_start[r + 1]; t++) {
        if (s.positions[t] < 0) return kBadShape;
        need = std::max(need, s.positions[t] / group.tokens_per_page + 1);
        if (s.asks) runs = std::max(runs, s.positions[t] / s.mass_tokens + 1);
        if (s.tree_base && s.tree_base[r] <= s.positions[t]) {
          if (s.tree_base[r] < 0 || s.positions[t] - s.tree_base[r] > 15) return kBadShape;
          const Table table{nullptr, s.tree_base[r], uint64_t(s.tree_path[r])};
          for (int64_t p = table.base; p <= s.positions[t]; p++)
            need = std::max<int64_t>(need, table.place(int(p)) / group.tokens_per_page + 1);
        }
      }
      const bool few = s.sparse && s.sparse[r] && s.sparse[r] < s.sparse_local / group.tokens_per_page + 4;
      if ((few && s.groups == 1) || (s.sparse && (s.tree_base || s.asks))) return kBadShape;
      if (need > group.table_stride || (s.asks && s.asks[r] && runs > s.mass_runs)) return kBadShape;
      const int32_t* pages = group.page_table + r * group.table_stride;
      for (int64_t p = 0; p < need; p++)
        if (pages[p] < 0 || pages[p] >= s.pages) return kBadPage;
    }
  }
  return 0;
}

int Program::forward(const Step& step) {
  if (int refusal = check(step, d_.embed.n)) return refusal;
  if (step.tokens == 0) return 0;
  reserve(step.tokens);
  find_runs(step);
  plans_.resize(step.groups);
  size_t widest = 0;
  run_ends_.clear();
  for (int r = 0; r < step.rows; r++)
    for (int t = step.query_start[r]; t < step.query_start[r + 1]; t++)
      if (step.positions[t] % kKeys == kKeys - 1) run_ends_.push_back({t, r});
  for (int g = 0; g < step.groups; g++) {
    plan(step, step.group[g], plans_[g]);
    for (const Item& item : plans_[g].items) widest = std::max<size_t>(widest, item.count);
  }
  AttendArgs shape{};
  shape.kv.kv_heads = shape.head_end = d_.kv_heads;
  shape.kv.head_dim = d_.head_dim;
  shape.heads = d_.heads;
  shape.count = int(widest);
  if (step.asks) {
    shape.mass_runs = step.mass_runs;
    size_t size = plans_[0].asking.size() * d_.kv_heads * step.mass_runs;
    mass_.need(size);
    std::fill_n(mass_.data(), size, 0.0f);
  }
  if (step.sparse) {
    shape.sparse = 1;
    for (int g = 0; g < step.groups; g++)
      shape.sparse_width = std::max(shape.sparse_width, int32_t(step.group[g].table_stride));
  }
  attend_stride_ = (k_.attend_floats(shape) + 15) / 16 * 16;
  attend_scratch_.need(attend_stride_ * pool_.size());

  pool_.run((kStages + kProducts) * d_.layers + 2, [&](int worker) {
    k_.begin();
    embed(step, kStages * d_.layers, worker);
    pool_.barrier();
    for (int i = 0; i < std::min(step.layers, d_.layers); i++) {
      layer(step, layers_[i], i, worker);
      if (step.tap_count) tap(step, i, worker);
      if (step.observed && step.observed[i] && worker == 0) step.written(i);
    }
    if (step.layers < d_.layers) {
      qkv(step, layers_[step.layers], step.layers, worker);
    } else {
      each_token(kStages * d_.layers + 1, worker, step.tokens, [&](int t) {
        size_t at = size_t(t) * d_.hidden;
        k_.norm(x_.data() + at, d_.final_norm, d_.eps, d_.hidden, step.hidden + at);
      });
    }
    k_.end();
  });
  if (step.asks) pay(step);
  return 0;
}

// What rows paid is summed item by item, head by head: in the same order however the work was shared out.
void Program::pay(const Step& step) const {
  const float* from = mass_.data();
  for (int row : plans_[0].asking)
    for (int head = 0; head < d_.kv_heads; head++)
      for (int run = 0; run < step.mass_runs; run++) step.mass[size_t(row) * step.mass_runs + run] += *from++;
}

void Program::logits(const float* hidden, int rows, float* out, size_t stride) {
  if (rows <= 0) return;
  Rows x = head_store_.reserve(rows, d_.hidden);
  const Piece head = whole(d_.head, {out, stride, nullptr, false, 0, 0});
  const Step nothing{};
  const Adapted on(nothing, 0, kProducts);
  runs_.clear();  // adapters leave the head as it is
  pool_.run(2, [&](int worker) {
    k_.begin();
    Ahead next = ahead(d_.head, worker);
    for (int t; (t = pool_.take(0, worker, rows)) < rows;) k_.quantise(hidden + size_t(t) * d_.hidden, x, t);
    pool_.barrier(next);
    multiply(1, &head, 1, x, rows, worker, on);
    k_.end();
  });
}

// Which queries are attended together: neighbours of a prompt, and single tokens of rows with a common prefix.
void Program::plan(const Step& step, const StepGroup& group, Plan& plan) const {
  plan.queries.clear();
  plan.items.clear();
  plan.asking.clear();
  std::vector<int> single;
  auto position = [&](int t) { return step.positions[t]; };
  auto table = [&](int r) { return group.page_table + r * group.table_stride; };
  const StepGroup* latest = group.latest >= 0 ? step.group + group.latest : nullptr;
  auto latest_table = [&](int r) { return latest ? latest->page_table + r * latest->table_stride : nullptr; };
  auto asking = [&](int r) { return step.asks && step.asks[r]; };
  auto sparse = [&](int r) { return step.sparse ? step.sparse[r] : 0; };
  auto plain = [&](int r) { return !asking(r) && !sparse(r) && (!step.tree_base || step.tree_base[r] == kNoTree); };
  auto goes_on = [&](int r) {  // further on in what the row before reads and writes: of the same sequence
    int last = step.query_start[r] - 1;
    return last >= step.query_start[r - 1] && step.query_start[r + 1] > last + 1 && position(last + 1) > position(last) &&
           plain(r - 1) && plain(r) &&
           std::equal(table(r - 1), table(r - 1) + position(last) / group.tokens_per_page + 1, table(r));
  };
  for (int r = 0, next; r < step.rows; r = next) {
    next = r + 1;
    while (next < step.rows && goes_on(next)) next++;
    int begin = step.query_start[r], end = step.query_start[next];
    const bool asks = asking(r);
    if (end - begin == next - r && end - begin < kQueryTile / 2 && !asks && !sparse(r)) {
      for (; r < next; r++) single.push_back(r);
      continue;
    }
    const int32_t* pages = table(next - 1);
    const int tile = sparse(r) ? 1 : kQueryTile;
    for (int t = begin; t < end; t += tile) {
      int count = std::min(tile, end - t), first = int(plan.queries.size());
      for (int i = t; i < t + count; i++)
        plan.queries.push_back({qkv_buffer_.data() + size_t(i) * qkv_, int32_t(step.positions[i]), i, pages, kNoTree, 0,
                                latest_table(next - 1)});
      plan.items.push_back(
          {first, count, 0, int64_t(count) * step.positions[t + count - 1], asks ? int(plan.asking.size()) : -1,
           step.positions[t] / group.tokens_per_page >= sparse(r) ? sparse(r) : 0});
      if (asks) plan.asking.push_back(r);
    }
  }
  share(step, group, single, plan);
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

// Groups of up to kQueryTile rows whose tables start with the same pages; alone where nothing worth is common.
void Program::share(const Step& step, const StepGroup& group, const std::vector<int>& rows, Plan& plan) const {
  std::vector<char> taken(rows.size(), 0);
  auto pages = [&](int r) { return group.page_table + r * group.table_stride; };
  auto base = [&](int r) { return step.tree_base ? step.tree_base[r] : kNoTree; };
  auto whole = [&](int r) {
    return int(std::min<int64_t>(step.positions[step.query_start[r]], base(r)) / group.tokens_per_page);
  };
  const StepGroup* latest = group.latest >= 0 ? step.group + group.latest : nullptr;
  auto add = [&](int r) {
    int t = step.query_start[r];
    plan.queries.push_back({qkv_buffer_.data() + size_t(t) * qkv_, int32_t(step.positions[t]), t, pages(r), base(r),
                            step.tree_base ? uint64_t(step.tree_path[r]) : 0,
                            latest ? latest->page_table + r * latest->table_stride : nullptr});
  };
  const int least = (kSharedLeast + group.tokens_per_page - 1) / group.tokens_per_page;
  for (size_t i = 0; i < rows.size(); i++) {
    if (taken[i]) continue;
    int first = int(plan.queries.size()), common = whole(rows[i]), count = 1;
    int64_t cost = step.positions[step.query_start[rows[i]]];
    add(rows[i]);
    for (size_t j = i + 1; j < rows.size() && count < kQueryTile; j++) {
      if (taken[j]) continue;
      int most = std::min(common, whole(rows[j])), same = 0;
      while (same < most && pages(rows[i])[same] == pages(rows[j])[same]) same++;
      if (same < least) continue;
      taken[j] = 1;
      common = same;
      count++;
      cost += step.positions[step.query_start[rows[j]]];
      add(rows[j]);
    }
    plan.items.push_back({first, count, count > 1 ? common * group.tokens_per_page : 0, cost, -1, 0});
  }
}

void Program::embed(const Step& step, int stage, int worker) {
  int half = d_.rotary / 2;
  for (int t; (t = pool_.take(stage, worker, step.tokens)) < step.tokens;) {
    unpack_row(d_.embed, int32_t(step.ids[t]), x_.data() + size_t(t) * d_.hidden);
    float* cos = angles_.data() + size_t(t) * d_.rotary;
    for (int i = 0; i < half; i++) {
      float angle = float(step.positions[t]) * d_.inverse_frequencies[i];
      cos[i] = std::cos(angle) * d_.rope_scale;
      cos[half + i] = std::sin(angle) * d_.rope_scale;
    }
  }
}

// Where a layer's keys and values are.
Paged Program::paged(const Step& step, const StepGroup& group, int place) const {
  Paged kv{};
  kv.tokens_per_page = group.tokens_per_page;
  kv.kv_heads = d_.kv_heads;
  kv.head_dim = d_.head_dim;
  kv.kind = group.kind;
  kv.v_offset = size_t(group.tokens_per_page) * kv.token_stride();
  kv.page_stride = size_t(step.page_bytes);
  kv.k = step.pool + size_t(place) * 2 * kv.v_offset;
  kv.scales = reinterpret_cast<uint16_t*>(step.pool + size_t(group.layers) * 2 * kv.v_offset) +
              size_t(place) * 2 * kv.v_scales();
  return kv;
}

// Queries, keys and values, rotated; keys and values in their pages. Returns where those are.
Paged Program::qkv(const Step& step, const Layer& layer, int index, int worker) {
  const StepGroup& group = step.group[layer.kv_group];
  const Paged kv = paged(step, group.latest >= 0 ? step.group[group.latest] : group, layer.place);
  int stage = index * kStages, q = d_.heads * d_.head_dim, k = d_.kv_heads * d_.head_dim;
  float* qkv = qkv_buffer_.data();

  Ahead next = ahead(layer.q, worker);
  Rows x = normalise(stage, layer.input_norm, step.tokens, worker, next);
  const Piece parts[] = {whole(layer.q, {qkv, size_t(qkv_), layer.q_bias, false, 0, 0}),
                         whole(layer.k, {qkv + q, size_t(qkv_), layer.k_bias, false, 0, 0}),
                         whole(layer.v, {qkv + q + k, size_t(qkv_), layer.v_bias, false, 0, 0})};
  const Adapted on(step, index, kQkv);
  shrink(on, x, worker);
  multiply(stage + 1, parts, 3, x, step.tokens, worker, on);
  next = ahead(layer.o, worker);
  pool_.barrier(next);
  rotate(step, layer, kv, stage + 2, worker);
  return kv;
}

void Program::layer(const Step& step, const Layer& layer, int index, int worker) {
  Paged kv = qkv(step, layer, index, worker);
  const int stage = index * kStages;
  Ahead next = ahead(layer.o, worker);
  pool_.barrier(next);
  if (step.group[layer.kv_group].latest >= 0) {
    kv = paged(step, step.group[layer.kv_group], layer.place);
    round(step, layer, stage + 8, worker);
    pool_.barrier(next);
  }
  attend(step, layer, kv, stage + 3, worker);
  pool_.barrier(next);
  const Piece o = whole(layer.o, {x_.data(), size_t(d_.hidden), layer.o_bias, true, 0, 0});
  const Adapted on(step, index, kO);
  shrink(on, attended_, worker);
  multiply(stage + 4, &o, 1, attended_, step.tokens, worker, on);
  next = ahead(layer.gate, worker);
  pool_.barrier(next);
  Rows x = normalise(stage + 5, layer.post_norm, step.tokens, worker, next);
  const Adapted into(step, index, kGateUp), out(step, index, kDown);
  shrink(into, x, worker);
  gate_up(layer, x, step.tokens, stage + 6, worker, into);
  next = ahead(layer.down, worker);
  pool_.barrier(next);
  const Piece down = whole(layer.down, {x_.data(), size_t(d_.hidden), nullptr, true, 0, 0});
  shrink(out, gated_, worker);
  multiply(stage + 7, &down, 1, gated_, step.tokens, worker, out);
  pool_.barrier();
}

// The residual behind a layer, if it was asked for. Nobody writes to it before all have met again.
void Program::tap(const Step& step, int index, int worker) {
  for (int i = 0; i < step.tap_count; i++) {
    if (step.taps[i] != index) continue;
    float* to = step.tapped + size_t(i) * step.rows * d_.hidden;
    for (int r = pool_.start(worker, step.rows); r < pool_.start(worker + 1, step.rows); r++)
      std::copy_n(x_.data() + size_t(std::max(0, step.query_start[r + 1] - 1)) * d_.hidden, d_.hidden,
                  to + size_t(r) * d_.hidden);
  }
}

// Where a worker will begin to read these weights.
Ahead Program::ahead(const Matrix& w, int worker) const {
  const uint8_t* at = w.group(pool_.start(worker, w.groups()));
  return {at, at + kAhead};
}

template <typename Visit>
void Program::each_token(int stage, int worker, int tokens, Visit visit) {
  int chunk = chunk_for(tokens, pool_.size()), total = pieces(tokens, chunk);
  for (int item; (item = pool_.take(stage, worker, total)) < total;)
    for (int t = item * chunk; t < std::min((item + 1) * chunk, tokens); t++) visit(t);
}

// The residual normed and quantised: shared out, or where that is sooner done than meeting, by every worker for itself.
Rows Program::normalise(int stage, const float* weight, int tokens, int worker, Ahead& next) {
  const bool alone = tokens <= kAlone;
  Rows out = alone ? own_[worker] : normed_;
  auto one = [&](int t) { k_.norm_quantise(x_.data() + size_t(t) * d_.hidden, weight, d_.eps, out, t); };
  if (alone) {
    for (int t = 0; t < tokens; t++) one(t);
  } else {
    each_token(stage, worker, tokens, one);
    pool_.barrier(next);
  }
  return out;
}

// Work is numbered (matrix, run of groups, row chunk), row chunks innermost: they find the weights in the cache.
void Program::multiply(int stage, const Piece* whole, int count, Rows x, int rows, int worker, const Adapted& on) {
  int groups = 0;
  for (int j = 0; j < count; j++) groups += whole[j].g1;
  int chunk = std::min(chunk_for(groups, pool_.size()), 64), row_chunks = pieces(rows, kRowChunk);
  int total = pieces(groups, chunk) * row_chunks;
  const bool updates = this->updates(on);
  for (int item; (item = pool_.take(stage, worker, total)) < total;) {
    int m0 = item % row_chunks * kRowChunk, m1 = std::min(m0 + kRowChunk, rows);
    int first = item / row_chunks * chunk, last = std::min(first + chunk, groups), base = 0, used = 0;
    Piece parts[kMost];
    int which[kMost];
    for (int j = 0; j < count; j++) {
      int size = whole[j].g1, g0 = std::max(first - base, 0), g1 = std::min(last - base, size);
      if (g0 < g1) which[used] = j, parts[used++] = {whole[j].w, g0, g1, whole[j].out};
      base += size;
    }
    k_.gemm(parts, used, x, m0, m1, scratch(worker));
    for (int j = 0; updates && j < used; j++) expand(on, which[j], parts[j], m0, m1, worker);
  }
}

// Runs of kKeys tokens whose last this step has computed, from the pages of the latest tokens.
void Program::round(const Step& step, const Layer& layer, int stage, int worker) {
  const StepGroup &group = step.group[layer.kv_group], &from = step.group[group.latest];
  const Paged kv = paged(step, group, layer.place), latest = paged(step, from, layer.place);
  const int total = int(run_ends_.size());
  for (int i; (i = pool_.take(stage, worker, total)) < total;) {
    const auto [t, row] = run_ends_[i];
    const int64_t page = group.kv_slots[t] / group.tokens_per_page;
    k_.round_run(latest, from.page_table + row * from.table_stride, int(step.positions[t]) + 1 - kKeys, kv, page,
                 int(group.kv_slots[t] % group.tokens_per_page) + 1 - kKeys,
                 attend_scratch_.data() + worker * attend_stride_);
  }
}

void Program::rotate(const Step& step, const Layer& layer, const Paged& kv, int stage, int worker) {
  const StepGroup& whole = step.group[layer.kv_group];
  const StepGroup& group = whole.latest >= 0 ? step.group[whole.latest] : whole;
  int dim = d_.head_dim, half = d_.rotary / 2;
  each_token(stage, worker, step.tokens, [&](int t) {
    float* heads = qkv_buffer_.data() + size_t(t) * qkv_;
    const float *cos = angles_.data() + size_t(t) * d_.rotary, *sin = cos + half;
    for (int h = 0; h < d_.heads + d_.kv_heads; h++) {
      float* x = heads + h * dim;
      bool query = h < d_.heads;
      const float* weight = query ? layer.q_norm : layer.k_norm;
      if (weight) k_.norm(x, weight, d_.eps, dim, x);
      k_.rope(x, cos, sin, half, query ? layer.scale : 1.0f, dim);
    }
    int64_t page = group.kv_slots[t] / group.tokens_per_page;
    int offset = int(group.kv_slots[t] % group.tokens_per_page);
    uint8_t* to = kv.k + size_t(page) * kv.page_stride + offset * kv.token_stride();
    uint16_t* scales = kv.scales_of(page, offset, 0);
    const float* k = heads + d_.heads * dim;
    k_.store_kv(k, kv, to, scales);
    k_.store_kv(k + d_.kv_heads * dim, kv, to + kv.v_offset, scales + kv.v_scales());
  });
}

// Queries by queries with all their heads, which lie together in a page; head by head where there is little to share out.
void Program::attend(const Step& step, const Layer& layer, const Paged& kv, int stage, int worker) {
  const Plan& plan = plans_[layer.kv_group];
  int items = int(plan.items.size()), parts = items < 4 * pool_.size() ? d_.kv_heads : 1, heads = d_.kv_heads / parts;
  int total = items * parts;
  for (int i; (i = pool_.take(stage, worker, total)) < total;) {
    const Item& item = plan.items[i / parts];
    int head = i % parts * heads;
    AttendArgs args{kv,   d_.heads,     layer.window, plan.queries.data() + item.first, item.count, item.shared,
                    head, head + heads, attended_,    nullptr,                          nullptr,    0,        0};
    if (const int latest = step.group[layer.kv_group].latest; latest >= 0) {
      args.residual = step.residual;
      args.latest = paged(step, step.group[latest], layer.place);
    }
    if (i + parts < total && !layer.window && !args.residual) args.then = plan.queries.data() + plan.items[i / parts + 1].first;
    if (item.asking >= 0) {
      args.mass_runs = step.mass_runs;
      args.mass_tokens = step.mass_tokens;
      args.mass = mass_.data() + size_t(item.asking) * d_.kv_heads * step.mass_runs;
    }
    if (item.sparse && step.sparse_layers[&layer - layers_.data()] && !layer.window) {
      const StepGroup& group = step.group[layer.kv_group];
      const size_t each = size_t(2) * d_.kv_heads * d_.head_dim;
      args.sparse = item.sparse;
      args.sparse_local = step.sparse_local;
      args.sparse_width = int32_t(group.table_stride);
      args.bounds = group.bounds ? group.bounds + layer.place * each : nullptr;
      args.bounds_stride = each * group.layers;
    }
    k_.attend(args, attend_scratch_.data() + worker * attend_stride_);
  }
}

void Program::gate_up(const Layer& layer, Rows x, int tokens, int stage, int worker, const Adapted& on) {
  const bool updates = this->updates(on);
  float* gates = gates_.data() + size_t(worker) * 2 * kRowChunk * kBlock;
  float* ups = gates + kRowChunk * kBlock;
  int row_chunks = pieces(tokens, kRowChunk), total = d_.intermediate / kBlock * row_chunks;
  for (int item; (item = pool_.take(stage, worker, total)) < total;) {
    int m0 = item % row_chunks * kRowChunk, m1 = std::min(m0 + kRowChunk, tokens), b = item / row_chunks;
    const Piece parts[] = {{&layer.gate, 2 * b, 2 * b + 2, {gates, kBlock, nullptr, false, m0, 2 * b}},
                           {&layer.up, 2 * b, 2 * b + 2, {ups, kBlock, nullptr, false, m0, 2 * b}}};
    k_.gemm(parts, 2, x, m0, m1, scratch(worker));
    for (int j = 0; updates && j < 2; j++) expand(on, j, parts[j], m0, m1, worker);
    for (int m = m0; m < m1; m++) k_.gate(gates + (m - m0) * kBlock, ups + (m - m0) * kBlock, gated_, m, b);
  }
}

}  // namespace quire
