// One block of 32 keys, gathered from pages, and what it adds to the running softmax of a query: what `attend.h` and its
// faster forms (`attend_wide.h`, `attend_pages.h`) build on. Included by `attend.h` before them.

struct State {  // of one (query token, head)
  float top, total;
  const float* q;
  float* sum;  // [head_dim], weighted values so far
  int32_t position;
  float softcap;  // see `AttendArgs`
};

// Calls visit(j, address of K, its scales) for positions first .. first + count of one head, page by page.
template <typename Visit>
inline void each_key(const Paged& kv, const Table& table, int head, int first, int count, Visit visit) {
  const size_t step = kv.token_stride(), in_token = head * kv.head_bytes();
  const size_t scale_step = size_t(kv.kv_heads) * kv.head_scales();
  auto run = [&](int j, int end, int place) {  // neighbours
    int page = place / kv.tokens_per_page, offset = place % kv.tokens_per_page;
    for (; j < end; page++, offset = 0) {
      const uint8_t* at = kv.k + table.pages[page] * kv.page_stride + offset * step + in_token;
      const uint16_t* scales = kv.scales_of(table.pages[page], offset, head);
      for (; offset < kv.tokens_per_page && j < end; offset++, j++, at += step, scales += scale_step)
        visit(j, at, scales);
    }
  };
  int straight = table.base - first < count ? (table.base > first ? table.base - first : 0) : count;
  run(0, straight, first);
  for (int j = straight; j < count; j++) run(j, j + 1, table.place(first + j));
}

// Asks for keys and values before they are needed: pages are scattered, so the hardware does not guess them.
inline void fetch(const Paged& kv, const Table& table, int head, int first, int count) {
  const size_t bytes = kv.head_bytes(), v_offset = kv.v_offset;
  each_key(kv, table, head, first, count, [=](int, const uint8_t* at, const uint16_t*) {
    for (size_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(at + i);
      __builtin_prefetch(at + v_offset + i);
    }
  });
}

// Steps of Bits bits as floats, W of them every kKeys * W; scale(i) and low(i) are of those from number i on.
template <int Bits, typename Scale, typename Low>
inline void widen_steps(const uint8_t* from, int dim, float* to, Scale scale, Low low) {
  constexpr int kMask = (1 << Bits) - 1;
  const int run = dim * Bits / 8;
  for (int i = 0; i < run; i += W) {
    vi bytes = load_bytes(from + i);
#pragma GCC unroll 4
    for (int part = 0; part < 8 / Bits; part++) {
      int at = part * run + i;
      store(to + at * kKeys, fma(to_float(bytes >> Bits * part & kMask), scale(at), low(at)));
    }
  }
}

// A head's numbers as floats, W of them every kKeys * W. `scales` are floats, as many as the kind has.
template <int Kind>
inline void widen(const uint8_t* from, const float* scales, int dim, float* to) {
  if (Kind >= kInt4) {
    const float* lows = scales + dim / kBlock;
    return widen_steps<Kind == kKivi2 ? 2 : 4>(from, dim, to, [=](int i) { return splat(scales[i / kBlock]); },
                                               [=](int i) { return splat(lows[i / kBlock]); });
  }
  for (int i = 0; i < dim; i += W) {
    vf x;
    if (Kind == kFloat32) x = load(reinterpret_cast<const float*>(from) + i);
    if (Kind == kFloat16) x = load_half(reinterpret_cast<const uint16_t*>(from) + i);
    if (Kind == kInt8) x = to_float(load_bytes(reinterpret_cast<const int8_t*>(from) + i)) * scales[0];
    if (Kind == kFp8) x = from_fp8(load_bytes(from + i)) * scales[0];
    store(to + i * kKeys, x);
  }
}

// fp16 scales as floats, [kKeys][of a head]; conversion is by the vector, so they are collected first.
inline void gather_scales(const Paged& kv, const Table& table, int head, int first, int count, size_t beyond,
                          float* to) {
  const int each = kv.head_scales();
  uint16_t halves[kKeys * kMostScales];
  each_key(kv, table, head, first, count, [&](int j, const uint8_t*, const uint16_t* scales) {
    for (int i = 0; i < each; i++) halves[j * each + i] = scales[beyond + i];
  });
  for (int i = count * each; i % W; i++) halves[i] = 0;
  for (int i = 0; i < count * each; i += W) store(to + i, load_half(halves + i));
}

