// A float vector of the width at hand, by the compiler's own vector types. What they lack (fma, sum, highest, half
// floats, bytes) the including file's instruction set gives. Included once per instruction set, inside its namespace,
// after QUIRE_WIDTH and native fma, maximum and minimum (a > b ? a : b and a < b ? a : b). Refuses to know: what is computed.

constexpr int W = QUIRE_WIDTH;
typedef float vf __attribute__((vector_size(4 * QUIRE_WIDTH)));
typedef float vf_unaligned __attribute__((vector_size(4 * QUIRE_WIDTH), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * QUIRE_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * QUIRE_WIDTH)));
typedef int16_t vh __attribute__((vector_size(4 * QUIRE_WIDTH)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline vi loadi(const int32_t* p) {
  vi v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }  // nothing is left to do but spread it: -0 + 0 would be work
inline vf within(vf a, float low, float high) { return minimum(maximum(a, splat(low)), splat(high)); }
inline vf magnitude(vf a) { return (vf)((vi)a & 0x7fffffff); }

// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
constexpr float kRound = 12582912.0f;

// Rounded to the nearest integer, as an integer; |x| < 2^22.
inline vu nearest(vf x) { return (vu)(x + kRound) - 0x4b400000u; }

// e^x to about 1e-7 of itself for x <= 88; anything below -87 gives next to nothing.
inline vf exponential(vf x) {
  x = maximum(x, splat(-87.0f));
  x = minimum(x, splat(88.0f));
  vf shifted = fma(x, splat(1.44269504f), splat(kRound));
  vf n = shifted - kRound;
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  return (vf)((vu)p + ((vu)shifted << 23));
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }
inline vf hyperbolic_tangent(vf x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }
