// Every kernel set of this host against the plain one, on random shapes; built alone, so that it also runs under an
// emulator and under sanitizers. Prints the sets it tested; exits with 1 at the first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"
#include "pool.h"

using namespace quire;

namespace {

std::mt19937 random_bits(7);
float uniform() { return std::uniform_real_distribution<float>(-1, 1)(random_bits); }
int below(int n) { return int(random_bits() % unsigned(n)); }

void expect(bool ok, const char* set, const char* what, int a = 0, int b = 0, int c = 0) {
  if (ok) return;
  std::printf("%s: %s differs (%d, %d, %d)\n", set, what, a, b, c);
  std::exit(1);
}

// Memory of exactly this many elements at a 64-byte boundary, so that a sanitizer sees the first byte beyond.
template <typename T>
struct Array {
  T* data;
  size_t size;
  explicit Array(size_t n) : data(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64 + 64))), size(n) {
    std::memset(static_cast<void*>(data), 0, n * sizeof(T));
  }
  Array(const Array&) = delete;
  ~Array() { std::free(data); }
};

struct Quantised {
  Array<int8_t> q;
  Array<float> factors;
  Array<int32_t> excess;
  Rows rows;
  Quantised(int m, int k)
      : q(size_t(m + 15) / 16 * 16 * k), factors(q.size / kBlock * 3), excess(q.size / kBlock * 3),
        rows{q.data, factors.data, excess.data, k} {}

  std::vector<float> floats(int m) const {
    std::vector<float> out;
    for (int r = 0; r < m; r++)
      for (int i = 0; i < rows.k; i++)
        out.push_back(float(rows.quants(r, i / kBlock)[i % kBlock]) * *rows.scale(r, i / kBlock));
    return out;
  }
  bool operator==(const Quantised& other) const {
    return !std::memcmp(q.data, other.q.data, q.size) && !std::memcmp(factors.data, other.factors.data, factors.size * 4);
  }
};

constexpr float kStep = 0.009f;  // a little more than one of 8 bits, where a tie may round the other way

bool close(const float* a, const float* b, size_t n, float tolerance) {
  float most = 1e-6f;
  for (size_t i = 0; i < n; i++) most = std::fmax(most, std::fabs(b[i]));
  for (size_t i = 0; i < n; i++)
    if (!(std::fabs(a[i] - b[i]) <= tolerance * most)) return false;
  return true;
}

struct Stored {  // a kind of pack.cpp, and how it is packed
  int kind;
  FormId form;
  int elements, bytes;
  std::vector<int> halves;  // where blocks keep fp16 factors
};
const Stored kStored[] = {
    {1, kNibble, 32, 20, {0, 2}},   {6, kFive, 32, 24, {0, 2}},     {4, kByte, 32, 128, {}},
    {7, kFiveK, 256, 176, {0, 2}},  {8, kSixK, 256, 210, {208}},    {9, kFourK, 256, 144, {0, 2}},
    {10, kThreeK, 256, 110, {108}}, {11, kTwoK, 256, 84, {80, 82}}, {12, kMxFour, 32, 17, {}},
};

std::vector<uint8_t> random_rows(const Stored& form, int n, int k) {
  std::vector<uint8_t> blocks(size_t(n) * k / form.elements * form.bytes);
  for (uint8_t& byte : blocks) byte = uint8_t(random_bits());
  for (size_t i = 0; i < blocks.size(); i += form.bytes) {
    for (int at : form.halves) {
      uint16_t half = float_to_half(uniform());
      std::memcpy(&blocks[i + at], &half, 2);
    }
    if (form.form == kMxFour) blocks[i] = uint8_t(118 + below(8));
    for (int j = 0; form.form == kByte && j < form.elements; j++) {
      float value = uniform();
      std::memcpy(&blocks[i + j * 4], &value, 4);
    }
  }
  return blocks;
}

