// Norms, quantisation, rotary positions and gating, one row at a time, on `simd.h`. Included once per instruction
// set, inside its namespace. Refuses to know: threads, layers, what else is in the batch.

// Quantises the 32 values at x as block b of `row`.
inline void quantise_block(const float* x, Rows out, int row, int b) {
  vf most = magnitude(load(x));
  for (int i = W; i < kBlock; i += W) most = maximum(most, magnitude(load(x + i)));
  float top = highest(most);
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  int8_t* q = out.quants(row, b);
  vu total[2] = {};  // of each half; unsigned: what is not a number may wrap
  for (int i = 0; i < kBlock; i += W) {
    vu rounded = (vu)fma(load(x + i), splat(inverse), splat(kRound)) - 0x4b400000u;
    total[2 * i / kBlock] += rounded;
    store_bytes(q + i, (vi)rounded);
  }
  const uint32_t first = sum(total[0]), second = sum(total[1]);
  float* factors = out.scale(row, b);
  factors[0] = top / 127.0f;
  factors[16] = top / 127.0f * float(int32_t(first + second));
  factors[32] = top / 127.0f * float(int32_t(first));
  int32_t* excess = out.excesses(row, b);
  excess[0] = int32_t(-128u * (first + second));
  excess[16] = int32_t(-32u * first);
  excess[32] = int32_t(-32u * second);
}

void quantise(const float* x, Rows out, int row) {
  for (int b = 0; b < out.blocks(); b++) quantise_block(x + b * kBlock, out, row, b);
}

inline float inverse_rms(const float* x, int k, float eps) {
  vf squares = {};
  int i = 0;
  for (; i + W <= k; i += W) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < k; i++) total += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(total / float(k) + eps);
}

// What a row is normed by: k is a multiple of W where the mean is taken off.
struct Normed {
  const float *x, *weight, *bias;
  float mean, factor;

  Normed(const float* x, const Norm& norm, int k) : x(x), weight(norm.weight), bias(norm.bias), mean(0) {
    if (!norm.centred) {
      factor = inverse_rms(x, k, norm.eps);
      return;
    }
    vf total = {}, squares = {};
    for (int i = 0; i < k; i += W) total += load(x + i);
    mean = sum(total) / float(k);
    for (int i = 0; i < k; i += W) {
      vf off = load(x + i) - mean;
      squares = fma(off, off, squares);
    }
    factor = 1.0f / __builtin_sqrtf(sum(squares) / float(k) + norm.eps);
  }
  QUIRE_INLINE vf at(int i) const {
    vf y = (load(x + i) - mean) * factor * load(weight + i);
    return bias ? y + load(bias + i) : y;
  }
};

void norm(const float* x, const Norm& norm, int k, float* out) {
  const Normed normed(x, norm, k);
  int i = 0;
  for (; i + W <= k; i += W) store(out + i, normed.at(i));
  for (; i < k; i++) out[i] = x[i] * normed.factor * norm.weight[i];
}

void norm_quantise(const float* x, const Norm& norm, Rows out, int row, float* floats) {
  const Normed normed(x, norm, out.k);
  float own[kBlock];
  for (int b = 0; b < out.blocks(); b++) {
    float* block = floats ? floats + b * kBlock : own;
    for (int i = 0; i < kBlock; i += W) store(block + i, normed.at(b * kBlock + i));
    quantise_block(block, out, row, b);
  }
}

// The error function, to about 1e-7 (Abramowitz and Stegun 7.1.26).
inline vf error_function(vf x) {
  vf size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size);
  vf p = fma(t, splat(1.061405429f), splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  vf y = 1.0f - p * t * exponential(-size * size);
  return (vf)((vi)y | ((vi)x & (int32_t)0x80000000));
}

