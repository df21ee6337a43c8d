#include "attend_plan.h"

#include <algorithm>

namespace quire {

namespace {

constexpr int kQueryTile = 16;    // query tokens attended together
constexpr int kSharedLeast = 32;  // KV positions worth reading together

}  // namespace

int refusal(const Step& s, const Decoder& decoder) {
  for (int t = 0; s.adapters && t < s.tokens; t++) {
    const int64_t adapter = s.adapters[t];
    if (adapter < 0 || adapter >= s.adapter_count || (adapter && !s.adapter[adapter])) return kBadAdapter;
  }
  if (s.tokens < 0 || s.rows < 0 || s.layers < 0 || (s.asks && (s.groups != 1 || s.mass_tokens < 1))) return kBadShape;
  for (int t = 0; t < s.tokens; t++)
    if (s.ids[t] < 0 || s.ids[t] >= decoder.embed.n) return kBadToken;
  for (int t = 0; decoder.positions && t < s.tokens; t++)
    if (s.positions[t] < 0 || s.positions[t] + decoder.position_offset >= decoder.most_positions) return kBadShape;
  for (int i = 0; i < (s.round_count ? s.rounds[s.round_count] : 0); i++) {
    const Segment& one = s.segments[i];
    if (one.start < 0 || one.tokens < 1 || one.start + one.tokens > s.tokens) return kBadShape;
    if (std::min(one.source, one.target) < 0 || std::max(one.source, one.target) >= s.cells) return kBadCell;
  }
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

// Which queries are attended together: neighbours of a prompt, and single tokens of rows with a common prefix.
void AttendPlan::make(const Step& step, const StepGroup& group, const float* q, size_t stride) {
  queries.clear();
  items.clear();
  asking.clear();
  std::vector<int> single;
  auto position = [&](int t) { return step.positions[t]; };
  auto table = [&](int r) { return group.page_table + r * group.table_stride; };
  const StepGroup* latest = group.latest >= 0 ? step.group + group.latest : nullptr;
  auto latest_table = [&](int r) { return latest ? latest->page_table + r * latest->table_stride : nullptr; };
  auto asks = [&](int r) { return step.asks && step.asks[r]; };
  auto sparse = [&](int r) { return step.sparse ? step.sparse[r] : 0; };
  auto plain = [&](int r) { return !asks(r) && !sparse(r) && (!step.tree_base || step.tree_base[r] == kNoTree); };
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
    const bool paying = asks(r);
    if (end - begin == next - r && end - begin < kQueryTile / 2 && !paying && !sparse(r)) {
      for (; r < next; r++) single.push_back(r);
      continue;
    }
    const int32_t* pages = table(next - 1);
    const int tile = sparse(r) ? 1 : kQueryTile;
    for (int t = begin; t < end; t += tile) {
      int count = std::min(tile, end - t), first = int(queries.size());
      for (int i = t; i < t + count; i++)
        queries.push_back({q + size_t(i) * stride, int32_t(step.positions[i]), i, pages, kNoTree, 0,
                                latest_table(next - 1)});
      items.push_back(
          {first, count, 0, int64_t(count) * step.positions[t + count - 1], paying ? int(asking.size()) : -1,
           step.positions[t] / group.tokens_per_page >= sparse(r) ? sparse(r) : 0});
      if (paying) asking.push_back(r);
    }
  }
  share(step, group, single, q, stride);
  std::stable_sort(items.begin(), items.end(), [](const AttendItem& a, const AttendItem& b) { return a.cost > b.cost; });
}

// Groups of up to kQueryTile rows whose tables start with the same pages; alone where nothing worth is common.
void AttendPlan::share(const Step& step, const StepGroup& group, const std::vector<int>& rows, const float* q,
                       size_t stride) {
  std::vector<char> taken(rows.size(), 0);
  auto pages = [&](int r) { return group.page_table + r * group.table_stride; };
  auto base = [&](int r) { return step.tree_base ? step.tree_base[r] : kNoTree; };
  auto whole = [&](int r) {
    return int(std::min<int64_t>(step.positions[step.query_start[r]], base(r)) / group.tokens_per_page);
  };
  const StepGroup* latest = group.latest >= 0 ? step.group + group.latest : nullptr;
  auto add = [&](int r) {
    int t = step.query_start[r];
    queries.push_back({q + size_t(t) * stride, int32_t(step.positions[t]), t, pages(r), base(r),
                            step.tree_base ? uint64_t(step.tree_path[r]) : 0,
                            latest ? latest->page_table + r * latest->table_stride : nullptr});
  };
  const int least = (kSharedLeast + group.tokens_per_page - 1) / group.tokens_per_page;
  for (size_t i = 0; i < rows.size(); i++) {
    if (taken[i]) continue;
    int first = int(queries.size()), common = whole(rows[i]), count = 1;
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
    items.push_back({first, count, count > 1 ? common * group.tokens_per_page : 0, cost, -1, 0});
  }
}

}  // namespace quire
