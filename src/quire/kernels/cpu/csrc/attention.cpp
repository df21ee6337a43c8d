#include "attention.h"

#include <cmath>

namespace quire {

void PagedAttention::begin(const float* q, size_t stride, int most_kv_heads) {
  const Step& step = *c_.step;
  angle_width_ = 0;
  angles_of_.clear();
  for (int i = 0; i < c_.d.rotations; i++) {
    angles_of_.push_back(angle_width_);
    angle_width_ += 2 * c_.d.rotation[i].half;
  }
  angles_.need(c_.capacity * angle_width_);
  run_ends_.clear();
  for (int r = 0; r < step.rows; r++)
    for (int t = step.query_start[r]; t < step.query_start[r + 1]; t++)
      if (step.positions[t] % kKeys == kKeys - 1) run_ends_.push_back({t, r});
  plans_.resize(step.groups);
  for (int g = 0; g < step.groups; g++) plans_[g].make(step, step.group[g], q, stride);
  mass_heads_ = most_kv_heads;
  if (step.asks) {
    const size_t size = plans_[0].asking.size() * mass_heads_ * step.mass_runs;
    std::fill_n(mass_.need(size), size, 0.0f);
  }
  stride_ = 0;
}

void PagedAttention::expect(int group, int heads, int kv_heads, int head_dim) {
  const Step& step = *c_.step;
  AttendArgs shape{};
  shape.kv.kv_heads = shape.head_end = kv_heads;
  shape.kv.head_dim = head_dim;
  shape.heads = heads;
  for (const AttendItem& item : plans_[group].items) shape.count = std::max(shape.count, item.count);
  if (step.asks) shape.mass_runs = step.mass_runs;
  if (step.sparse) {
    shape.sparse = 1;
    shape.sparse_width = int32_t(step.group[group].table_stride);
  }
  stride_ = std::max(stride_, (c_.k.attend_floats(shape) + 15) / 16 * 16);
  scratch_.need(stride_ * c_.pool.size());
}

// What rows paid is summed item by item, head by head: in the same order however the work was shared out.
void PagedAttention::end() {
  const Step& step = *c_.step;
  if (!step.asks) return;
  const float* from = mass_.data();
  for (int row : plans_[0].asking)
    for (int head = 0; head < mass_heads_; head++)
      for (int run = 0; run < step.mass_runs; run++) step.mass[size_t(row) * step.mass_runs + run] += *from++;
}

void PagedAttention::turn(int token) {
  float* cos = angles_.data() + token * angle_width_;
  for (const Rotation* r = c_.d.rotation; r < c_.d.rotation + c_.d.rotations; cos += 2 * r++->half)
    for (int i = 0; i < r->half; i++) {
      const float angle = float(c_.step->positions[token]) * r->inverse_frequencies[i];
      cos[i] = std::cos(angle) * r->scale;
      cos[r->half + i] = std::sin(angle) * r->scale;
    }
}

// Where a layer's keys and values are.
Paged PagedAttention::paged(const StepGroup& group, int place, int kv_heads, int head_dim) const {
  Paged kv{};
  kv.tokens_per_page = group.tokens_per_page;
  kv.kv_heads = kv_heads;
  kv.head_dim = head_dim;
  kv.kind = group.kind;
  kv.page_stride = size_t(c_.step->page_bytes);
  const size_t side = size_t(group.tokens_per_page) * kv.token_stride();
  const size_t scales = size_t(group.tokens_per_page) * kv_heads * kv.head_scales();
  if (group.parts == 2) kv.v_offset = side, kv.v_scales = scales;
  kv.k = c_.step->pool + size_t(place) * group.parts * side;
  kv.scales = reinterpret_cast<uint16_t*>(c_.step->pool + size_t(group.layers) * group.parts * side) +
              size_t(place) * group.parts * scales;
  return kv;
}

void PagedAttention::store(const StepGroup& group, const Paged& kv, int token, const float* k, const float* v) const {
  const int64_t page = group.kv_slots[token] / group.tokens_per_page;
  const int offset = int(group.kv_slots[token] % group.tokens_per_page);
  uint8_t* to = kv.k + size_t(page) * kv.page_stride + offset * kv.token_stride();
  uint16_t* scales = kv.scales_of(page, offset, 0);
  c_.k.store_kv(k, kv, to, scales);
  if (v) c_.k.store_kv(v, kv, to + kv.v_offset, scales + kv.v_scales);
}

// Runs of kKeys tokens whose last this step has computed, from the pages of the latest tokens.
void PagedAttention::round_runs(const StepGroup& group, int place, int kv_heads, int head_dim, Worker& w) {
  const StepGroup& from = c_.step->group[group.latest];
  const Paged kv = paged(group, place, kv_heads, head_dim), latest = paged(from, place, kv_heads, head_dim);
  c_.each(int(run_ends_.size()), w, [&](int i) {
    const auto [t, row] = run_ends_[i];
    const int64_t page = group.kv_slots[t] / group.tokens_per_page;
    c_.k.round_run(latest, from.page_table + row * from.table_stride, int(c_.step->positions[t]) + 1 - kKeys, kv, page,
                   int(group.kv_slots[t] % group.tokens_per_page) + 1 - kKeys, scratch_.data() + w.index * stride_);
  });
}

// Queries by queries with all their heads, which lie together in a page; head by head where there is little to share out.
void PagedAttention::attend(int group, const AttendArgs& shape, int place, bool sparse, Worker& w) {
  const Step& step = *c_.step;
  const AttendPlan& plan = plans_[group];
  const StepGroup& pages = step.group[group];
  const int kv_heads = shape.kv.kv_heads, items = int(plan.items.size());
  const int parts = items < 4 * c_.pool.size() ? kv_heads : 1, heads = kv_heads / parts, total = items * parts;
  c_.each(total, w, [&](int i) {
    const AttendItem& item = plan.items[i / parts];
    AttendArgs args = shape;
    args.queries = plan.queries.data() + item.first;
    args.count = item.count;
    args.shared = item.shared;
    args.head_begin = i % parts * heads;
    args.head_end = args.head_begin + heads;
    if (pages.latest >= 0) {
      args.residual = step.residual;
      args.latest = paged(step.group[pages.latest], place, kv_heads, shape.kv.head_dim);
    }
    if (i + parts < total && !args.window && !args.residual)
      args.then = plan.queries.data() + plan.items[i / parts + 1].first;
    if (item.asking >= 0) {
      args.mass_runs = step.mass_runs;
      args.mass_tokens = step.mass_tokens;
      args.mass = mass_.data() + size_t(item.asking) * mass_heads_ * step.mass_runs;
    }
    if (item.sparse && sparse && !args.window) {
      const size_t each = size_t(2) * kv_heads * shape.kv.head_dim;
      args.sparse = item.sparse;
      args.sparse_local = step.sparse_local;
      args.sparse_width = int32_t(pages.table_stride);
      args.bounds = pages.bounds ? pages.bounds + place * each : nullptr;
      args.bounds_stride = each * pages.layers;
    }
    c_.k.attend(args, scratch_.data() + w.index * stride_);
  });
}

void AttentionMixer::begin(float* qkv, size_t stride, int attended_width) {
  qkv_ = qkv;
  stride_ = stride;
  attended_ = attended_store_.need(c_.capacity, attended_width);
}

void AttentionMixer::keys(const Attention& a, int layer, Rows x, Worker& w) {
  const StepGroup& group = c_.step->group[a.kv_group];
  Adapted on(layer);
  Piece parts[kMostPieces];
  float* to = qkv_;
  auto add = [&](const Linear& by, LowRank AdapterLayer::*part) {
    if (!by) return;
    parts[on.count] = StepContext::whole(by, {to, stride_, nullptr, false, 0, 0});
    on.add(part);
    to += by.w.n;
  };
  add(a.q, &AdapterLayer::q);
  add(a.gate, &AdapterLayer::attention_gate);
  add(a.k, &AdapterLayer::k);
  add(a.v, &AdapterLayer::v);
  c_.multiply(parts, on.count, x, w, &on);
  c_.expect(a.o.w, w);
  c_.meet(w);
  const StepGroup& written = group.latest >= 0 ? c_.step->group[group.latest] : group;
  const Paged kv = pages_.paged(written, a.place, a.kv_heads, a.head_dim);
  c_.each_token(w, [&](int t) { rotate(a, written, kv, t); });
}

void AttentionMixer::rotate(const Attention& a, const StepGroup& group, const Paged& kv, int token) {
  const int dim = a.head_dim, half = a.rotation < 0 ? 0 : c_.d.rotation[a.rotation].half;
  const float *cos = half ? pages_.angles(a.rotation, token) : nullptr, *sin = cos + half;
  float *q = qkv_ + token * stride_, *k = q + a.heads * dim * (a.gate ? 2 : 1), *v = k + a.kv_heads * dim;
  const float steps = a.scaling_period ? float((c_.step->positions[token] + a.scaling_offset) / a.scaling_period) : 0.0f;
  const float scale = a.scaling_period ? a.scale * (1.0f + a.scaling_weight * std::log1p(steps)) : a.scale;
  if (a.k && !a.v) std::copy_n(k, a.kv_heads * dim, v);
  auto side = [&](float* x, int heads, const Norm& norm, float scale) {
    if (norm.weight && a.norms_all) c_.k.norm(x, norm, heads * dim, x);
    for (int h = 0; h < heads; h++, x += dim) {
      if (norm.weight && !a.norms_all) c_.k.norm(x, norm, dim, x);
      if (half || scale != 1.0f) c_.k.rope(x, cos, sin, half, scale, dim);
    }
  };
  side(q, a.heads, a.q_norm, scale);
  if (!a.k) return;
  side(k, a.kv_heads, a.k_norm, 1.0f);
  for (int h = 0; a.v_norm.weight && h < a.kv_heads; h++) c_.k.norm(v + h * dim, a.v_norm, dim, v + h * dim);
  pages_.store(group, kv, token, k, v);
}

void AttentionMixer::mix(const Attention& a, int layer, Rows x, const Norm& post, Worker& w) {
  const StepGroup& group = c_.step->group[a.kv_group];
  keys(a, layer, x, w);
  c_.meet(w);
  if (group.latest >= 0) {
    pages_.round_runs(group, a.place, a.kv_heads, a.head_dim, w);
    c_.meet(w);
  }
  AttendArgs shape{};
  shape.kv = pages_.paged(group, a.place, a.kv_heads, a.head_dim);
  shape.heads = a.heads;
  shape.window = a.window;
  shape.chunked = a.chunked;
  shape.softcap = a.softcap;
  shape.sinks = a.sinks;
  shape.gate = a.gate ? qkv_ + a.heads * a.head_dim : nullptr;
  shape.gate_stride = stride_;
  shape.out = attended_;
  shape.out.k = attended_width(a);
  pages_.attend(a.kv_group, shape, a.place, a.sparse, w);
  c_.meet(w);
  const Adapted on(layer, &AdapterLayer::o);
  c_.multiply_into_residual(a.o, shape.out, post, w, &on);
}

}  // namespace quire
