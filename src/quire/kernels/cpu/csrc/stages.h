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
  int32_t sums = int32_t(sum(total[0] + total[1]));
  *out.scale(row, b) = top / 127.0f;
  *out.sum(row, b) = top / 127.0f * float(sums);
  out.totals(row, b)[0] = sums;
  out.totals(row, b)[16] = int32_t(sum(total[0]));
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

void norm(const float* x, const float* weight, float eps, int k, float* out) {
  float factor = inverse_rms(x, k, eps);
  int i = 0;
  for (; i + W <= k; i += W) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < k; i++) out[i] = x[i] * factor * weight[i];
}

void norm_quantise(const float* x, const float* weight, float eps, Rows out, int row) {
  float factor = inverse_rms(x, out.k, eps);
  float block[kBlock];
  for (int b = 0; b < out.blocks(); b++) {
    for (int i = 0; i < kBlock; i += W)
      store(block + i, load(x + b * kBlock + i) * factor * load(weight + b * kBlock + i));
    quantise_block(block, out, row, b);
  }
}

void gate(const float* gate, const float* up, Rows out, int row, int block) {
  float mixed[kBlock];
  for (int i = 0; i < kBlock; i += W) {
    vf g = load(gate + i);
    store(mixed + i, g / (1.0f + exponential(-g)) * load(up + i));
  }
  quantise_block(mixed, out, row, block);
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