template <Activation Kind>
QUIRE_INLINE vf activated(vf x) {
  if (Kind == kSilu) return x / (1.0f + exponential(-x));
  if (Kind == kGelu) return x * 0.5f * (1.0f + error_function(x * 0.70710678f));
  if (Kind == kGeluTanh) return x / (1.0f + exponential(-1.5957691216f * fma(x * x * x, splat(0.044715f), x)));
  if (Kind == kRelu) return maximum(x, vf{});
  if (Kind == kRelu2) return maximum(x, vf{}) * maximum(x, vf{});
  return x / (1.0f + exponential(-1.702f * x));
}

template <Activation Kind>
void activate(const float* gate, const float* up, Rows out, int row, int block) {
  constexpr float limit = 7.0f;
  float mixed[kBlock];
  for (int i = 0; i < kBlock; i += W) {
    vf g = load(gate + i);
    if (Kind == kSwigluOai) {
      store(mixed + i, activated<Kind>(minimum(g, splat(limit))) * (within(load(up + i), -limit, limit) + 1.0f));
    } else {
      store(mixed + i, up ? activated<Kind>(g) * load(up + i) : activated<Kind>(g));
    }
  }
  quantise_block(mixed, out, row, block);
}

void activate(Activation kind, const float* gate, const float* up, Rows out, int row, int block) {
  switch (kind) {
    case kSilu: return activate<kSilu>(gate, up, out, row, block);
    case kGelu: return activate<kGelu>(gate, up, out, row, block);
    case kGeluTanh: return activate<kGeluTanh>(gate, up, out, row, block);
    case kQuickGelu: return activate<kQuickGelu>(gate, up, out, row, block);
    case kRelu: return activate<kRelu>(gate, up, out, row, block);
    case kRelu2: return activate<kRelu2>(gate, up, out, row, block);
    case kSwigluOai: return activate<kSwigluOai>(gate, up, out, row, block);
  }
}

// Outputs n .. n + N of rows m .. m + M: each a sum of its own, in the same order whatever is beside it.
template <int N, int M>
inline void float_tile(const float* w, const float* x, int k, float* out, int n) {
  vf acc[N][M] = {};
  for (int i = 0; i < k; i += W)
#pragma GCC unroll 4
    for (int a = 0; a < N; a++) {
      vf weight = load(w + size_t(a) * k + i);
#pragma GCC unroll 4
      for (int b = 0; b < M; b++) acc[a][b] = fma(weight, load(x + size_t(b) * k + i), acc[a][b]);
    }
#pragma GCC unroll 4
  for (int a = 0; a < N; a++)
#pragma GCC unroll 4
    for (int b = 0; b < M; b++) out[size_t(b) * n + a] = sum(acc[a][b]);
}

void float_product(const float* w, int n0, int n1, const float* x, int m0, int m1, int k, float* out, int n) {
  for (int a = n0; a < n1;) {
    const bool wide = a + 4 <= n1;
    const float* from = w + size_t(a) * k;
    for (int m = m0; m < m1;) {
      const bool many = m + 4 <= m1;
      const auto tile = wide ? (many ? float_tile<4, 4> : float_tile<4, 1>) : (many ? float_tile<1, 4> : float_tile<1, 1>);
      tile(from, x + size_t(m) * k, k, out + size_t(m) * n + a, n);
      m += many ? 4 : 1;
    }
    a += wide ? 4 : 1;
  }
}

void add_scaled(float* to, const float* from, float factor, int count) {
  for (int i = 0; i < count; i += W) store(to + i, load(to + i) + load(from + i) * factor);
}

inline vf capped(vf score, float softcap) { return softcap * hyperbolic_tangent(score / softcap); }

void scale_and_cap(float* x, size_t count, float scale, float softcap) {
  for (size_t i = 0; i < count; i += W) {
    vf scaled = load(x + i) * scale;
    store(x + i, softcap ? capped(scaled, softcap) : scaled);
  }
}