// One block of keys and values as floats, [head_dim / W][kKeys][W]: rows of a block at fixed distances.
template <int Kind>
inline void gather(const Paged& kv, const Table& table, int head, int first, int count, float* k, float* v) {
  const int dim = kv.head_dim, each = kv.head_scales();
  const size_t v_offset = kv.v_offset;
  float k_scales[kKeys * kMostScales], v_scales[kKeys * kMostScales];
  if (Kind > kFloat16) {
    if (Kind < kKivi4) gather_scales(kv, table, head, first, count, 0, k_scales);
    gather_scales(kv, table, head, first, count, kv.v_scales, v_scales);
  }
  const uint16_t* by_channel = nullptr;
  if (Kind >= kKivi4)  // the block is one run of tokens
    by_channel = kv.scales_of(table.pages[first / kv.tokens_per_page], first % kv.tokens_per_page, 0) + head * 2 * dim;
  each_key(kv, table, head, first, count, [&](int j, const uint8_t* at, const uint16_t*) {
    if (Kind >= kKivi4)
      widen_steps<Kind == kKivi2 ? 2 : 4>(at, dim, k + j * W, [=](int i) { return load_half(by_channel + i); },
                                          [=](int i) { return load_half(by_channel + dim + i); });
    else
      widen<Kind>(at, k_scales + j * each, dim, k + j * W);
    widen<Kind>(at + v_offset, v_scales + j * each, dim, v + j * W);
  });
}

inline void gather(const Paged& kv, const Table& table, int head, int first, int count, float* k, float* v) {
  switch (kv.kind) {
    case kFloat32: return gather<kFloat32>(kv, table, head, first, count, k, v);
    case kFloat16: return gather<kFloat16>(kv, table, head, first, count, k, v);
    case kInt8: return gather<kInt8>(kv, table, head, first, count, k, v);
    case kFp8: return gather<kFp8>(kv, table, head, first, count, k, v);
    case kInt4: return gather<kInt4>(kv, table, head, first, count, k, v);
    case kKivi4: return gather<kKivi4>(kv, table, head, first, count, k, v);
    case kKivi2: return gather<kKivi2>(kv, table, head, first, count, k, v);
  }
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
    vf score = load(p + i);
    if (s.softcap) score = capped(score, s.softcap);
    score = (lane >= first) & (lane < last) ? score : low;
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

// One state, and what it pays to each run of tokens so far, as `total` is of all of them.
inline void attend_block_paid(State& s, const float* k, const float* v, int dim, int first, int last, float* paid, int at,
                              int size) {
  float p[1][kKeys] = {};
  for (int j = 0; j < last; j += 16) dots16(s.q, k + j * W, dim, p[0] + j);
  float keep = soften(s, p[0], first, last);
  for (int run = 0; keep != 1.0f && run <= at / size; run++) paid[run] *= keep;
  for (int j = first; j < last; j++) paid[(at + j) / size] += p[0][j];
  int i = 0;
  for (; i + 4 * W <= dim; i += 4 * W) weigh<1, 4>(&s, &keep, p, v, first, last, i);
  for (; i < dim; i += W) weigh<1, 1>(&s, &keep, p, v, first, last, i);
}

// All keys of queries of one row, and what each state pays to each run of tokens, [states, runs].
inline void attend_paid(const AttendArgs& a, State* states, int stride, int begin, float* scratch, float* paid) {
  int dim = a.kv.head_dim, furthest = 0;
  for (int i = 0; i < stride; i++) furthest = states[i].position > furthest ? states[i].position : furthest;
  float *k = scratch, *v = scratch + kKeys * dim;
  for (int at = begin * kKeys; at <= furthest; at += kKeys) {
    int written = furthest + 1 - at;
    for (int head = a.head_begin; head < a.head_end; head++) {
      gather(a.kv, a.queries[0].table(), head, at, written < kKeys ? written : kKeys, k, v);
      int base = (head - a.head_begin) * stride;
      for (int i = base; i < base + stride; i++) {
        int first = a.first_seen(states[i].position) - at, last = states[i].position + 1 - at;
        first = first < 0 ? 0 : first;
        last = last > kKeys ? kKeys : last;
        if (first < last)
          attend_block_paid(states[i], k, v, dim, first, last, paid + size_t(i) * a.mass_runs, at, a.mass_tokens);
      }
    }
  }
}
