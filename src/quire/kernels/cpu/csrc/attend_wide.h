// Attention of many queries that read the same keys, W of them side by side: one lane is one (query token, head), so
// no sum crosses lanes. Included by `attend.h`, after `attend_block.h`. Each lane computes what `attend_block` does, in
// the same order: the same bits, sooner.

constexpr int kAbreast = W == 8 ? 2 : 4;  // keys scored at a time: what the registers hold
constexpr int kFewStates = W == 16 ? 5 : W / 2;  // so many are sooner done one by one

// Lane i of the result: lane i / 2 (of the upper halves: W / 2 + i / 2) of a where i is even, else of b.
template <bool Upper, int... I>
inline vf interleave(vf a, vf b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I / 2 + (Upper ? W / 2 : 0) + I % 2 * W)...);
#else
  return __builtin_shuffle(a, b, vi{(I / 2 + (Upper ? W / 2 : 0) + I % 2 * W)...});
#endif
}

inline void transpose(vf* rows) {  // [W][W]
  constexpr auto lanes = std::make_integer_sequence<int, W>();
#pragma GCC unroll 4
  for (int turn = 1; turn < W; turn *= 2) {
    vf next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; i++) {
      next[2 * i] = interleave<false>(rows[i], rows[i + W / 2], lanes);
      next[2 * i + 1] = interleave<true>(rows[i], rows[i + W / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
}

// W states side by side. Lanes past the last state repeat it.
struct Wide {
  vf top, total;
  vi position, first_seen;
  State* states;
  int count;
  float *q, *sum;  // [head_dim][W]

  State& lane(int i) const { return states[i < count ? i : count - 1]; }

  void begin(const AttendArgs& a) {
    const int dim = a.kv.head_dim;
    for (int i = 0; i < W; i++) {
      top[i] = lane(i).top;
      total[i] = lane(i).total;
      position[i] = lane(i).position;
      first_seen[i] = a.first_seen(lane(i).position);
    }
    vf rows[W];
    for (int d = 0; d < dim; d += W)
      for (bool query : {true, false}) {
        for (int i = 0; i < W; i++) rows[i] = load((query ? lane(i).q : lane(i).sum) + d);
        transpose(rows);
        for (int i = 0; i < W; i++) store((query ? q : sum) + (d + i) * W, rows[i]);
      }
  }

  void end(int dim) const {
    for (int i = 0; i < count; i++) {
      states[i].top = top[i];
      states[i].total = total[i];
    }
    vf rows[W];
    for (int d = 0; d < dim; d += W) {
      for (int i = 0; i < W; i++) rows[i] = load(sum + (d + i) * W);
      transpose(rows);
      for (int i = 0; i < count; i++) store(states[i].sum + d, rows[i]);
    }
  }
};

struct Abreast {
  vf of[kAbreast];
};

// The part of dots16's sum that lanes First .. First + Count of its vectors give, for keys k, k + W, ...
template <int First, int Count>
__attribute__((always_inline)) inline Abreast partial_dots(const float* q, const float* k, int dim) {
  Abreast out;
  if constexpr (Count == 1) {
    vf x = load(q + First * W);
#pragma GCC unroll 4
    for (int j = 0; j < kAbreast; j++) out.of[j] = x * splat(k[First + j * W]);
    for (int d = W; d < dim; d += W) {
      x = load(q + (d + First) * W);
#pragma GCC unroll 4
      for (int j = 0; j < kAbreast; j++) out.of[j] = fma(splat(k[d * kKeys + First + j * W]), x, out.of[j]);
    }
  } else {
    out = partial_dots<First, Count / 2>(q, k, dim);
    Abreast more = partial_dots<First + Count / 2, Count / 2>(q, k, dim);
#pragma GCC unroll 4
    for (int j = 0; j < kAbreast; j++) out.of[j] += more.of[j];
  }
  return out;
}

#if QUIRE_WIDTH == 4
// Their whole sum, each lane's part in registers of its own: of vectors of four one load gives the factors of all parts.
QUIRE_INLINE Abreast quad_dots(const float* q, const float* k, int dim) {
  vf part[kAbreast][W] = {};
  for (const float* end = q + dim * W; q < end; q += W * W, k += kKeys * W) {
    vf x[W];
#pragma GCC unroll 4
    for (int i = 0; i < W; i++) x[i] = load(q + i * W);
#pragma GCC unroll 4
    for (int j = 0; j < kAbreast; j++) fma_lanes(load(k + j * W), x, part[j]);
  }
  Abreast out;
#pragma GCC unroll 4
  for (int j = 0; j < kAbreast; j++) out.of[j] = (part[j][0] + part[j][1]) + (part[j][2] + part[j][3]);
  return out;
}
#endif

// What sum() gives for keys i, i + W, ... in lane i, each lane's added one after the other.
template <int First, int Step>
__attribute__((always_inline)) inline vf total_of(const float* p) {
  if constexpr (Step < W) return total_of<First, 2 * Step>(p) + total_of<First + Step, 2 * Step>(p);
  vf total = load(p + First * W);
#pragma GCC unroll 8
  for (int j = First + W; j < kKeys; j += W) total += load(p + j * W);
  return total;
}

// sum = sum * keep + p . v for C vectors of dimensions from `at` on, over the keys that a lane sees.
template <bool Masked, int C>
inline void weigh_wide(const Wide& w, vf keep, const float* p, const float* v, vi first, vi last, int begin, int end,
                       int at) {
  vf acc[C * W];
  float* sum = w.sum + at * W;
#pragma GCC unroll 16
  for (int d = 0; d < C * W; d++) acc[d] = load(sum + d * W) * keep;
  for (int j = begin; j < end; j++) {
    vf x = load(p + j * W);
    vi seen = (first <= j) & (last > j);
#if QUIRE_WIDTH == 4
    if (!Masked) {
      const vf same[W] = {x, x, x, x};
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) fma_lanes(load(v + (at + c * W) * kKeys + j * W), same, acc + c * W);
      continue;
    }
#endif
#pragma GCC unroll 16
    for (int d = 0; d < C * W; d++) {
      vf next = fma(splat(v[(at + d / W * W) * kKeys + j * W + d % W]), x, acc[d]);
      acc[d] = Masked ? (seen ? next : acc[d]) : next;
    }
  }
#pragma GCC unroll 16
  for (int d = 0; d < C * W; d++) store(sum + d * W, acc[d]);
}

// One block of keys, of which lane i sees [first[i], last[i]), and none lies outside [begin, end).
template <bool Masked>
__attribute__((noinline)) void attend_wide_block(Wide& w, const float* k, const float* v, int dim, vi first, vi last,
                                                 int begin, int end, float* p) {
  const vf low = splat(-__builtin_inff());
  const float softcap = w.states->softcap;
  vf most = low;
  for (int j = begin / kAbreast * kAbreast; j < end; j += kAbreast) {
#if QUIRE_WIDTH == 4
    Abreast scores = quad_dots(w.q, k + j * W, dim);
#else
    Abreast scores = partial_dots<0, W>(w.q, k + j * W, dim);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; i++) {
      if (softcap) scores.of[i] = capped(scores.of[i], softcap);
      vf score = Masked ? ((first <= j + i) & (last > j + i) ? scores.of[i] : low) : scores.of[i];
      store(p + (j + i) * W, score);
      most = maximum(most, score);
    }
  }
  vf top = maximum(most, w.top), keep = exponential(w.top - top);
  w.top = top;
  constexpr int kChains = W == 4 ? 4 : 1;  // side by side: each is a long one, and small cores do not look far ahead
  for (int j = 0; j < kKeys; j += kChains) {
    vf e[kChains];
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++) e[i] = exponential(load(p + (j + i) * W) - top);
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++)
      store(p + (j + i) * W, Masked ? ((first <= j + i) & (last > j + i) ? e[i] : vf{}) : e[i]);
  }
  w.total = w.total * keep + total_of<0, 1>(p);
  constexpr int C = W == 4 ? 4 : 1;
  int d = 0;
  for (; d + C * W <= dim; d += C * W) weigh_wide<Masked, C>(w, keep, p, v, first, last, begin, end, d);
  for (; d < dim; d += W) weigh_wide<Masked, 1>(w, keep, p, v, first, last, begin, end, d);
}

