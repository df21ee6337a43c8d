// Drawing one token of a row: argmax of logits + temperature * noise over what truncation keeps. Included once per
// instruction set, inside its namespace, after `simd.h`. Its twin is generation/sampling/gumbel_draw.py; noise is generation/sampling/noise.py's,
// a function of (row key, token id).
//
// No row is sorted. Noise -log(-log(1 - u)) lifts a token to the best score so far only if u <= exp((logit - best) / T):
// one exponential by vectors tells who could win, and only they are scored, as the twin does (float32, logarithms
// rounded correctly), equal scores falling to whom the twin gives them. Truncation finds the last token that it keeps:
// top-k among those not below the k-th largest maximum of a block, top-p by a histogram of weights, of which only the
// bin at the border is put in order. Weights are summed in double precision, as the twin does; a border that rounding
// decides may fall on either side.

constexpr int kDrawBlock = 64;
constexpr int kBins = 1024;

// The order of likelihood as one ascending integer: larger logit first, then lower id.
inline uint64_t order_key(float logit, int id) {
  uint32_t bits;
  logit += 0.0f;  // -0 is 0
  __builtin_memcpy(&bits, &logit, 4);
  bits ^= bits >> 31 ? 0u : 0x7fffffffu;
  return uint64_t(bits) << 32 | uint32_t(id);
}
inline float key_logit(uint64_t key) {
  uint32_t bits = uint32_t(key >> 32);
  bits ^= bits >> 31 ? 0u : 0x7fffffffu;
  float logit;
  __builtin_memcpy(&logit, &bits, 4);
  return logit;
}

// U is vu or uint32_t.
template <typename U>
inline U noise_bits(U id, const uint32_t* key) {
  U x = id * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x = ((x ^ (x >> 16)) ^ key[0]) * 0x7feb352du;
  x = ((x ^ (x >> 15)) ^ key[1]) * 0x846ca68bu;
  return x;  // fold by an arithmetic shift of 16: 31 uniform bits
}
constexpr float kUniform = 0x1.fffffcp-32f;  // 2^-31 (1 - 2^-23)

inline vf uniform(vu ids, const uint32_t* key) {
  vi x = (vi)noise_bits(ids, key);
  return (__builtin_convertvector((x >> 16) ^ x, vf) + 0.5f) * kUniform;
}

inline float exact_score(float logit, int id, const Draw& how) {
  int32_t x = int32_t(noise_bits(uint32_t(id), how.key));
  float u = (float((x >> 16) ^ x) + 0.5f) * kUniform;
  float e = -float(std::log1p(-double(u)));
  float g = -float(std::log(double(e)));
  return g * how.temperature + logit;
}

// Tokens to choose from; their ids are given, or 0 .. n.
struct Tokens {
  const float* logits;
  const int32_t* ids;
  int n;

  int id(int i) const { return ids ? ids[i] : i; }
};

// W numbers, or the `count` that are left and then minus infinity.
inline vf load_some(const float* p, int count) {
  if (count >= W) return load(p);
  float x[W];
  for (int i = 0; i < W; i++) x[i] = i < count ? p[i] : -__builtin_inff();
  return load(x);
}

// The best of the tokens up to the key `last`. Equal scores: the lower id, or among given ids the likelier token.
inline int best_score(Tokens from, uint64_t last, const Draw& how) {
  float best = -__builtin_inff(), best_logit = 0;
  int chosen = -1;
  vf limit = splat(best);  // less what rounding may hide
  const float inverse = 1.0f / how.temperature, least = key_logit(last);
  const int least_id = int32_t(uint32_t(last));
  auto consider = [&](float logit, int id) {
    float score = exact_score(logit, id, how);
    bool first = from.ids ? order_key(logit, id) < order_key(best_logit, chosen) : id < chosen;
    if (chosen < 0 || score > best || (score == best && first)) {
      best = score, best_logit = logit, chosen = id;
      limit = splat(best - (how.temperature * 1e-4f + __builtin_fabsf(best) * 1e-6f));
    }
  };
  int i = 0;
  for (; i + W <= from.n; i += W) {
    vf logit = load(from.logits + i);
    vi id = from.ids ? loadi(from.ids + i) : lane_numbers() + i;
    vi worth = (logit > least) | ((logit == least) & (id <= least_id));
    if (!any(worth)) continue;
    worth &= uniform((vu)id, how.key) <= exponential((logit - limit) * inverse) * 1.0001f;
    if (any(worth))
      for (int lane = 0; lane < W; lane++)
        if (worth[lane]) consider(logit[lane], id[lane]);
  }
  for (; i < from.n; i++)
    if (order_key(from.logits[i], from.id(i)) <= last) consider(from.logits[i], from.id(i));
  return chosen < 0 ? 0 : chosen;
}

inline float weight(float logit, float top, float temperature) {
  return exponential(splat((logit - top) / temperature))[0];
}

// The sum of exp((logit - top) / temperature) over logits not below `least`.
inline double weigh_all(Tokens from, float top, float least, float temperature) {
  double total = 0;
  for (int begin = 0; begin < from.n; begin += 1024) {
    vf part = {};
    for (int i = begin; i < begin + 1024 && i < from.n; i += W) {
      vf x = load_some(from.logits + i, from.n - i);
      part += x >= least ? exponential((x - top) / temperature) : vf{};
    }
    total += sum(part);
  }
  return total;
}