void test_gemm(const Kernels& fast, const Kernels& plain) {
  for (const Stored& form : kStored)
    for (int m : {1, 2, 3, 5, 7, 8, 11, 15, 16, 17, 26, 40, 70})
      for (int k : {32, 96, 256, 512}) {
        if (k % (kBlock * kForms[form.form].run)) continue;
        int n = 1 + below(70);
        Matrix w{nullptr, n, k, form.form};
        Array<uint8_t> packed(w.group_bytes() * w.groups());
        w.data = packed.data;
        std::vector<float> x(size_t(m) * k), bias(w.groups() * kLanes);
        for (float& v : x) v = uniform();
        for (float& v : bias) v = uniform();
        pack(form.kind, random_rows(form, n, k).data(), 0, n, w);
        Quantised a(m, k), b(m, k);
        for (int r = 0; r < m; r++) {
          fast.quantise(&x[size_t(r) * k], a.rows, r);
          plain.quantise(&x[size_t(r) * k], b.rows, r);
        }
        for (size_t i = 0; i < a.q.size; i++)  // a fused multiply may round a tie the other way
          expect(std::abs(a.q.data[i] - b.q.data[i]) <= 1, fast.name, "quantise", m, k, int(i));
        size_t width = size_t(w.groups()) * kLanes;
        std::vector<float> got(m * width, 1), want(m * width, 1), alone(m * width, 1);
        Array<uint8_t> scratch(scratch_bytes(k));
        bool add = below(2);
        const float* shift = below(2) ? bias.data() : nullptr;
        fast.begin();
        int part = below(w.groups() + 1);  // in two pieces
        const float times = below(2) ? 1.0f : 0.37f;
        const Out to{got.data(), width, shift, add, 0, 0, times}, plainly{want.data(), width, shift, add, 0, 0, times};
        const Piece pieces[] = {{&w, 0, part, to}, {&w, part, w.groups(), to}}, whole{&w, 0, w.groups(), plainly};
        fast.gemm(pieces, 2, a.rows, 0, m, {scratch.data});
        for (int r = 0; r < m; r++) {  // each row as if it were the only one
          Quantised one(1, k);
          fast.quantise(&x[size_t(r) * k], one.rows, 0);
          const Piece single{&w, 0, w.groups(), {&alone[r * width], width, shift, add, 0, 0, times}};
          fast.gemm(&single, 1, one.rows, 0, 1, {scratch.data});
        }
        fast.end();
        plain.gemm(&whole, 1, a.rows, 0, m, {scratch.data});
        expect(close(got.data(), want.data(), got.size(), 1e-5f), fast.name, "gemm", form.form, m, k);
        expect(!std::memcmp(got.data(), alone.data(), got.size() * 4), fast.name, "a row among others", form.form, m, k);
      }
}

std::vector<float> uniforms(size_t n, float size = 1) {
  std::vector<float> out(n);
  for (float& v : out) v = size * uniform();
  return out;
}

void test_rows(const Kernels& fast, const Kernels& plain) {
  for (int k : {32, 64, 576}) {
    const std::vector<float> x = uniforms(k, 4), weight = uniforms(k), bias = uniforms(k), cosines = uniforms(k), sines = uniforms(k);
    std::vector<float> a(k), b(k), c(k);
    Quantised p(1, k), q(1, k);
    for (const Norm& norm : {Norm{weight.data(), nullptr, 1e-5f, 0}, Norm{weight.data(), bias.data(), 1e-5f, 1}}) {
      fast.norm(x.data(), norm, k, a.data());
      plain.norm(x.data(), norm, k, b.data());
      expect(close(a.data(), b.data(), k, 2e-6f), fast.name, "norm", k, norm.centred);
      fast.norm_quantise(x.data(), norm, p.rows, 0, c.data());
      expect(a == c, fast.name, "norm_quantise, as floats", k, norm.centred);
      expect(close(p.floats(1).data(), b.data(), k, kStep), fast.name, "norm_quantise", k, norm.centred);
    }
    for (int kind = kSilu; kind <= kSwigluOai; kind++)
      for (const float* up : {static_cast<const float*>(nullptr), weight.data()}) {
        if (!up && kind == kSwigluOai) continue;
        for (int block = 0; block < k / kBlock; block++)
          for (const auto& [kernels, rows] : {std::pair(&fast, &p), std::pair(&plain, &q)})
            kernels->activate(Activation(kind), &x[block * kBlock], up ? up + block * kBlock : nullptr, rows->rows, 0, block);
        expect(close(p.floats(1).data(), q.floats(1).data(), k, kStep), fast.name, "activate", k, kind);
      }
    for (int half : {k / 2, k / 4, 3, 0}) {
      a = x, b = x;
      fast.rope(a.data(), cosines.data(), sines.data(), half, 0.5f, k);
      plain.rope(b.data(), cosines.data(), sines.data(), half, 0.5f, k);
      expect(close(a.data(), b.data(), k, 1e-6f), fast.name, "rope", k, half);
    }
    a = x, b = x;
    fast.add_scaled(a.data(), weight.data(), 0.3f, k);
    plain.add_scaled(b.data(), weight.data(), 0.3f, k);
    fast.scale_and_cap(a.data(), k, 1.5f, 2.0f);
    plain.scale_and_cap(b.data(), k, 1.5f, 2.0f);
    expect(close(a.data(), b.data(), k, 2e-6f), fast.name, "scale_and_cap", k);
    for (int m : {1, 3, 4, 9}) {
      const int n = 1 + below(11);
      const std::vector<float> w = uniforms(size_t(n) * k), rows = uniforms(size_t(m) * k);
      std::vector<float> got(m * n), want(m * n), alone(m * n);
      fast.float_product(w.data(), 0, n, rows.data(), 0, m, k, got.data(), n);
      plain.float_product(w.data(), 0, n, rows.data(), 0, m, k, want.data(), n);
      for (int r = 0; r < m; r++) fast.float_product(w.data(), 0, n, rows.data(), r, r + 1, k, alone.data(), n);
      expect(close(got.data(), want.data(), got.size(), 1e-5f), fast.name, "float_product", k, m, n);
      expect(got == alone, fast.name, "a float row among others", k, m, n);
    }
  }
}

