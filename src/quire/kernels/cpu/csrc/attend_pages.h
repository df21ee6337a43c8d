// Attention of a few states of one KV head straight from fp16 or fp32 pages: nothing is copied first. Included by
// `attend.h` where registers are many. Each state adds what `attend_block` adds, in the same order:
// the same bits, sooner, as long as keys and values are not needed again.

// Where K of all heads of a block's tokens lies; those not written yet stand where the last does.
inline void find(const Paged& kv, const Table& table, int position, int block, const uint8_t** at) {
  int first = block * kKeys, count = position - first < kKeys ? position - first + 1 : kKeys;
  each_key(kv, table, 0, first, count, [=](int j, const uint8_t* k, const uint16_t*) { at[j] = k; });
  for (int j = count; j < kKeys; j++) at[j] = at[count - 1];
}

// K or V of one head in a block of keys, and in the block that comes after: memory is asked for as it will be read, a
// little at a time, because a core waits when it has asked for more than a few lines.
template <int Kind>
struct Places {
  const uint8_t *const *at, *const *next;
  size_t head;

  vf get(int key, int i) const {
    if (Kind == kFloat32) return load(reinterpret_cast<const float*>(at[key] + head) + i);
    return load_half(reinterpret_cast<const uint16_t*>(at[key] + head) + i);
  }
  void fetch(int key, int from, int to) const {
    constexpr int size = Kind == kFloat32 ? 4 : 2;
    for (int i = (from * size + 63) / 64 * 64; i < to * size; i += 64) __builtin_prefetch(next[key] + head + i);
  }
};

// `dots16` of S states, four keys at a time.
template <int Kind, int S>
inline void score_pages(const State* s, Places<Kind> keys, int dim, float (*p)[kKeys], int j) {
#if QUIRE_WIDTH == 16
  vf part[S][4];
#endif
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; quad++) {
    vf acc[S][4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      keys.fetch(j + 4 * quad + c, 0, dim);
      vf key = keys.get(j + 4 * quad + c, 0);
#pragma GCC unroll 4
      for (int i = 0; i < S; i++) acc[i][c] = load(s[i].q) * key;
    }
    for (int d = W; d < dim; d += W)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        vf key = keys.get(j + 4 * quad + c, d);
#pragma GCC unroll 4
        for (int i = 0; i < S; i++) acc[i][c] = fma(load(s[i].q + d), key, acc[i][c]);
      }
#pragma GCC unroll 4
    for (int i = 0; i < S; i++) {
      vf folded = fold_quads(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
#if QUIRE_WIDTH == 16
      part[i][quad] = folded;
#else
      store(p[i] + j + 4 * quad, folded);
#endif
    }
  }
#if QUIRE_WIDTH == 16
#pragma GCC unroll 4
  for (int i = 0; i < S; i++)
    store(p[i] + j, fold_lanes(fold_lanes(part[i][0], part[i][1]), fold_lanes(part[i][2], part[i][3])));
#endif
}

// `weigh` of S states, for C vectors from dimension `at` on.
template <int Kind, int S, int C>
inline void weigh_pages(State* s, const float* keep, const float (*p)[kKeys], Places<Kind> values, int first, int last,
                        int at) {
  vf acc[S][C];
#pragma GCC unroll 4
  for (int i = 0; i < S; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[i][c] = load(s[i].sum + at + c * W) * keep[i];
  for (int j = first; j < last; j++) {
    values.fetch(j, at, at + C * W);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      vf value = values.get(j, at + c * W);
#pragma GCC unroll 4
      for (int i = 0; i < S; i++) acc[i][c] = fma(value, splat(p[i][j]), acc[i][c]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < S; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(s[i].sum + at + c * W, acc[i][c]);
}

template <int Kind, int S>
__attribute__((noinline)) void attend_pages(State* s, Places<Kind> k, Places<Kind> v, int dim, int first, int last) {
  float p[S][kKeys] = {}, keep[S];
  for (int j = 0; j < last; j += 16) score_pages<Kind, S>(s, k, dim, p, j);
  for (int i = 0; i < S; i++) keep[i] = soften(s[i], p[i], first, last);
  int at = 0;
  for (; at + 4 * W <= dim; at += 4 * W) weigh_pages<Kind, S, 4>(s, keep, p, v, first, last, at);
  for (; at < dim; at += W) weigh_pages<Kind, S, 1>(s, keep, p, v, first, last, at);
}

// Blocks [begin, end) of 32 keys for S states of each KV head, `stride` apart, all of one position.
template <int Kind, int S>
void attend_paged(const AttendArgs& a, const Table& table, State* states, int stride, int begin, int end) {
  const size_t bytes = a.kv.head_bytes();
  const int position = states->position;
  const uint8_t *places[2][kKeys], **at = places[0], **next = places[1];
  find(a.kv, table, position, begin, at);
  for (int block = begin; block < end; block++) {
    if (block + 1 < end) find(a.kv, table, position, block + 1, next);
    else if (a.then) find(a.kv, a.then->table(), a.then->position, 0, next);
    else next = at;
    int first = a.first_seen(position) - block * kKeys, last = position + 1 - block * kKeys;
    first = first < 0 ? 0 : first;
    last = last > kKeys ? kKeys : last;
    for (int head = a.head_begin; first < last && head < a.head_end; head++)
      attend_pages<Kind, S>(states + (head - a.head_begin) * stride, {at, next, head * bytes},
                            {at, next, a.kv.v_offset + head * bytes}, a.kv.head_dim, first, last);
    std::swap(at, next);
  }
}

template <int Kind>
inline void attend_paged(const AttendArgs& a, const Table& table, State* states, int stride, int count, int begin,
                         int end) {
  switch (count) {
    case 1: return attend_paged<Kind, 1>(a, table, states, stride, begin, end);
    case 2: return attend_paged<Kind, 2>(a, table, states, stride, begin, end);
    case 3: return attend_paged<Kind, 3>(a, table, states, stride, begin, end);
    case 4: return attend_paged<Kind, 4>(a, table, states, stride, begin, end);
  }
}

inline void attend_paged(const AttendArgs& a, const Table& table, State* states, int stride, int count, int begin,
                         int end) {
  const auto of_kind = a.kv.kind == kFloat16 ? attend_paged<kFloat16> : attend_paged<kFloat32>;
  of_kind(a, table, states, stride, count, begin, end);
}

// Whether `attend_paged` is for these states.
inline bool few_of_one(const Paged& kv, const State* states, int count) {
  if (kv.kind > kFloat16 || count > kTogether) return false;
  for (int i = 1; i < count; i++)
    if (states[i].position != states->position) return false;
  return true;
}
