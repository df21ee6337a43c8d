// Every kernel set of this host against the plain one, on random shapes; built alone, so that it also runs under an
// emulator and under sanitizers. Prints the sets it tested; exits with 1 at the first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "common.h"
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
  Array<int32_t> total;
  Rows rows;
  Quantised(int m, int k)
      : q(size_t(m + 15) / 16 * 16 * k), factors(q.size / kBlock * 2), total(q.size / kBlock * 2),
        rows{q.data, factors.data, total.data, k} {}
};

bool close(const float* a, const float* b, size_t n, float tolerance) {
  float most = 1e-6f;
  for (size_t i = 0; i < n; i++) most = std::fmax(most, std::fabs(b[i]));
  for (size_t i = 0; i < n; i++)
    if (!(std::fabs(a[i] - b[i]) <= tolerance * most)) return false;
  return true;
}

struct Stored {  // a kind of pack.cpp, and how it is packed
  int kind, bits, run, elements, bytes;
  std::vector<int> halves;  // where blocks keep fp16 factors
};
const Stored kStored[] = {{1, 4, 1, 32, 20, {0, 2}}, {6, 5, 1, 32, 24, {0, 2}}, {4, 8, 1, 32, 128, {}},
                          {7, 5, 8, 256, 176, {0, 2}}, {8, 6, 8, 256, 210, {208}}};

std::vector<uint8_t> random_rows(const Stored& form, int n, int k) {
  std::vector<uint8_t> blocks(size_t(n) * k / form.elements * form.bytes);
  for (uint8_t& byte : blocks) byte = uint8_t(random_bits());
  for (size_t i = 0; i < blocks.size(); i += form.bytes) {
    for (int at : form.halves) {
      uint16_t half = float_to_half(uniform());
      std::memcpy(&blocks[i + at], &half, 2);
    }
    for (int j = 0; form.halves.empty() && j < form.elements; j++) {
      float value = uniform();
      std::memcpy(&blocks[i + j * 4], &value, 4);
    }
  }
  return blocks;
}

void test_gemm(const Kernels& fast, const Kernels& plain) {
  for (const Stored& form : kStored)
    for (int m : {1, 2, 3, 5, 7, 8, 11, 15, 16, 17, 26, 40})
      for (int k : {32, 96, 256, 512}) {
        if (k % (kBlock * form.run)) continue;
        const int bits = form.bits * 10 + form.run;
        int n = 1 + below(70);
        Matrix w{nullptr, n, k, form.bits, form.run};
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
        const Out to{got.data(), width, shift, add, 0, 0}, plainly{want.data(), width, shift, add, 0, 0};
        const Piece pieces[] = {{&w, 0, part, to}, {&w, part, w.groups(), to}}, whole{&w, 0, w.groups(), plainly};
        fast.gemm(pieces, 2, a.rows, 0, m, {scratch.data});
        for (int r = 0; r < m; r++) {  // each row as if it were the only one
          Quantised one(1, k);
          fast.quantise(&x[size_t(r) * k], one.rows, 0);
          const Piece single{&w, 0, w.groups(), {&alone[r * width], width, shift, add, 0, 0}};
          fast.gemm(&single, 1, one.rows, 0, 1, {scratch.data});
        }
        fast.end();
        plain.gemm(&whole, 1, a.rows, 0, m, {scratch.data});
        expect(close(got.data(), want.data(), got.size(), 1e-5f), fast.name, "gemm", bits, m, k);
        expect(!std::memcmp(got.data(), alone.data(), got.size() * 4), fast.name, "a row among others", bits, m, k);
      }
}