// Keys of the tokens whose logit `wanted` says, as they come; how many.
template <typename Wanted>
inline int collect(Tokens from, Wanted wanted, uint64_t* keys) {
  int count = 0;
  for (int i = 0; i < from.n; i += W) {
    vf x = load_some(from.logits + i, from.n - i);
    vi worth = wanted(x);
    if (!any(worth)) continue;
    for (int lane = 0; lane < W; lane++)
      if (worth[lane]) keys[count++] = order_key(x[lane], from.id(i + lane));
  }
  return count;
}

// The key of the last token of the shortest prefix, in order, whose weight reaches `limit`; none below `least` is.
inline uint64_t nucleus(Tokens from, float top, float least, double limit, float temperature, uint64_t* keys) {
  const float scale = least < top ? (kBins - 1) / (top - least) : 0.0f;
  auto bin = [&](vf x) {  // never falls as x does; what is below `least` may land anywhere
    vf at = (top - x) * scale;
    return __builtin_convertvector(at < float(kBins - 1) ? at : splat(kBins - 1), vi);
  };
  double mass[kBins] = {}, before = 0;
  for (int i = 0; i < from.n; i += W) {
    vf x = load_some(from.logits + i, from.n - i);
    vi worth = x >= least, bins = bin(x);
    if (!any(worth)) continue;
    float weights[W];
    store(weights, worth ? exponential((x - top) / temperature) : vf{});
    for (int lane = 0; lane < W; lane++) mass[bins[lane]] += weights[lane];
  }
  int border = 0, last = 0;  // last: the one nearest the border that has tokens
  for (; border < kBins - 1 && before + mass[border] < limit; border++) {
    before += mass[border];
    if (mass[border] > 0) last = border;
  }
  if (!(mass[border] > 0)) before -= mass[border = last];  // rounding: all of them do not reach the limit
  int n = collect(from, [&](vf x) { return (x >= least) & (bin(x) == border); }, keys), at = 0;
  std::sort(keys, keys + n);
  while (at + 1 < n && (before += weight(key_logit(keys[at]), top, temperature)) < limit) at++;
  return keys[at];
}

// The largest logit of each block of them, and of all.
inline float block_maxima(Tokens all, float* maxima) {
  float top = -__builtin_inff();
  for (int from = 0; from < all.n; from += kDrawBlock) {
    vf most = splat(-__builtin_inff());
    for (int i = from; i < from + kDrawBlock && i < all.n; i += W) most = maximum(load_some(all.logits + i, all.n - i), most);
    float highest_here = highest(most);
    *maxima++ = highest_here;
    top = highest_here > top ? highest_here : top;
  }
  return top;
}

// Keys of the k likeliest tokens not below `least`, or of as many as there are, in no order; how many. `maxima` are spent,
// and may lie where the keys go.
inline int likeliest(Tokens all, int64_t k, float least, float* maxima, uint64_t* keys) {
  const int blocks = (all.n + kDrawBlock - 1) / kDrawBlock;
  if (k <= blocks) {  // as many tokens are not below the k-th largest maximum
    std::nth_element(maxima, maxima + k - 1, maxima + blocks, [](float a, float b) { return a > b; });
    least = maximum(splat(maxima[k - 1]), splat(least))[0];
  }
  int n = collect(all, [&](vf x) { return x >= least; }, keys);
  if (n > k) {
    std::nth_element(keys, keys + k, keys + n);
    n = int(k);
  }
  return n;
}

size_t draw_bytes(int vocab) { return size_t(vocab + 64) * 16; }

int draw(const float* logits, int vocab, const Draw& how, uint8_t* scratch) {
  float* maxima = reinterpret_cast<float*>(scratch);
  const Tokens all{logits, nullptr, vocab};
  const float top = block_maxima(all, maxima);
  if (how.greedy || !(top > -__builtin_inff()) || top == __builtin_inff()) {
    int at = 0;
    while (at * kDrawBlock < vocab && !(maxima[at] == top)) at++;
    for (at *= kDrawBlock; at < vocab; at++)
      if (logits[at] == top) return at;
    return 0;  // no number among them
  }
  float least = top + how.temperature * how.log_min_p;
  if (least < -3e38f) least = -3e38f;  // what is forbidden is never kept
  uint64_t* keys = reinterpret_cast<uint64_t*>(scratch);
  if (how.top_k < vocab) {
    int n = likeliest(all, how.top_k, least, maxima, keys);
    float* kept = reinterpret_cast<float*>(scratch + size_t(vocab + 64) * 8);
    int32_t* ids = reinterpret_cast<int32_t*>(scratch + size_t(vocab + 64) * 12);
    least = top;
    for (int i = 0; i < n; i++) {
      kept[i] = key_logit(keys[i]);
      ids[i] = int32_t(uint32_t(keys[i]));
      least = kept[i] < least ? kept[i] : least;
    }
    const Tokens few{kept, ids, n};
    uint64_t last = order_key(least, INT32_MAX);
    if (how.top_p < 1) {
      double total = weigh_all(few, top, least, how.temperature);
      last = nucleus(few, top, least, how.top_p * total, how.temperature, keys);
    }
    return best_score(few, last, how);
  }
  if (!(how.top_p < 1)) return best_score(all, order_key(least, INT32_MAX), how);
  double total = weigh_all(all, top, least, how.temperature);
  // Tokens that each weigh less than this weigh less together than top-p leaves out.
  double slight = (1 - how.top_p) * total / vocab * 0.99;
  float bound = top + how.temperature * float(std::log(slight) - 1e-3);
  least = bound > least && bound <= top ? bound : least;
  uint64_t last = nucleus(all, top, least, how.top_p * total, how.temperature, keys);
  return best_score(all, last, how);
}
