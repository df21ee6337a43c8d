// Paged attention of queries that share KV, for one KV head: 16 keys at a time with a running softmax. Included
// once per instruction set, inside its namespace, after `simd.h` and a native `dots16`.
//
// Every query meets the same blocks of 16 keys in the same order whatever else is in the batch, and no arithmetic
// crosses queries: its result is the same bits alone, batched, chunked or sharing a prefix.

struct State {  // of one (query token, head)
  float top, total;
  const float* q;
  float* sum;  // [head_dim], weighted values so far
  int32_t position;
};

// One block of keys and values as floats; rows nobody may read are left alone.
inline void gather(const Paged& kv, const int32_t* pages, int head, int first, int count, float* k, float* v,
                   const float** k_at, const float** v_at) {
  for (int j = 0; j < count; j++) {
    int position = first + j, page = pages[position / kv.tokens_per_page];
    const uint8_t* at = kv.k + page * kv.page_stride + (position % kv.tokens_per_page) * kv.token_stride() +
                        size_t(head) * kv.head_dim * kv.item();
    if (kv.half) {
      const uint16_t *from_k = reinterpret_cast<const uint16_t*>(at),
                     *from_v = reinterpret_cast<const uint16_t*>(at + kv.v_offset);
      for (int i = 0; i < kv.head_dim; i += W) {
        store(k + j * kv.head_dim + i, load_half(from_k + i));
        store(v + j * kv.head_dim + i, load_half(from_v + i));
      }
      k_at[j] = k + j * kv.head_dim;
      v_at[j] = v + j * kv.head_dim;
    } else {
      k_at[j] = reinterpret_cast<const float*>(at);
      v_at[j] = reinterpret_cast<const float*>(at + kv.v_offset);
    }
  }
  for (int j = count; j < kKeys; j++) k_at[j] = k_at[0];
}

// sum[i] = sum[i] * keep + p[first .. last] . v, for C vectors at a time.
template <int C>
inline void weigh(float* sum, float keep, const float* p, const float* const* v, int first, int last, int at) {
  vf acc[C];
  for (int c = 0; c < C; c++) acc[c] = load(sum + at + c * W) * keep;
  for (int j = first; j < last; j++)
    for (int c = 0; c < C; c++) acc[c] = fma(load(v[j] + at + c * W), splat(p[j]), acc[c]);
  for (int c = 0; c < C; c++) store(sum + at + c * W, acc[c]);
}

__attribute__((noinline)) void attend_block(State& s, const float* const* k, const float* const* v, int dim,
                                            int first, int last) {
  float p[kKeys];
  dots16(s.q, k, dim, p);
  vf low = splat(-__builtin_inff()), most = low;
  for (int i = 0; i < kKeys; i += W) {
    vi lane = lane_numbers() + i;
    vf score = (lane >= first) & (lane < last) ? load(p + i) : low;
    store(p + i, score);
    most = maximum(most, score);
  }
  float top = highest(most);
  if (s.top > top) top = s.top;
  float keep = exponential(splat(s.top - top))[0];
  vf total = {};
  for (int i = 0; i < kKeys; i += W) {
    vi lane = lane_numbers() + i;
    vf e = exponential(load(p + i) - top);
    e = (lane >= first) & (lane < last) ? e : vf{};
    store(p + i, e);
    total += e;
  }
  s.total = s.total * keep + sum(total);
  s.top = top;
  int i = 0;
  for (; i + 4 * W <= dim; i += 4 * W) weigh<4>(s.sum, keep, p, v, first, last, i);
  for (; i < dim; i += W) weigh<1>(s.sum, keep, p, v, first, last, i);
}

// Blocks [begin, end) of 16 keys, read through `pages`, for states [0, count).
inline void attend_range(const AttendArgs& a, const int32_t* pages, State* states, int count, int begin, int end,
                         float* scratch) {
  int dim = a.kv.head_dim, furthest = 0;
  for (int i = 0; i < count; i++) furthest = states[i].position > furthest ? states[i].position : furthest;
  float *k = scratch, *v = scratch + kKeys * dim;
  const float *k_at[kKeys], *v_at[kKeys];
  for (int block = begin; block < end; block++) {
    int at = block * kKeys, written = furthest + 1 - at;
    gather(a.kv, pages, a.kv_head, at, written < kKeys ? written : kKeys, k, v, k_at, v_at);
    for (int i = 0; i < count; i++) {
      int first = a.window ? states[i].position - a.window + 1 - at : 0, last = states[i].position + 1 - at;
      first = first < 0 ? 0 : first;
      last = last > kKeys ? kKeys : last;
      if (first < last) attend_block(states[i], k_at, v_at, dim, first, last);
    }
  }
}

size_t attend_floats(const AttendArgs& a) {
  size_t share = a.heads / a.kv.kv_heads, states = share * a.count;
  return size_t(2) * kKeys * a.kv.head_dim + states * (a.kv.head_dim + sizeof(State) / 4) + 64;
}

void attend(const AttendArgs& a, float* scratch) {
  int dim = a.kv.head_dim, share = a.heads / a.kv.kv_heads, count = a.count * share;
  State* states = reinterpret_cast<State*>(scratch);
  float* sums = scratch + count * (sizeof(State) / 4);
  float* blocks = sums + size_t(count) * dim;
  int nearest = a.queries[0].position;
  for (int i = 0; i < count; i++) {
    const Query& query = a.queries[i / share];
    states[i] = {-1e30f, 0, query.q + size_t(a.kv_head * share + i % share) * dim, sums + size_t(i) * dim,
                 query.position};
    for (int d = 0; d < dim; d++) states[i].sum[d] = 0;
    nearest = query.position < nearest ? query.position : nearest;
  }
  int begin = a.window && nearest >= a.window ? (nearest - a.window + 1) / kKeys : 0;
  int shared = a.shared / kKeys;  // whole blocks only
  if (shared > begin) {
    attend_range(a, a.queries[0].pages, states, count, begin, shared, blocks);
    begin = shared;
  }
  for (int i = 0; i < a.count;) {  // neighbours of one sequence go on together
    int j = i + 1;
    while (j < a.count && a.queries[j].pages == a.queries[i].pages) j++;
    int last = 0;
    for (int t = i; t < j; t++) last = a.queries[t].position > last ? a.queries[t].position : last;
    attend_range(a, a.queries[i].pages, states + i * share, (j - i) * share, begin, last / kKeys + 1, blocks);
    i = j;
  }
  for (int i = 0; i < count; i++) {
    State& s = states[i];
    float inverse = 1.0f / s.total;
    for (int d = 0; d < dim; d++) s.sum[d] *= inverse;
    int token = a.queries[i / share].token, head = a.kv_head * share + i % share;
    if (a.out_float) {
      __builtin_memcpy(a.out_float + (size_t(token) * a.heads + head) * dim, s.sum, size_t(dim) * 4);
    } else {
      for (int b = 0; b < dim / kBlock; b++) quantise_block(s.sum + b * kBlock, a.out, token, head * (dim / kBlock) + b);
    }
  }
}