void test_rows(const Kernels& fast, const Kernels& plain) {
  for (int k : {32, 64, 576}) {
    std::vector<float> x(k), weight(k), a(k), b(k), cosines(k), sines(k);
    for (int i = 0; i < k; i++) x[i] = 4 * uniform(), weight[i] = uniform(), cosines[i] = uniform(), sines[i] = uniform();
    fast.norm(x.data(), weight.data(), 1e-5f, k, a.data());
    plain.norm(x.data(), weight.data(), 1e-5f, k, b.data());
    expect(close(a.data(), b.data(), k, 1e-6f), fast.name, "norm", k);
    Quantised p(1, k), q(1, k);
    fast.norm_quantise(x.data(), weight.data(), 1e-5f, p.rows, 0);
    plain.norm_quantise(x.data(), weight.data(), 1e-5f, q.rows, 0);
    expect(close(p.factors.data, q.factors.data, 1, 1e-6f), fast.name, "norm_quantise", k);
    fast.gate(x.data(), weight.data(), p.rows, 0, 0);
    plain.gate(x.data(), weight.data(), q.rows, 0, 0);
    expect(close(p.factors.data, q.factors.data, 1, 1e-5f), fast.name, "gate", k);
    for (int half : {k / 2, k / 4, 3}) {
      a = x, b = x;
      fast.rope(a.data(), cosines.data(), sines.data(), half, 0.5f, k);
      plain.rope(b.data(), cosines.data(), sines.data(), half, 0.5f, k);
      expect(close(a.data(), b.data(), k, 1e-6f), fast.name, "rope", k, half);
    }
  }
}

void test_attend(const Kernels& fast, const Kernels& plain) {
  for (int round = 0; round < 30; round++) {
    int dim = 32 << below(3), kv_heads = 1 + below(3), heads = kv_heads * (1 + below(4)), tokens = 1 + below(24);
    int pages = 40, kind = round % 5, window = round % 3 ? 0 : 1 + below(40), count = 1 + below(5);
    Paged kv{nullptr, nullptr, 0, 0, tokens, kv_heads, dim, kind};
    kv.v_offset = size_t(tokens) * kv.token_stride();
    kv.page_stride = 2 * kv.v_offset + 4 * kv.v_scales();
    Array<uint8_t> pool(pages * kv.page_stride), other(pages * kv.page_stride);
    kv.k = pool.data;
    kv.scales = reinterpret_cast<uint16_t*>(pool.data + 2 * kv.v_offset);
    std::vector<float> token(size_t(kv_heads) * dim);
    for (int i = 0; i < pages * tokens; i++)
      for (int part = 0; part < 2; part++) {
        for (float& v : token) v = uniform();
        size_t at = i / tokens * kv.page_stride + part * kv.v_offset + i % tokens * kv.token_stride();
        uint16_t* scales = kv.scales_of(i / tokens, i % tokens, 0) + part * kv.v_scales();
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
    std::vector<float> q(size_t(count) * heads * dim), a(q.size()), b(q.size()), c(q.size());
    for (float& v : q) v = uniform();
    std::vector<Query> queries;
    for (int i = 0; i < count; i++) queries.push_back({&q[size_t(i) * heads * dim], base + i, i, table.data()});
    AttendArgs args{kv, heads, window, queries.data(), count, 0, 0, kv_heads, {}, a.data(), nullptr, 0};
    std::vector<float> scratch(std::max(fast.attend_floats(args), plain.attend_floats(args)));
    fast.attend(args, scratch.data());
    args.out_float = b.data();
    plain.attend(args, scratch.data());
    args.out_float = c.data();
    args.count = 1;
    for (int i = 0; i < count; i++, args.queries++)  // each query, and each KV head, as if it were the only one
      for (args.head_begin = 0; args.head_begin < kv_heads; args.head_begin++) {
        args.head_end = args.head_begin + 1;
        fast.attend(args, scratch.data());
      }
    expect(close(a.data(), b.data(), a.size(), 1e-5f), fast.name, "attend", dim, window, kind);
    expect(!std::memcmp(a.data(), c.data(), a.size() * 4), fast.name, "a query among others", dim, window, kind);
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
  for (const Kernels* fast : {kernels_base(), kernels_avx2(), kernels_avx512(), kernels_amx(), kernels_neon(),
                              kernels_i8mm()}) {
    if (!fast) continue;
    test_gemm(*fast, plain);
    test_rows(*fast, plain);
    test_attend(*fast, plain);
    test_draw(*fast, plain);
    std::printf("%s ok\n", fast->name);
  }
  test_pool();
  return 0;
}
