// Sparse attention of one query: for each KV head the pages it may want most, by an upper bound of its scores there
// (Quest: Tang et al. 2024), beside the first page and the last ones. Pages that were chosen are attended to as if there
// were no others: keys are rotated already, so that where they stand in a table says nothing. Included by `attend.h`.

// The most that the scores of a page's keys can be, from the least and the largest of each of their dimensions.
inline float score_bound(const uint16_t* low, const uint16_t* high, const float* q, int dim) {
  vf most = {};
  for (int d = 0; d < dim; d += W) {
    vf x = load(q + d);
    most += maximum(x * load_half(low + d), x * load_half(high + d));
  }
  return sum(most);
}

// Pages [1, local) of a head's table, the `free` best of them at the front of `order`, in order.
inline void choose_pages(const AttendArgs& a, const State* mine, int share, int head, const int32_t* pages, int local,
                         int free, float* scores, int32_t* order) {
  const int dim = a.kv.head_dim, middle = local - 1;
  if (!a.bounds) {  // as far apart as they can be
    for (int i = 0; i < free; i++) order[i] = 1 + int(int64_t(i) * middle / free);
    return;
  }
  for (int i = 0; i < middle; i++) {
    const uint16_t* low = a.bounds + size_t(pages[1 + i]) * a.bounds_stride + size_t(head) * dim;
    const uint16_t* high = low + size_t(a.kv.kv_heads) * dim;
    float best = score_bound(low, high, mine[0].q, dim);
    for (int s = 1; s < share; s++) best = std::max(best, score_bound(low, high, mine[s].q, dim));
    scores[1 + i] = best;
    order[i] = 1 + i;
  }
  std::nth_element(order, order + free, order + middle,
                   [&](int32_t x, int32_t y) { return scores[x] > scores[y] || (scores[x] == scores[y] && x < y); });
  std::sort(order, order + free);
}

inline size_t sparse_floats(const AttendArgs& a) { return a.sparse ? 3 * size_t(a.sparse_width) + 48 : 0; }

// `states` [KV head][head of the KV head's] of one query. Their positions become those among the pages chosen.
inline void attend_sparse(const AttendArgs& a, State* states, int share, float* scratch, float* blocks) {
  const int size = a.kv.tokens_per_page, position = states[0].position, pages = position / size + 1;
  const int local = std::min(std::max(0, position - a.sparse_local) / size, a.bounds ? pages : pages - a.sparse / 2);
  const int32_t* from = a.queries[0].pages;
  float* scores = scratch;
  int32_t* order = reinterpret_cast<int32_t*>(scores + a.sparse_width + 16);
  int32_t* table = order + a.sparse_width + 16;
  const int free = std::min(a.sparse - 1 - (pages - local), local - 1);
  for (int head = a.head_begin; head < a.head_end; head++) {
    State* mine = states + (head - a.head_begin) * share;
    choose_pages(a, mine, share, head, from, local, free, scores, order);
    int count = 0;
    table[count++] = from[0];
    for (int i = 0; i < free; i++) table[count++] = from[order[i]];
    for (int page = local; page < pages; page++) table[count++] = from[page];
    const int last = (count - 1) * size + position % size;
    for (int s = 0; s < share; s++) mine[s].position = last;
    AttendArgs one = a;
    one.head_begin = head;
    one.head_end = head + 1;
    attend_range(one, Table{table, kNoTree, 0}, mine, share, share, 0, last / kKeys + 1, blocks);
  }
}