// States go from token to token alike, and the same in one go as token by token.
void test_recurrent(const Kernels& fast, const Kernels& plain) {
  for (int tokens : {1, 5}) {
    const int key_dim = 64, value_dim = 96, columns = 48, stride = 2 * key_dim + value_dim;
    const std::vector<float> given = uniforms(tokens * stride, 0.3f), state = uniforms(key_dim * value_dim);
    const std::vector<float> gates = uniforms(2 * tokens, 0.9f);
    auto delta = [&](const Kernels& kernels, std::vector<float>& after, std::vector<float>& out, int first, int count, bool again) {
      const float* x = given.data() + first * stride;
      kernels.delta_rule({x, x + key_dim, x + 2 * key_dim, &gates[2 * first], &gates[2 * first + 1], size_t(stride), 2,
                          size_t(columns), count, key_dim, columns, again ? after.data() : state.data(), after.data(),
                          size_t(value_dim), out.data() + first * columns});
    };
    std::vector<float> a(state.size()), b(state.size()), c(state.size()), got(tokens * columns), want(got), steps(got);
    delta(fast, a, got, 0, tokens, false);
    delta(plain, b, want, 0, tokens, false);
    for (int t = 0; t < tokens; t++) delta(fast, c, steps, t, 1, t > 0);
    expect(close(got.data(), want.data(), got.size(), 1e-5f), fast.name, "delta_rule", tokens);
    expect(close(a.data(), b.data(), a.size(), 1e-5f), fast.name, "delta_rule, state", tokens);
    expect(got == steps && a == c, fast.name, "delta_rule in steps", tokens);

    const int rows = 7, size = 64, width = rows + 2 * size;
    const std::vector<float> seen = uniforms(tokens * width, 0.5f), before = uniforms(rows * size);
    auto space = [&](const Kernels& kernels, std::vector<float>& after, std::vector<float>& out, int first, int count, bool again) {
      const float* x = seen.data() + first * width;
      kernels.state_space({x, x + rows, x + rows + size, &gates[2 * first], &gates[2 * first + 1], size_t(width), 2, size_t(rows),
                           count, rows, size, 0.7f, again ? after.data() : before.data(), after.data(),
                           out.data() + first * rows});
    };
    std::vector<float> d(before.size()), e(before.size()), f(before.size()), mixed(tokens * rows), expected(mixed), parts(mixed);
    space(fast, d, mixed, 0, tokens, false);
    space(plain, e, expected, 0, tokens, false);
    for (int t = 0; t < tokens; t++) space(fast, f, parts, t, 1, t > 0);
    expect(close(mixed.data(), expected.data(), mixed.size(), 1e-5f), fast.name, "state_space", tokens);
    expect(close(d.data(), e.data(), d.size(), 1e-5f), fast.name, "state_space, state", tokens);
    expect(mixed == parts && d == f, fast.name, "state_space in steps", tokens);
  }
  const int channels = 48, taps = 4;
  const std::vector<float> in = uniforms(taps * channels), weight = uniforms(taps * channels), bias = uniforms(channels);
  for (bool silu : {false, true}) {
    ConvolveArgs args{{}, weight.data(), silu ? bias.data() : nullptr, taps, channels, silu};
    for (int i = 0; i < taps; i++) args.in[i] = in.data() + i * channels;
    std::vector<float> got(channels), want(channels);
    fast.convolve(args, got.data());
    plain.convolve(args, want.data());
    expect(close(got.data(), want.data(), channels, 1e-6f), fast.name, "convolve", silu);
  }
  const int width = 192;
  const std::vector<float> x = uniforms(width), gate = uniforms(width, 3), scale = uniforms(width);
  for (const GatedNorm& how : {GatedNorm{scale.data(), width, 64, 64, 1e-5f, false}, GatedNorm{scale.data(), width, 96, width, 1e-5f, true}}) {
    Quantised p(1, width), q(1, width);
    fast.gated_norm(x.data(), gate.data(), how, p.rows, 0);
    plain.gated_norm(x.data(), gate.data(), how, q.rows, 0);
    expect(close(p.floats(1).data(), q.floats(1).data(), width, kStep), fast.name, "gated_norm", how.gate_first);
  }
}

