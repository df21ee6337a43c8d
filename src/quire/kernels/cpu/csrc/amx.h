// Multiplication by AMX tiles for many rows; few rows stay with VNNI. Included by isa_avx512.cpp in its namespace.
//
// A tile product takes 16 rows x one block of 32 inputs x one group of 16 outputs. Block scales cannot be applied
// inside a tile, so each product is stored, then scaled and added by vectors. What a tile stored cannot be read back
// before it has reached the cache, so products run kLag blocks ahead of the additions.
namespace amx {

constexpr int kTile = 16;
constexpr int kFew = 9;       // rows left over that VNNI does sooner than a mostly empty tile
constexpr int kStored = 2;    // blocks after its multiplication a product is stored: what comes between need not wait
constexpr int kLag = 5;       // blocks after it a product is added
constexpr int kProducts = 8;  // kept at a time

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

void begin() {  // tiles 0 to 3: products; 4, 5: activations [16, 32]; 6, 7: weights [8 quads, 16 x 4]
  Config config;
  for (int t = 0; t < 8; t++) {
    config.rows[t] = t < 6 ? 16 : 8;
    config.bytes[t] = t == 4 || t == 5 ? 32 : 64;
  }
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic names only its first bytes as read
  _tile_loadconfig(&config);
}

void end() { _tile_release(); }

// One group's weights as bytes and floats: done once, used by all rows.
struct Group {
  const Matrix* w;
  int g;
  Out out;
  float *scales, *minima;
  uint8_t* bytes;  // where 4-bit quants go

  const uint8_t* quants() const { return w->bits == 4 ? bytes : w->quants(g, 0); }
};

inline void unpack(const Group& u, int b) {
  const uint16_t* halves = u.w->scales(u.g, b);
  store(u.scales + b * kLanes, load_half(halves));
  if (u.w->bits != 4) return;
  store(u.minima + b * kLanes, load_half(halves + kLanes));
  __m512i v[8];
  load_block<4>(u.w->quants(u.g, b), v);
  for (int i = 0; i < 8; i++) _mm512_store_si512(u.bytes + b * 512 + 64 * i, v[i]);
}

// The groups of several pieces one after the other, in two places by turns.
struct Walk {
  const Piece *piece, *end;
  int g;
  uint8_t* scratch;
  int blocks, turn;

  Group take() {
    while (piece < end && g >= piece->g1)
      if (++piece < end) g = piece->g0;
    float* scales = reinterpret_cast<float*>(scratch + (turn++ % 2 ? scratch_bytes(blocks * kBlock) / 2 : 0));
    float* minima = scales + blocks * kLanes;
    return {piece < end ? piece->w : nullptr, g++, piece < end ? piece->out : Out{}, scales, minima,
            reinterpret_cast<uint8_t*>(minima + blocks * kLanes)};
  }
};

// The product of block b in tile C; C, A and B are tile numbers, which must be literals.
#define QUIRE_MULTIPLY(C, A, B, b)                 \
  do {                                             \
    _tile_zero(C);                                 \
    _tile_loadd(A, xq + size_t(b) * 512, kBlock);  \
    _tile_loadd(B, quants + size_t(b) * 512, 64);  \
    if (Bits == 4) {                               \
      _tile_dpbsud(C, A, B);                       \
    } else {                                       \
      _tile_dpbssd(C, A, B);                       \
    }                                              \
  } while (0)

template <int Bits>
inline void add(const Group& u, const float* factors, int b, const int32_t* products, __m512* acc) {
  __m512 d = load(u.scales + b * kLanes), minimum = Bits == 4 ? load(u.minima + b * kLanes) : d;
  factors += b * 32;
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) {
    __m512i dot = _mm512_load_si512(products + r * kLanes);
    acc[r] = accumulate<Bits>(acc[r], dot, d, minimum, factors[r], factors[16 + r]);
  }
}

// Rows [m, m + count) of one tile. Meanwhile the group after this one is unpacked, and the one after that asked for.
template <int Bits>
void tile16(const Group& u, const Group& next, Rows x, int m, int count) {
  alignas(64) int32_t products[kProducts][kTile * kLanes];
  const int blocks = u.w->blocks();
  const int8_t* xq = x.quants(m, 0);
  const float* factors = x.scale(m, 0);
  const uint8_t* quants = u.quants();
  const uint8_t* later = next.w ? next.w->group(next.g + 1) : nullptr;
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read
  __m512 acc[kTile];
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) acc[r] = _mm512_setzero_ps();
#define QUIRE_STEP(j, A, B, done)                                                                    \
  do {                                                                                               \
    int b = at + j;                                                                                  \
    if (b < blocks) QUIRE_MULTIPLY(j, A, B, b);                                                      \
    if (b >= kStored && b - kStored < blocks)                                                        \
      _tile_stored(done, products[(b - kStored) % kProducts], 64);                                   \
    if (b < kLag) break;                                                                             \
    b -= kLag;                                                                                       \
    if (b >= blocks) break;                                                                          \
    if (later) {                                                                                     \
      unpack(next, b);                                                                               \
      for (int i = 0; i < (Bits == 4 ? 5 : 8); i++, later += 64) __builtin_prefetch(later);          \
    }                                                                                                \
    add<Bits>(u, factors, b, products[b % kProducts], acc);                                          \
  } while (0)
  for (int at = 0; at < blocks + kLag; at += 4) {
    QUIRE_STEP(0, 4, 6, 2);
    QUIRE_STEP(1, 5, 7, 3);
    QUIRE_STEP(2, 4, 6, 0);
    QUIRE_STEP(3, 5, 7, 1);
  }
#undef QUIRE_STEP
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++)
    if (r < count) finish(u.out, m + r, u.g, acc[r]);
}

template <int Bits>
void group(const Group& u, const Group& next, Rows x, int m0, int m1) {
  int m = m0;
  for (; m1 - m > kFew; m += kTile)
    tile16<Bits>(u, m == m0 ? next : Group{}, x, m, m1 - m < kTile ? m1 - m : kTile);
  if (m < m1) rows<Bits>(*u.w, u.g, x, m, m1, u.out);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  if (m1 - m0 <= kFew || !count) return quire::gemm(pieces, count, x, m0, m1, scratch);
  Walk walk{pieces, pieces + count, pieces->g0, scratch.bytes, x.blocks(), 0};
  Group u = walk.take();
  for (int b = 0; u.w && b < x.blocks(); b++) unpack(u, b);
  while (u.w) {
    Group next = walk.take();
    u.w->bits == 4 ? group<4>(u, next, x, m0, m1) : group<8>(u, next, x, m0, m1);
    u = next;
  }
}

const Kernels kTable = QUIRE_KERNELS("amx", gemm);

#undef QUIRE_MULTIPLY

}  // namespace amx
