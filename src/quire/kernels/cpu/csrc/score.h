// Log-probabilities of one row: of a token and of the likeliest. Included once per instruction set, inside its namespace,
// after `draw.h`. Its twin is generation/sampling/logprobs.py.

void score(const float* logits, int vocab, int token, int top, const Scores& out, uint8_t* scratch) {
  const Tokens all{logits, nullptr, vocab};
  float* maxima = reinterpret_cast<float*>(scratch);
  uint64_t* keys = reinterpret_cast<uint64_t*>(scratch);
  const float chosen = logits[token], most = block_maxima(all, maxima);
  vi likelier = {};  // in each lane, less than none
  for (int i = 0; i < vocab; i += W) likelier += load_some(logits + i, vocab - i) > chosen;
  const float mass = float(std::log(weigh_all(all, most, -__builtin_inff(), 1.0f)));
  *out.logprob = (chosen - most) - mass;
  *out.rank = 1 + int32_t(sum((vu)-likelier));
  const float least = -3e38f;  // what is forbidden comes behind all else, by its id
  int n = top ? likeliest(all, top, least, maxima, keys) : 0;
  std::sort(keys, keys + n);
  for (int id = 0; n < top && id < vocab; id++)
    if (!(logits[id] >= least)) keys[n++] = order_key(-__builtin_inff(), id);
  for (int i = 0; i < n; i++) {
    out.top_ids[i] = int32_t(uint32_t(keys[i]));
    out.top_logprobs[i] = (key_logit(keys[i]) - most) - mass;
  }
}