void test_attend(const Kernels& fast, const Kernels& plain) {
  for (int round = 0; round < 30; round++) {
    int dim = 32 << below(3), kv_heads = 1 + below(3), heads = kv_heads * (1 + below(4)), tokens = 1 + below(24);
    int pages = 40, kind = round % 5, window = round % 3 ? 0 : 1 + below(40), count = 1 + below(5);
    Paged kv{nullptr, nullptr, 0, 0, 0, tokens, kv_heads, dim, kind};
    kv.v_offset = size_t(tokens) * kv.token_stride();
    kv.v_scales = size_t(tokens) * kv_heads * kv.head_scales();
    kv.page_stride = 2 * kv.v_offset + 4 * kv.v_scales;
    Array<uint8_t> pool(pages * kv.page_stride), other(pages * kv.page_stride);
    kv.k = pool.data;
    kv.scales = reinterpret_cast<uint16_t*>(pool.data + 2 * kv.v_offset);
    std::vector<float> token(size_t(kv_heads) * dim);
    for (int i = 0; i < pages * tokens; i++)
      for (int part = 0; part < 2; part++) {
        for (float& v : token) v = uniform();
        size_t at = i / tokens * kv.page_stride + part * kv.v_offset + i % tokens * kv.token_stride();
        uint16_t* scales = kv.scales_of(i / tokens, i % tokens, 0) + part * kv.v_scales;
        plain.store_kv(token.data(), kv, pool.data + at, scales);
        uint8_t* beside = reinterpret_cast<uint8_t*>(scales) - pool.data + other.data;
        fast.store_kv(token.data(), kv, other.data + at, reinterpret_cast<uint16_t*>(beside));
      }
    size_t apart = 0;  // a fused multiply may round a tie the other way
    for (size_t i = 0; i < pool.size; i++) apart += pool.data[i] != other.data[i];
    expect(apart * 1000 <= pool.size, fast.name, "store_kv", dim, kind, int(apart));
    int length = (pages - 1) * tokens, base = below(length - count + 1);
    std::vector<int32_t> table(pages);
    for (int i = 0; i < pages; i++) table[i] = (i * 7 + 3) % pages;
    const std::vector<float> q = uniforms(size_t(count) * heads * dim), gate = uniforms(q.size()), sinks = uniforms(heads);
    std::vector<Query> queries;
    for (int i = 0; i < count; i++) queries.push_back({&q[size_t(i) * heads * dim], base + i, i, table.data()});
    AttendArgs args{};
    args.kv = kv;
    args.heads = heads;
    args.window = window;
    args.chunked = round % 2;
    args.softcap = round % 4 == 1 ? 0.8f : 0;
    args.sinks = round % 4 == 2 ? sinks.data() : nullptr;
    args.gate = round % 4 == 3 ? gate.data() : nullptr;
    args.gate_stride = size_t(heads) * dim;
    args.queries = queries.data();
    args.count = count;
    args.head_end = kv_heads;
    std::vector<float> scratch(std::max(fast.attend_floats(args), plain.attend_floats(args)));
    Quantised a(count, heads * dim), b(count, heads * dim), c(count, heads * dim);
    args.out = a.rows;
    fast.attend(args, scratch.data());
    args.out = b.rows;
    plain.attend(args, scratch.data());
    args.out = c.rows;
    args.count = 1;
    for (int i = 0; i < count; i++, args.queries++)  // each query, and each KV head, as if it were the only one
      for (args.head_begin = 0; args.head_begin < kv_heads; args.head_begin++) {
        args.head_end = args.head_begin + 1;
        fast.attend(args, scratch.data());
      }
    expect(close(a.floats(count).data(), b.floats(count).data(), q.size(), kStep), fast.name, "attend", dim, window, kind);
    expect(a == c, fast.name, "a query among others", dim, window, kind);
  }
}

