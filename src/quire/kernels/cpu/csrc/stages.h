// Norms, quantisation, rotary positions and gating, one row at a time, on `simd.h`. Included once per instruction
// set, inside its namespace. Refuses to know: threads, layers, what else is in the batch.

// Quantises the 32 values at x as block b of `row`.
inline void quantise_block(const float* x, Rows out, int row, int b) {
  vf most = magnitude(load(x));
  for (int i = W; i < kBlock; i += W) most = maximum(most, magnitude(load(x + i)));
  float top = highest(most);
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  int8_t* q = out.quants(row, b);
  vu total = {};  // unsigned: what is not a number may wrap
  for (int i = 0; i < kBlock; i += W) {
    vu rounded = (vu)fma(load(x + i), splat(inverse), splat(kRound)) - 0x4b400000u;
    total += rounded;
    store_bytes(q + i, (vi)rounded);
  }
  int32_t sums = int32_t(sum(total));
  *out.scale(row, b) = top / 127.0f;
  *out.sum(row, b) = top / 127.0f * float(sums);
  *out.totals(row, b) = sums;
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

void store_kv(const float* x, void* to, int count, bool half) {
  if (!half) {
    __builtin_memcpy(to, x, size_t(count) * 4);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(to);
  for (int i = 0; i < count; i += W) store_half(out + i, load(x + i));
}
