// Paged attention of queries that share KV, for some KV heads: 32 keys at a time with a running softmax. Included
// once per instruction set, inside its namespace, after `simd.h` and a native `dots16` (a query's scores with 16 keys
// of a gathered block).
//
// Every query meets the same blocks of 32 keys in the same order whatever else is in the batch, and no arithmetic
// crosses queries: its result is the same bits alone, batched, chunked or sharing a prefix.

#include "attend_block.h"
#include "attend_wide.h"
#include "kivi.h"

#if QUIRE_WIDTH != 8
#include "attend_pages.h"
#endif

// Blocks [begin, end) of 32 keys, read through `table`, for `count` states of each KV head, `stride` apart.
inline void attend_range(const AttendArgs& a, const Table& table, State* states, int stride, int count, int begin,
                         int end, float* scratch) {
#if QUIRE_WIDTH != 8
  if (few_of_one(a.kv, states, count)) return attend_paged(a, table, states, stride, count, begin, end);
#endif
  int dim = a.kv.head_dim, furthest = 0, wide = count % W > kFewStates ? count : count / W * W;
  float *k = scratch, *v = scratch + kKeys * dim;
  for (int head = a.head_begin; wide && head < a.head_end; head++)
    attend_wide(a, table, head, states + (head - a.head_begin) * stride, wide, begin, end, k, v, v + kKeys * dim);
  if (wide == count) return;
  states += wide;
  count -= wide;
#if QUIRE_WIDTH != 8
  if (few_of_one(a.kv, states, count)) return attend_paged(a, table, states, stride, count, begin, end);
#endif
  for (int i = 0; i < count; i++) furthest = states[i].position > furthest ? states[i].position : furthest;
  for (int block = begin; block < end; block++) {
    int at = block * kKeys, written = furthest + 1 - at, ahead = written - kKeys;
    for (int head = a.head_begin; head < a.head_end; head++) {
      if (block + 1 < end) fetch(a.kv, table, head, at + kKeys, ahead < kKeys ? ahead : kKeys);
      gather(a.kv, table, head, at, written < kKeys ? written : kKeys, k, v);
      State* mine = states + (head - a.head_begin) * stride;
      for (int i = 0, n = 1; i < count; i += n, n = 1) {
        const int position = mine[i].position;
        while (n < kTogether && i + n < count && mine[i + n].position == position) n++;
        int first = a.first_seen(position) - at, last = position + 1 - at;
        first = first < 0 ? 0 : first;
        last = last > kKeys ? kKeys : last;
        if (first < last) attend_block(n, mine + i, k, v, dim, first, last);
      }
    }
  }
}

#include "attend_sparse.h"

size_t attend_floats(const AttendArgs& a) {
  size_t each = size_t(a.heads / a.kv.kv_heads) * a.count, states = (a.head_end - a.head_begin) * each;
  return size_t(2) * kKeys * a.kv.head_dim + states * (a.kv.head_dim + sizeof(State) / 4 + a.mass_runs) + 64 +
         wide_floats(int(each), a.kv.head_dim) + sparse_floats(a);
}

void attend(const AttendArgs& a, float* scratch) {
  int dim = a.kv.head_dim, share = a.heads / a.kv.kv_heads, stride = a.count * share;
  int count = (a.head_end - a.head_begin) * stride;
  State* states = reinterpret_cast<State*>(scratch);  // [KV head][query][head of the KV head's]
  float* sums = scratch + count * (sizeof(State) / 4);
  float* blocks = sums + size_t(count) * dim;
  auto head_of = [&](int i) { return (a.head_begin + i / stride) * share + i % share; };
  auto query_of = [&](int i) -> const Query& { return a.queries[i % stride / share]; };
  int nearest = a.queries[0].position;
  for (int i = 0; i < count; i++) {
    const Query& query = query_of(i);
    const float *q = query.q + size_t(head_of(i)) * dim, *sink = a.sinks ? a.sinks + head_of(i) : nullptr;
    states[i] = {sink ? *sink : -1e30f, sink ? 1.0f : 0.0f, q, sums + size_t(i) * dim, query.position, a.softcap};
    for (int d = 0; d < dim; d++) states[i].sum[d] = 0;
    nearest = query.position < nearest ? query.position : nearest;
  }
  int begin = a.first_seen(nearest) / kKeys;
  float* paid = blocks + 2 * kKeys * dim;
  if (a.mass) {
    for (size_t i = 0; i < size_t(count) * a.mass_runs; i++) paid[i] = 0;
    attend_paid(a, states, stride, begin, blocks, paid);
  }
  if (a.sparse) {
    float* beyond = blocks + 2 * kKeys * dim + wide_floats(stride, dim);
    attend_sparse(a, states, share, beyond, blocks);
  }
  int shared = a.sparse ? 0 : a.shared / kKeys;  // whole blocks only
  if (a.residual) shared = std::min(shared, a.rounded(nearest));
  auto first_latest = [&](int i) { return a.residual ? a.rounded(a.queries[i].position) : 0; };
  AttendArgs latest = a;
  latest.kv = a.latest;
  if (shared > begin) {
    attend_range(a, a.queries[0].table(), states, stride, stride, begin, shared, blocks);
    begin = shared;
  }
  for (int i = a.mass || a.sparse ? a.count : 0; i < a.count;) {  // neighbours of one sequence go on together
    int j = i + 1;
    const int rounded = first_latest(i);
    while (j < a.count && a.queries[j].pages == a.queries[i].pages && first_latest(j) == rounded) j++;
    int last = 0, from = begin;
    for (int t = i; t < j; t++) last = a.queries[t].position > last ? a.queries[t].position : last;
    Table table = a.queries[i].table();
    if (a.residual) {
      attend_range(a, table, states + i * share, stride, (j - i) * share, from, rounded, blocks);
      from = rounded;
      table.pages = a.queries[i].latest;
    }
    attend_range(a.residual ? latest : a, table, states + i * share, stride, (j - i) * share, from, last / kKeys + 1,
                 blocks);
    i = j;
  }
  for (int i = 0; i < count; i++) {
    State& s = states[i];
    float inverse = 1.0f / s.total;
    for (int d = 0; d < dim; d++) s.sum[d] *= inverse;
    if (a.mass) {
      float* to = a.mass + size_t(a.head_begin + i / stride) * a.mass_runs;
      for (int run = 0; run < a.mass_runs; run++) to[run] += paid[size_t(i) * a.mass_runs + run] * inverse;
    }
    int token = query_of(i).token, head = head_of(i);
    if (a.gate) {
      const float* gate = a.gate + size_t(token) * a.gate_stride + size_t(head) * dim;
      for (int d = 0; d < dim; d += W) store(s.sum + d, load(s.sum + d) * sigmoid(load(gate + d)));
    }
    const int blocks = (dim - a.values_from) / kBlock, place = a.head_rows ? 0 : head * blocks;
    for (int b = 0; b < blocks; b++)
      quantise_block(s.sum + a.values_from + b * kBlock, a.out, token + head * a.head_rows, place + b);
  }
}
