// Paged attention of queries that share KV, for some KV heads: 32 keys at a time with a running softmax. Included
// once per instruction set, inside its namespace, after `simd.h` and a native `dots16` (a query's scores with 16 keys
// of a gathered block).
//
// Every query meets the same blocks of 32 keys in the same order whatever else is in the batch, and no arithmetic
// crosses queries: its result is the same bits alone, batched, chunked or sharing a prefix.

struct State {  // of one (query token, head)
  float top, total;
  const float* q;
  float* sum;  // [head_dim], weighted values so far
  int32_t position;
};

// Calls visit(j, address of K) for positions first .. first + count of one head, page by page.
template <typename Visit>
inline void each_key(const Paged& kv, const int32_t* pages, int head, int first, int count, Visit visit) {
  int page = first / kv.tokens_per_page, offset = first % kv.tokens_per_page;
  const size_t step = kv.token_stride(), in_token = size_t(head) * kv.head_dim * kv.item();
  for (int j = 0; j < count; page++, offset = 0) {
    const uint8_t* at = kv.k + pages[page] * kv.page_stride + offset * step + in_token;
    for (; offset < kv.tokens_per_page && j < count; offset++, j++, at += step) visit(j, at);
  }
}

// Asks for keys and values before they are needed: pages are scattered, so the hardware does not guess them.
inline void fetch(const Paged& kv, const int32_t* pages, int head, int first, int count) {
  const size_t bytes = kv.head_dim * kv.item(), v_offset = kv.v_offset;
  each_key(kv, pages, head, first, count, [=](int, const uint8_t* at) {
    for (size_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(at + i);
      __builtin_prefetch(at + v_offset + i);
    }
  });
}

// One block of keys and values as floats, [head_dim / W][kKeys][W]: rows of a block at fixed distances.
inline void gather(const Paged& kv, const int32_t* pages, int head, int first, int count, float* k, float* v) {
  const int dim = kv.head_dim;
  const size_t v_offset = kv.v_offset;
  const bool half = kv.half;
  each_key(kv, pages, head, first, count, [=](int j, const uint8_t* at) {
    float *to_k = k + j * W, *to_v = v + j * W;
    if (half) {
      const uint16_t *from_k = reinterpret_cast<const uint16_t*>(at),
                     *from_v = reinterpret_cast<const uint16_t*>(at + v_offset);
      for (int i = 0; i < dim; i += W) {
        store(to_k + i * kKeys, load_half(from_k + i));
        store(to_v + i * kKeys, load_half(from_v + i));
      }
    } else {
      const float *from_k = reinterpret_cast<const float*>(at), *from_v = reinterpret_cast<const float*>(at + v_offset);
      for (int i = 0; i < dim; i += W) {
        store(to_k + i * kKeys, load(from_k + i));
        store(to_v + i * kKeys, load(from_v + i));
      }
    }
  });
}

