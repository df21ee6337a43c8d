// Recurrent mixers' steps for one head (or channel) of one sequence, token by token, on `simd.h`. Included once per
// instruction set, inside its namespace, after `stages.h`. A state goes through tokens one after the other, so that a
// row's bits are the same however its tokens are cut into steps. Refuses to know: threads, layers, where states are kept.

void convolve(const ConvolveArgs& a, float* out) {
  for (int c = 0; c < a.channels; c += W) {
    vf acc = load(a.in[0] + c) * load(a.weight + c);
    for (int tap = 1; tap < a.taps; tap++) acc = fma(load(a.in[tap] + c), load(a.weight + size_t(tap) * a.channels + c), acc);
    if (a.bias) acc += load(a.bias + c);
    store(out + c, a.silu ? activated<kSilu>(acc) : acc);
  }
}

// C vectors of columns: a tile of the state that stays in the nearest cache for all tokens.
template <int C>
void delta_columns(const DeltaArgs& a, int column) {
  float tile[kMostKeyDim * C * W];
  for (int i = 0; i < a.key_dim; i++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) store(tile + (i * C + c) * W, load(a.from + i * a.state_stride + column + c * W));
  for (int t = 0; t < a.tokens; t++) {
    const float *q = a.q + t * a.stride, *k = a.k + t * a.stride, *v = a.v + t * a.stride + column;
    const float decay = a.decay[t * a.gate_stride], beta = a.beta[t * a.gate_stride];
    vf found[4][C] = {}, change[C], mixed[4][C] = {};
    for (int i = 0; i < a.key_dim; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) found[j][c] = fma(splat(k[i + j]), load(tile + ((i + j) * C + c) * W), found[j][c]);
#pragma GCC unroll 2
    for (int c = 0; c < C; c++)
      change[c] = (load(v + c * W) - ((found[0][c] + found[1][c]) + (found[2][c] + found[3][c])) * decay) * beta;
    for (int i = 0; i < a.key_dim; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
          float* at = tile + ((i + j) * C + c) * W;
          vf state = fma(splat(k[i + j]), change[c], load(at) * decay);
          store(at, state);
          mixed[j][c] = fma(splat(q[i + j]), state, mixed[j][c]);
        }
#pragma GCC unroll 2
    for (int c = 0; c < C; c++)
      store(a.out + t * a.out_stride + column + c * W, (mixed[0][c] + mixed[1][c]) + (mixed[2][c] + mixed[3][c]));
  }
  for (int i = 0; i < a.key_dim; i++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) store(a.state + i * a.state_stride + column + c * W, load(tile + (i * C + c) * W));
}

void delta_rule(const DeltaArgs& a) {
  int column = 0;
  for (; column + 2 * W <= a.columns; column += 2 * W) delta_columns<2>(a, column);
  for (; column < a.columns; column += W) delta_columns<1>(a, column);
}

// R rows of the state at one token: what is loaded of B and C serves them all.
template <int R>
QUIRE_INLINE void state_rows(float* state, int size, const float* x, float dt, float decay, const float* b, const float* c,
                             float d, float* to) {
  vf out[R] = {};
  for (int n = 0; n < size; n += W) {
    const vf into = load(b + n), from = load(c + n);
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) {
      vf next = fma(splat(x[i] * dt), into, load(state + i * size + n) * decay);
      store(state + i * size + n, next);
      out[i] = fma(next, from, out[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; i++) to[i] = sum(out[i]) + x[i] * d;
}

void state_space(const StateSpaceArgs& a) {
  const int size = a.state_size;
  if (a.from != a.state) __builtin_memcpy(a.state, a.from, size_t(a.rows) * size * sizeof(float));
  for (int t = 0; t < a.tokens; t++) {
    const float *x = a.x + t * a.stride, *b = a.b + t * a.stride, *c = a.c + t * a.stride;
    const float dt = a.dt[t * a.gate_stride], decay = a.decay[t * a.gate_stride];
    float* out = a.out + t * a.out_stride;
    int i = 0;
    for (; i + 4 <= a.rows; i += 4) state_rows<4>(a.state + i * size, size, x + i, dt, decay, b, c, a.d, out + i);
    for (; i < a.rows; i++) state_rows<1>(a.state + i * size, size, x + i, dt, decay, b, c, a.d, out + i);
  }
}

void gated_norm(const float* x, const float* gate, const GatedNorm& how, Rows out, int row) {
  float block[kBlock];
  for (int part = 0; part < how.width; part += how.part) {
    vf squares = {};
    auto gated = [&](int i) { return how.gate_first ? load(x + i) * activated<kSilu>(load(gate + i)) : load(x + i); };
    for (int i = part; i < part + how.part; i += W) squares = fma(gated(i), gated(i), squares);
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(how.part) + how.eps);
    for (int at = part; at < part + how.part; at += kBlock) {
      for (int i = 0; i < kBlock; i += W) {
        vf y = gated(at + i) * factor * load(how.weight + (at + i) % how.weights);
        store(block + i, how.gate_first ? y : y * activated<kSilu>(load(gate + at + i)));
      }
      quantise_block(block, out, row, at / kBlock);
    }
  }
}