inline size_t wide_floats(int states, int dim) {
  int lots = (states + W - 1) / W;
  return lots * (size_t(2) * dim * W + sizeof(Wide) / 4) + kKeys * W + 3 * 16;
}

inline float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t(63)); }

// Blocks [begin, end) for `count` states of one KV head; k and v have room for a block.
inline void attend_wide(const AttendArgs& a, const Table& table, int head, State* states, int count, int begin,
                        int end, float* k, float* v, float* scratch) {
  const int dim = a.kv.head_dim, lots = (count + W - 1) / W;
  Wide* wide = reinterpret_cast<Wide*>(aligned(scratch));
  float* p = aligned(reinterpret_cast<float*>(wide + lots));
  float* lanes = p + kKeys * W;
  int furthest = 0;
  for (int i = 0; i < lots; i++, lanes += 2 * dim * W) {
    wide[i].states = states + i * W;
    wide[i].count = count - i * W < W ? count - i * W : W;
    wide[i].q = lanes;
    wide[i].sum = lanes + dim * W;
    wide[i].begin(a);
    for (int j = 0; j < W; j++) furthest = wide[i].position[j] > furthest ? wide[i].position[j] : furthest;
  }
  for (int block = begin; block < end; block++) {
    int at = block * kKeys, written = furthest + 1 - at, ahead = written - kKeys;
    if (block + 1 < end) fetch(a.kv, table, head, at + kKeys, ahead < kKeys ? ahead : kKeys);
    gather(a.kv, table, head, at, written < kKeys ? written : kKeys, k, v);
    for (Wide* w = wide; w < wide + lots; w++) {
      vi last = w->position + 1 - at, first = w->first_seen - at;
      int from = kKeys, to = 0, full = 1;
      for (int i = 0; i < W; i++) {
        int f = first[i] < 0 ? 0 : first[i], l = last[i] > kKeys ? kKeys : last[i];
        full &= f == 0 && l == kKeys;
        if (f >= l) continue;
        from = f < from ? f : from;
        to = l > to ? l : to;
      }
      if (full) attend_wide_block<false>(*w, k, v, dim, first, last, 0, kKeys, p);
      else if (from < to) attend_wide_block<true>(*w, k, v, dim, first, last, from, to, p);
    }
  }
  for (int i = 0; i < lots; i++) wide[i].end(dim);
}