// sum = sum * keep + p[first .. last] . v of S states, for C vectors from dimension `at` on.
template <int S, int C>
inline void weigh(State* s, const float* keep, const float (*p)[kKeys], const float* v, int first, int last, int at) {
  vf acc[S][C];
#pragma GCC unroll 4
  for (int i = 0; i < S; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[i][c] = load(s[i].sum + at + c * W) * keep[i];
  const float* from = v + at * kKeys;
  for (int j = first; j < last; j++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      vf x = load(from + (c * kKeys + j) * W);
#pragma GCC unroll 4
      for (int i = 0; i < S; i++) acc[i][c] = fma(x, splat(p[i][j]), acc[i][c]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < S; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(s[i].sum + at + c * W, acc[i][c]);
}

// Scores of keys [first, last) in p become their shares of the softmax, zero elsewhere. Returns what earlier sums keep.
inline float soften(State& s, float* p, int first, int last) {
  vf low = splat(-__builtin_inff()), most = low;
  for (int i = 0; i < kKeys; i += W) {
    vi lane = lane_numbers() + i;
    vf score = (lane >= first) & (lane < last) ? load(p + i) : low;
    store(p + i, score);
    most = maximum(most, score);
  }
  float top = highest(most), keep = 1.0f;
  if (top > s.top) {
    keep = exponential(splat(s.top - top))[0];
    s.top = top;
  }
  vf total = {};
  for (int i = 0; i < kKeys; i += W) {
    vi lane = lane_numbers() + i;
    vf e = (lane >= first) & (lane < last) ? exponential(load(p + i) - s.top) : vf{};
    store(p + i, e);
    total += e;
  }
  s.total = s.total * keep + sum(total);
  return keep;
}

constexpr int kTogether = 4;  // states that one call takes

// S states that see keys [first, last) of a block: nothing crosses them, but one does not wait for another's results.
template <int S>
__attribute__((noinline)) void attend_block(State* s, const float* k, const float* v, int dim, int first, int last) {
  float p[S][kKeys] = {}, keep[S];
  for (int j = 0; j < last; j += 16)
    for (int i = 0; i < S; i++) dots16(s[i].q, k + j * W, dim, p[i] + j);
  for (int i = 0; i < S; i++) keep[i] = soften(s[i], p[i], first, last);
  constexpr int C = W == 8 && S > 1 ? 2 : 4;  // what the registers hold
  int at = 0;
  for (; at + C * W <= dim; at += C * W) weigh<S, C>(s, keep, p, v, first, last, at);
  for (; at < dim; at += W) weigh<S, 1>(s, keep, p, v, first, last, at);
}

inline void attend_block(int count, State* s, const float* k, const float* v, int dim, int first, int last) {
  switch (count) {
    case 1: return attend_block<1>(s, k, v, dim, first, last);
    case 2: return attend_block<2>(s, k, v, dim, first, last);
    case 3: return attend_block<3>(s, k, v, dim, first, last);
    case 4: return attend_block<4>(s, k, v, dim, first, last);
  }
}

#include "attend_wide.h"

// Blocks [begin, end) of 32 keys, read through `pages`, for `count` states of each KV head, `stride` apart.
inline void attend_range(const AttendArgs& a, const int32_t* pages, State* states, int stride, int count, int begin,
                         int end, float* scratch) {
  int dim = a.kv.head_dim, furthest = 0, wide = count % W > kFewStates ? count : count / W * W;
  float *k = scratch, *v = scratch + kKeys * dim;
  for (int head = a.head_begin; wide && head < a.head_end; head++)
    attend_wide(a, pages, head, states + (head - a.head_begin) * stride, wide, begin, end, k, v, v + kKeys * dim);
  if (wide == count) return;
  states += wide;
  count -= wide;
  for (int i = 0; i < count; i++) furthest = states[i].position > furthest ? states[i].position : furthest;
  for (int block = begin; block < end; block++) {
    int at = block * kKeys, written = furthest + 1 - at, ahead = written - kKeys;
    for (int head = a.head_begin; head < a.head_end; head++) {
      if (block + 1 < end) fetch(a.kv, pages, head, at + kKeys, ahead < kKeys ? ahead : kKeys);
      gather(a.kv, pages, head, at, written < kKeys ? written : kKeys, k, v);
      State* mine = states + (head - a.head_begin) * stride;
      for (int i = 0, n = 1; i < count; i += n, n = 1) {
        const int position = mine[i].position;
        while (n < kTogether && i + n < count && mine[i + n].position == position) n++;
        int first = a.window ? position - a.window + 1 - at : 0, last = position + 1 - at;
        first = first < 0 ? 0 : first;
        last = last > kKeys ? kKeys : last;
        if (first < last) attend_block(n, mine + i, k, v, dim, first, last);
      }
    }
  }
}

size_t attend_floats(const AttendArgs& a) {
  size_t each = size_t(a.heads / a.kv.kv_heads) * a.count, states = (a.head_end - a.head_begin) * each;
  return size_t(2) * kKeys * a.kv.head_dim + states * (a.kv.head_dim + sizeof(State) / 4) + 64 +
         wide_floats(int(each), a.kv.head_dim);
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
    states[i] = {-1e30f, 0, query.q + size_t(head_of(i)) * dim, sums + size_t(i) * dim, query.position};
    for (int d = 0; d < dim; d++) states[i].sum[d] = 0;
    nearest = query.position < nearest ? query.position : nearest;
  }
  int begin = a.window && nearest >= a.window ? (nearest - a.window + 1) / kKeys : 0;
  int shared = a.shared / kKeys;  // whole blocks only
  if (shared > begin) {
    attend_range(a, a.queries[0].pages, states, stride, stride, begin, shared, blocks);
    begin = shared;
  }
  for (int i = 0; i < a.count;) {  // neighbours of one sequence go on together
    int j = i + 1;
    while (j < a.count && a.queries[j].pages == a.queries[i].pages) j++;
    int last = 0;
    for (int t = i; t < j; t++) last = a.queries[t].position > last ? a.queries[t].position : last;
    attend_range(a, a.queries[i].pages, states + i * share, stride, (j - i) * share, begin, last / kKeys + 1, blocks);
    i = j;
  }
  for (int i = 0; i < count; i++) {
    State& s = states[i];
    float inverse = 1.0f / s.total;
    for (int d = 0; d < dim; d++) s.sum[d] *= inverse;
    int token = query_of(i).token, head = head_of(i);
    if (a.out_float) {
      __builtin_memcpy(a.out_float + (size_t(token) * a.heads + head) * dim, s.sum, size_t(dim) * 4);
    } else {
      for (int b = 0; b < dim / kBlock; b++) quantise_block(s.sum + b * kBlock, a.out, token, head * (dim / kBlock) + b);
    }
  }
}
