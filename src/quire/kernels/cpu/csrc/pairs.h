// Dot products where the processor multiplies bytes by pairs and has no sum of four (VNNI): as many pairs as fit 16 bits
// are added there. Included after simd.h and, of the instruction set, `neighbours(pairs, each)`, which adds those next to each
// other, times `each`. Refuses to know: how bytes are made of weights.

// Of unsigned quants of so many bits, times -127 to 127: 15 * 127 * 2 * 8 is below 2^15.
constexpr int pairs_that_fit(int bits) { return bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

// Products of quads [I, I + Count), of which product(i) gives one as pairs.
template <int Fit, int I, int Count, typename Product>
QUIRE_INLINE vi add_products(Product product, int16_t each = 1) {
  constexpr int now = Fit < Count ? Fit : Count;
  vh pairs = product(I);
#pragma GCC unroll 8
  for (int i = I + 1; i < I + now; i++) pairs += product(i);
  const vi sum = neighbours(pairs, each);
  if constexpr (now == Count) return sum;
  else return sum + add_products<Fit, I + now, Count - now>(product, each);
}
