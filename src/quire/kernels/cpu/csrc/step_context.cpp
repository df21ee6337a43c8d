#include "step_context.h"

#include <unistd.h>

namespace quire {

namespace {

constexpr size_t kAhead = 1 << 17;  // bytes of the next weights to ask for while waiting
constexpr int kMostGroups = 64;     // multiplied by at a time
constexpr int kLeastRows = 64;      // at a time: fewer would unpack weights too often

long second_level_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  if (const long found = sysconf(_SC_LEVEL2_CACHE_SIZE); found > 0) return found;
#endif
  return 1 << 20;
}

}  // namespace

int row_chunk(int inputs, int rows) {
  static const long cache = second_level_cache();
  const int most = std::clamp(int(cache * 2 / 5 / inputs), kLeastRows, kRowChunk), chunks = (rows + most - 1) / most;
  return chunks ? ((rows + chunks - 1) / chunks + 15) / 16 * 16 : kRowChunk;
}

StepContext::StepContext(const Decoder& decoder, const Kernels& kernels, Pool& pool)
    : d(decoder), k(kernels), pool(pool), adapters(*this) {}

void StepContext::begin(const Step& next, int widest) {
  step = &next;
  capacity = std::max(capacity, pad16(next.tokens));
  x.need(size_t(capacity) * d.hidden);
  leaving.need(size_t(capacity) * d.hidden);
  scratch_stride_ = (scratch_bytes(widest) + 63) / 64 * 64;
  scratch_.need(scratch_stride_ * pool.size());
}

void StepContext::expect(const Matrix& next, Worker& w) const {
  const uint8_t* at = next.n ? next.group(pool.start(w.index, next.groups())) : nullptr;
  w.next = {at, at ? at + kAhead : nullptr};
}

// Shared out, or where that is sooner done than meeting, by every worker for itself.
Normed StepContext::normalise(const Norm& norm, NormedRows& into, bool floats, Worker& w) {
  const bool alone = step->tokens <= kAlone;
  Rows rows = alone ? into.own[w.index] : into.rows;
  float* numbers = !floats ? nullptr : alone ? into.own_floats.data() + size_t(w.index) * kAlone * d.hidden : into.floats.data();
  auto one = [&](int t) {
    if (norm.weight) return k.norm_quantise(row(t), norm, rows, t, numbers ? numbers + size_t(t) * d.hidden : nullptr);
    k.quantise(row(t), rows, t);
  };
  if (alone) {
    for (int t = 0; t < step->tokens; t++) one(t);
  } else {
    each_token(w, one);
    meet(w);
  }
  return {rows, norm.weight ? numbers : x.data()};
}

// Work is numbered (run of groups, row chunk), row chunks innermost: they find the weights in the cache. Runs are as long as
// each other, and there are as many for every worker.
void StepContext::multiply(const Piece* pieces, int count, Rows x, Worker& w, const Adapted* on, int rows) {
  if (rows < 0) rows = step->tokens;
  const bool updates = on && adapters.update(*on);
  if (updates) adapters.shrink(*on, x, w);
  int groups = 0;
  for (int j = 0; j < count; j++) groups += pieces[j].g1;
  const int each_worker = std::max(4, (groups + pool.size() * kMostGroups - 1) / (pool.size() * kMostGroups));
  const int runs = std::min(groups, pool.size() * each_worker), chunk = row_chunk(x.k, rows), row_chunks = (rows + chunk - 1) / chunk;
  each(runs * row_chunks, w, [&](int item) {
    const int m0 = item % row_chunks * chunk, m1 = std::min(m0 + chunk, rows), run = item / row_chunks;
    const int first = int(int64_t(groups) * run / runs), last = int(int64_t(groups) * (run + 1) / runs);
    Piece parts[kMostPieces];
    int which[kMostPieces], used = 0, base = 0;
    for (int j = 0; j < count; base += pieces[j++].g1) {
      const int g0 = std::max(first - base, 0), g1 = std::min(last - base, pieces[j].g1);
      if (g0 < g1) which[used] = j, parts[used++] = {pieces[j].w, g0, g1, pieces[j].out};
    }
    k.gemm(parts, used, x, m0, m1, scratch(w));
    for (int j = 0; updates && j < used; j++) adapters.expand(*on, which[j], parts[j], m0, m1, w);
  });
}

void StepContext::multiply(const Linear& by, Rows x, Out out, Worker& w, const Adapted* on) {
  const Piece piece = whole(by, out);
  multiply(&piece, 1, x, w, on);
}

Out StepContext::residual(const Norm& post) const {
  if (post.weight) return {leaving.data(), size_t(d.hidden), nullptr, false, 0, 0};
  return {x.data(), size_t(d.hidden), nullptr, true, 0, 0, d.residual_scale};
}

void StepContext::leave(const Norm& post, Worker& w) {
  if (!post.weight) return;
  meet(w);
  each_token(w, [&](int t) {
    float *from = leaving.data() + size_t(t) * d.hidden, *to = row(t);
    k.norm(from, post, d.hidden, from);
    k.add_scaled(to, from, d.residual_scale, d.hidden);
  });
}

void StepContext::multiply_into_residual(const Linear& by, Rows x, const Norm& post, Worker& w, const Adapted* on) {
  multiply(by, x, residual(post), w, on);
  leave(post, w);
  meet(w);
}

}  // namespace quire