// Every way of drawing picks the token that the plain set picks; only a border of top-p may round elsewhere.
void test_draw(const Kernels& fast, const Kernels& plain) {
  int different = 0, rounds = 400;
  for (int round = 0; round < rounds; round++) {
    int vocab = 1 + below(round % 4 ? 300 : 5000);
    Array<float> logits(vocab);
    float spread = round % 3 ? 4.0f : 0.5f;
    for (int i = 0; i < vocab; i++) logits.data[i] = spread * (uniform() + uniform());
    Draw how{{uint32_t(random_bits()), uint32_t(random_bits())}, 0.2f + 0.5f * float(below(4)), -INFINITY, 2, vocab, false};
    if (below(3) == 0) how.log_min_p = std::log(0.05f);
    if (below(2)) how.top_p = 0.1 + 0.2 * below(5);
    if (below(2)) how.top_k = 1 + below(vocab);
    how.greedy = below(8) == 0;
    Array<uint64_t> scratch(std::max(fast.draw_bytes(vocab), plain.draw_bytes(vocab)) / 8 + 1);
    int got = fast.draw(logits.data, vocab, how, reinterpret_cast<uint8_t*>(scratch.data));
    expect(got >= 0 && got < vocab, fast.name, "draw", vocab, round);
    different += got != plain.draw(logits.data, vocab, how, reinterpret_cast<uint8_t*>(scratch.data));
  }
  expect(different <= rounds / 100, fast.name, "draw", different);
}

// Log-probabilities are the plain set's but for rounding, ranks and the likeliest tokens are the same.
void test_score(const Kernels& fast, const Kernels& plain) {
  for (int round = 0; round < 60; round++) {
    const int vocab = 1 + below(round % 4 ? 300 : 5000), top = below(std::min(vocab, 40) + 1), token = below(vocab);
    Array<float> logits(vocab);
    for (int i = 0; i < vocab; i++) logits.data[i] = std::round(20 * uniform()) / 2 + (below(9) ? 0.0f : -INFINITY);
    Array<uint64_t> scratch(std::max(fast.draw_bytes(vocab), plain.draw_bytes(vocab)) / 8 + 1);
    std::vector<float> likely[2], chosen(2);
    std::vector<int32_t> ids[2], ranks(2);
    const Kernels* sets[] = {&fast, &plain};
    for (int i = 0; i < 2; i++) {
      likely[i].resize(top + 1), ids[i].resize(top + 1);
      sets[i]->score(logits.data, vocab, token, top, {&chosen[i], &ranks[i], ids[i].data(), likely[i].data()},
                     reinterpret_cast<uint8_t*>(scratch.data));
    }
    expect(ranks[0] == ranks[1] && ids[0] == ids[1], fast.name, "score", vocab, top);
    for (int i = 0; i < top; i++)
      expect(likely[0][i] == likely[1][i] || std::fabs(likely[0][i] - likely[1][i]) < 1e-4f, fast.name, "likely", i);
    expect(chosen[0] == chosen[1] || std::fabs(chosen[0] - chosen[1]) < 1e-4f, fast.name, "scored", vocab);
  }
}

void test_pool() {
  for (int threads : {1, 2, 3}) {
    Pool pool(threads);
    for (int round = 0; round < 50; round++) {
      std::vector<int> done(100, 0);
      pool.run(2, [&](int worker) {
        for (int i; (i = pool.take(0, worker, 100)) < 100;) done[i]++;
        pool.barrier();
        for (int i; (i = pool.take(1, worker, 100)) < 100;) done[i] += done[i];
      });
      for (int d : done) expect(d == 2, "pool", "work", threads, round);
    }
  }
}

}  // namespace

int main() {
  const Kernels& plain = *kernels_base();
  for (const Kernels* fast : {kernels_base(), kernels_avx2(), kernels_avx512bw(), kernels_avx512(), kernels_amx(),
                              kernels_neon(), kernels_i8mm()}) {
    if (!fast) continue;
    test_gemm(*fast, plain);
    test_rows(*fast, plain);
    test_recurrent(*fast, plain);
    test_attend(*fast, plain);
    test_draw(*fast, plain);
    test_score(*fast, plain);
    std::printf("%s ok\n", fast->name);
  }
  test_pool();
  return 0;
}
