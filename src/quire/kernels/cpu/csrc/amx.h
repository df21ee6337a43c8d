// Multiplication by AMX tiles for many rows; few rows stay with VNNI. Included by isa_avx512.cpp in its namespace.
//
// A tile product takes 16 rows x one block of 32 inputs x one group of 16 outputs. Block scales cannot be applied
// inside a tile, so each product is stored, then scaled and added by vectors while the next one runs.
namespace amx {

constexpr int kTile = 16;
constexpr int kFew = 9;  // rows left over that VNNI does sooner than a mostly empty tile

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

bool permitted() {
  unsigned a, b, c, d;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  if (!(d >> 24 & 1) || !(d >> 25 & 1)) return false;  // AMX-TILE, AMX-INT8
  constexpr long kRequest = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

void begin() {  // tiles 0, 1: products; 2, 3: activations [16, 32]; 4, 5: weights [8 quads, 16 x 4]
  Config config;
  for (int t = 0; t < 6; t++) {
    config.rows[t] = t < 4 ? 16 : 8;
    config.bytes[t] = t == 2 || t == 3 ? 32 : 64;
  }
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic names only its first bytes as read
  _tile_loadconfig(&config);
}

void end() { _tile_release(); }

// One group's weights as bytes and floats: done once, used by all rows.
struct Unpacked {
  const uint8_t* quants;
  const float *scales, *minima;
};

template <int Bits>
Unpacked unpack(const Matrix& w, int g, uint8_t* scratch) {
  int blocks = w.blocks();
  float* scales = reinterpret_cast<float*>(scratch);
  float* minima = scales + blocks * kLanes;
  uint8_t* quants = reinterpret_cast<uint8_t*>(minima + blocks * kLanes);
  for (int b = 0; b < blocks; b++) {
    const uint16_t* halves = w.scales(g, b);
    for (int i = 0; i < (Bits == 4 ? 5 : 8); i++) __builtin_prefetch(w.quants(g, b) + w.group_bytes() + 64 * i);
    store(scales + b * kLanes, load_half(halves));
    if (Bits == 4) {
      store(minima + b * kLanes, load_half(halves + kLanes));
      __m512i v[8];
      load_block<4>(w.quants(g, b), v);
      for (int i = 0; i < 8; i++) _mm512_store_si512(quants + b * 512 + 64 * i, v[i]);
    }
  }
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read
  return {Bits == 4 ? quants : w.quants(g, 0), scales, minima};
}

// The product of block b into `products`; C, A and B are tile numbers, which must be literals.
#define QUIRE_MULTIPLY(C, A, B, b, products)       \
  do {                                             \
    _tile_zero(C);                                 \
    _tile_loadd(A, xq + size_t(b) * 512, kBlock);  \
    _tile_loadd(B, u.quants + size_t(b) * 512, 64); \
    if (Bits == 4) {                               \
      _tile_dpbsud(C, A, B);                       \
    } else {                                       \
      _tile_dpbssd(C, A, B);                       \
    }                                              \
    _tile_stored(C, products, 64);                 \
  } while (0)

template <int Bits>
inline void add(const Unpacked& u, const float* factors, int b, const int32_t* products, __m512* acc) {
  __m512 d = load(u.scales + b * kLanes), minimum = Bits == 4 ? load(u.minima + b * kLanes) : d;
  factors += b * 32;
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) {
    __m512i dot = _mm512_load_si512(products + r * kLanes);
    acc[r] = accumulate<Bits>(acc[r], dot, d, minimum, factors[r], factors[16 + r]);
  }
}

template <int Bits>
void tile16(const Unpacked& u, const Matrix& w, int g, Rows x, int m, int count, Out out) {
  alignas(64) int32_t products[2][kTile * kLanes];
  int blocks = w.blocks();
  const int8_t* xq = x.quants(m, 0);
  const float* factors = x.scale(m, 0);
  __m512 acc[kTile];
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) acc[r] = _mm512_setzero_ps();
  QUIRE_MULTIPLY(0, 2, 4, 0, products[0]);
  for (int b = 0; b < blocks; b += 2) {
    if (b + 1 < blocks) QUIRE_MULTIPLY(1, 3, 5, b + 1, products[1]);
    add<Bits>(u, factors, b, products[0], acc);
    if (b + 2 < blocks) QUIRE_MULTIPLY(0, 2, 4, b + 2, products[0]);
    if (b + 1 < blocks) add<Bits>(u, factors, b + 1, products[1], acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++)
    if (r < count) finish(out, m + r, g, acc[r]);
}

template <int Bits>
void group(const Matrix& w, int g, Rows x, int m0, int m1, Out out, uint8_t* scratch) {
  Unpacked u = unpack<Bits>(w, g, scratch);
  int m = m0;
  for (; m1 - m > kFew; m += kTile) tile16<Bits>(u, w, g, x, m, m1 - m < kTile ? m1 - m : kTile, out);
  if (m < m1) rows<Bits>(w, g, x, m, m1, out);
}

void gemm(const Matrix& w, int g0, int g1, Rows x, int m0, int m1, Out out, Scratch scratch) {
  if (m1 - m0 <= kFew) return quire::gemm(w, g0, g1, x, m0, m1, out, scratch);
  for (int g = g0; g < g1; g++)
    w.bits == 4 ? group<4>(w, g, x, m0, m1, out, scratch.bytes) : group<8>(w, g, x, m0, m1, out, scratch.bytes);
}

const Kernels kTable = QUIRE_KERNELS("amx", gemm);

#undef QUIRE_MULTIPLY

}  // namespace amx
