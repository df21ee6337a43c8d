#include "sampling.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace quire {
namespace {

// A slot's parameters, as generation/sampling/slot_params.py keeps them: integers, then doubles.
enum Number { kStream, kBranch, kTopK, kPromptLength, kSlot, kTopP, kTemperature, kLogMinP, kRepetition, kPresence,
              kFrequency, kWords };

double number(const int64_t* numbers, Number which) {
  double value;
  std::memcpy(&value, numbers + which, 8);
  return value;
}

// The key of a drawn position's noise: splitmix64 of its stream.
uint64_t row_key(uint64_t stream, uint64_t position) {
  uint64_t x = stream + (position + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// A row's logits, changed in place until it is gone.
class Adjusted {
 public:
  Adjusted(float* logits, int vocab) : logits_(logits), vocab_(vocab) {}
  Adjusted(const Adjusted&) = delete;
  ~Adjusted() {
    for (auto it = before_.rbegin(); it != before_.rend(); ++it) logits_[it->first] = it->second;
  }

  void add_bias(const int64_t* ids, const float* values, int count) {
    for (int i = 0; i < count; i++)
      if (values[i] != 0 && known(ids[i])) set(ids[i], logits_[ids[i]] + values[i]);
  }

  void forbid(const int64_t* ids, int count) {
    for (int i = 0; i < count; i++)
      if (known(ids[i])) set(ids[i], -INFINITY);
  }

  // Repetition over all of a history, then frequency and presence over what lies behind the prompt. `counts`: noughts,
  // before and after.
  void penalise(const int32_t* history, int64_t length, const int64_t* numbers, int32_t* counts) {
    const float repetition = float(number(numbers, kRepetition)), presence = float(number(numbers, kPresence));
    const float frequency = float(number(numbers, kFrequency));
    for (int64_t i = 0; i < length; i++)
      if (known(history[i])) {
        int32_t& count = counts[history[i]];
        count = i < numbers[kPromptLength] ? count | 1 : count + 2;
      }
    for (int64_t i = 0; i < length; i++) {
      if (!known(history[i])) continue;
      const int32_t count = std::exchange(counts[history[i]], 0);
      if (!count) continue;
      float x = logits_[history[i]];
      x = x > 0 ? x / repetition : x * repetition;
      set(history[i], x - frequency * float(count >> 1) - presence * float(count > 1));
    }
  }

 private:
  bool known(int64_t id) const { return id >= 0 && id < vocab_; }
  void set(int64_t id, float value) {
    before_.emplace_back(int32_t(id), logits_[id]);
    logits_[id] = value;
  }

  float* logits_;
  int vocab_;
  std::vector<std::pair<int32_t, float>> before_;
};

Scores scores_at(int32_t* row, int top) {
  return {reinterpret_cast<float*>(row), row + 1, row + 2, reinterpret_cast<float*>(row + 2 + top)};
}

// Calls one(row, worker, scratch) for every row.
template <typename One>
void each_row(const Kernels& kernels, Pool& pool, int vocab, int rows, One one) {
  const size_t words = kernels.draw_bytes(vocab) / 8 + 1;
  std::unique_ptr<uint64_t[]> scratch(new uint64_t[words * pool.size()]);  // touched only where it is needed
  auto bytes = [&](int worker) { return reinterpret_cast<uint8_t*>(scratch.get() + words * worker); };
  if (rows == 1) return one(0, 0, bytes(0));  // sooner done than others are called
  pool.run(1, [&](int worker) {
    for (int r; (r = pool.take(0, worker, rows)) < rows;) one(r, worker, bytes(worker));
  });
}

int64_t draw_row(const Kernels& kernels, const Sampling& all, int r, float* logits, int32_t* counts, uint8_t* scratch) {
  const int64_t slot = all.slots[r], asked = all.asked[r];
  const int64_t* numbers = all.numbers + slot * kWords;
  Adjusted adjusted(logits, all.vocab);
  if (asked & kBias) adjusted.add_bias(all.bias_ids + slot * all.biases, all.bias_values + slot * all.biases, all.biases);
  if (asked & kStops) adjusted.forbid(all.stop_ids + slot * all.stops, all.stops);
  if (asked & kPenalties) adjusted.penalise(all.tokens + slot * all.token_stride, all.positions[r], numbers, counts);
  const uint64_t key = row_key(uint64_t(numbers[kStream]), uint64_t(all.positions[r]));
  const float temperature = float(number(numbers, kTemperature));
  const Draw how{{uint32_t(key), uint32_t(key >> 32)}, temperature, float(number(numbers, kLogMinP)),
                 number(numbers, kTopP), numbers[kTopK], temperature == 0};
  return kernels.draw(logits, all.vocab, how, scratch);
}

}  // namespace

void sample(const Kernels& kernels, Pool& pool, const Sampling& all) {
  each_row(kernels, pool, all.vocab, all.rows, [&](int r, int worker, uint8_t* scratch) {
    float* logits = all.logits + r * all.stride;
    all.drawn[r] = draw_row(kernels, all, r, logits, all.counts + size_t(worker) * all.vocab, scratch);
    if (all.asked[r] & kScored) {
      const Scores scores = scores_at(all.scores + size_t(r) * (2 + 2 * all.top), all.top);
      kernels.score(logits, all.vocab, int(all.drawn[r]), all.top, scores, scratch);
    }
  });
}

void score_rows(const Kernels& kernels, Pool& pool, const float* logits, size_t stride, int vocab, int rows,
                const int64_t* tokens, int top, int32_t* scores) {
  each_row(kernels, pool, vocab, rows, [&](int r, int, uint8_t* scratch) {
    kernels.score(logits + r * stride, vocab, int(tokens[r]), top, scores_at(scores + size_t(r) * (2 + 2 * top), top),
                  scratch);
  });
}

}  // namespace quire