// Rotates dimensions (i, i + half) of one head and scales all of it.
void rope(float* x, const float* cos, const float* sin, int half, float scale, int dim) {
  int i = 0;
  for (; i + W <= half; i += W) {
    vf a = load(x + i) * scale, b = load(x + half + i) * scale, c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = x[i] * scale, b = x[half + i] * scale;
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
  for (i = 2 * half; i < dim; i++) x[i] *= scale;
}

// A scale as it will be read, kept as fp16; and by what to multiply so as to divide by it.
inline float keep_scale(float scale, uint16_t* to) {
  uint16_t half[W];
  store_half(half, within(splat(scale), -65504.0f, 65504.0f));
  *to = half[0];
  return load_half(half)[0];
}
inline float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

// 8-bit floats (e4m3): the same bits as in a float, 120 steps of the exponent apart; within +-448.
inline vu to_fp8(vf x) {
  vu bits = (vu)(magnitude(x) * 0x1p-120f);
  return (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20 | ((vu)x >> 24 & 0x80u);
}
inline vf from_fp8(vi bits) {
  vf size = (vf)((bits & 0x7f) << 20) * 0x1p120f;
  return (vf)((vi)size | (bits & 0x80) << 24);
}

inline void store_low_bytes(uint8_t* p, vu v) { store_bytes(reinterpret_cast<int8_t*>(p), (vi)(v << 24) >> 24); }

template <int Kind>
inline void store_8_bits(const float* x, int dim, uint8_t* to, uint16_t* scale) {
  constexpr float largest = Kind == kInt8 ? 127.0f : 448.0f;
  vf most = {};
  for (int i = 0; i < dim; i += W) most = maximum(most, magnitude(load(x + i)));
  float inverse = inverse_of(keep_scale(highest(most) / largest, scale));
  for (int i = 0; i < dim; i += W) {
    vf steps = within(load(x + i) * inverse, -largest, largest);
    store_low_bytes(to + i, Kind == kInt8 ? nearest(steps) : to_fp8(steps));
  }
}

// Steps of Bits bits, [dim], of which steps(i) gives those from number i on.
template <int Bits, typename Steps>
inline void store_steps(int dim, uint8_t* to, Steps steps) {
  const int run = dim * Bits / 8;
  for (int i = 0; i < run; i += W) {
    vu bytes = steps(i);
    for (int part = 1; part < 8 / Bits; part++) bytes |= steps(part * run + i) << Bits * part;
    store_low_bytes(to + i, bytes);
  }
}

template <int Bits>
inline void store_blocks(const float* x, int dim, uint8_t* to, uint16_t* scales) {
  constexpr float most_steps = (1 << Bits) - 1;
  const int blocks = dim / kBlock;
  float low[kMostScales / 2], inverse[kMostScales / 2];  // by block
  for (int b = 0; b < blocks; b++) {
    vf most = load(x + b * kBlock), least = -most;
    for (int i = b * kBlock + W; i < (b + 1) * kBlock; i += W) {
      most = maximum(most, load(x + i));
      least = maximum(least, -load(x + i));
    }
    low[b] = -keep_scale(highest(least), scales + blocks + b);
    scales[blocks + b] ^= 0x8000;
    inverse[b] = inverse_of(keep_scale((highest(most) - low[b]) / most_steps, scales + b));
  }
  store_steps<Bits>(dim, to, [&](int i) {
    int b = i / kBlock;
    return nearest(within((load(x + i) - low[b]) * inverse[b], 0.0f, most_steps));
  });
}

void store_kv(const float* x, const Paged& kv, uint8_t* to, uint16_t* scales) {
  const int dim = kv.head_dim, count = kv.kv_heads * dim;
  if (kv.kind == kFloat32) {
    __builtin_memcpy(to, x, size_t(count) * 4);
  } else if (kv.kind == kFloat16) {
    for (int i = 0; i < count; i += W) store_half(reinterpret_cast<uint16_t*>(to) + i, load(x + i));
  } else {
    const auto store_head = kv.kind == kInt8 ? store_8_bits<kInt8> : kv.kind == kFp8 ? store_8_bits<kFp8> : store_blocks<4>;
    for (int h = 0; h < kv.kv_heads; h++)
      store_head(x + h * dim, dim, to + h * kv.head_bytes(), scales + h * kv.head_scales());
  }
}
