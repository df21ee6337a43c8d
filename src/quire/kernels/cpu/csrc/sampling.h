// Sampling many rows on a pool's threads: what is done to logits before a draw, the draw, log-probabilities of what was
// drawn. Refuses to know: Python, grammars, who asked.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace quire {

// What a row asks for besides a token, as bits.
constexpr int64_t kBias = 1, kStops = 2, kPenalties = 4, kScored = 8;

struct Sampling {
  float* logits;  // [rows, vocab]; as they were, once all is done
  int64_t stride;
  int32_t vocab, rows;
  const int64_t *slots, *positions, *asked;  // [rows]
  const int64_t* numbers;                    // [slots, kWords]
  const int64_t* bias_ids;                   // [slots, biases], and their values: nought is padding
  const float* bias_values;
  const int64_t* stop_ids;  // [slots, stops]; negative ones are padding
  const int32_t* tokens;    // [slots, token_stride]: histories
  int64_t token_stride;
  int32_t biases, stops, top;
  int32_t* counts;  // [threads, vocab] noughts, for penalties to count in
  int64_t* drawn;   // [rows]
  int32_t* scores;  // [rows, 2 + 2 top]: logprob, rank, ids of the likeliest, their logprobs; floats as their bits
};

void sample(const Kernels& kernels, Pool& pool, const Sampling& all);

// Log-probabilities of given tokens, `scores` as above.
void score_rows(const Kernels& kernels, Pool& pool, const float* logits, size_t stride, int vocab, int rows,
                const int64_t* tokens, int top, int32_t* scores);

}  // namespace quire
