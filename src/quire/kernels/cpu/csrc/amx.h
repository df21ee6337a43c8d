// Multiplication by AMX tiles for many rows; few rows stay with VNNI. Included by isa_avx512.cpp in its namespace.
//
// A tile product takes 16 (or 8) rows x one block of 32 inputs x one group of 16 outputs. Block scales cannot be
// applied inside a tile, so each product is stored, then scaled and added by vectors. What a tile stored cannot be read
// back before it has reached the cache, so additions run kLag blocks behind, and from one group into the next: there is
// no place where only tiles or only vectors are at work.
//
// While tiles are in use one of the two vector multipliers is not: multiplications, and conversions of integers, which
// are done by it too, take twice as long, but additions do not. Products therefore become floats by additions.
namespace amx {

constexpr int kTile = 16;
constexpr int kFew = 5;       // rows left over that VNNI does sooner than a mostly empty tile
constexpr int kLag = 3;       // blocks after its multiplication a product is added
constexpr int kProducts = 4;  // kept at a time
constexpr int kLead = 4;      // blocks before its multiplication 4-bit weights become bytes
constexpr size_t kEarly = 2560;  // bytes: weights are asked for this far ahead of that (8 bits: of multiplication)

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

// Tiles 0, 1: products of 16 and of 8 rows; 4, 5: their activations [rows, 32]; 6: weights [8 quads, 16 x 4]; 2, 3 and 7:
// these of half a block.
void begin() {
  Config config;
  auto tile = [&](int t, int rows, int bytes) {
    config.rows[t] = uint8_t(rows);
    config.bytes[t] = uint16_t(bytes);
  };
  tile(0, 16, 64);
  tile(1, 8, 64);
  tile(4, 16, kBlock);
  tile(5, 8, kBlock);
  tile(6, 8, 64);
  tile(2, 16, kBlock / 2);
  tile(3, 8, kBlock / 2);
  tile(7, 4, 64);
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic names only its first bytes as read
  _tile_loadconfig(&config);
}

void end() { _tile_release(); }

// Four-bit quants of a block as bytes.
inline void unpack(const uint8_t* from, uint8_t* to) {
  __m512i v[8];
  load_block<kNibble>(from, v);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) _mm512_store_si512(to + 64 * i, v[i]);
}

template <int Lines>
inline void fetch_lines(const uint8_t* at) {
#pragma GCC unroll 8
  for (int i = 0; i < Lines; i++) __builtin_prefetch(at + 64 * i);
}

// One block of R rows; tile numbers must be literals.
template <int Bits, int R>
inline void multiply(const int8_t* x, const uint8_t* w) {
  _tile_loadd(6, w, 64);
  if (R == 16) {
    _tile_zero(0);
    _tile_loadd(4, x, kBlock);
    if (Bits == 4) _tile_dpbsud(0, 4, 6);
    else _tile_dpbssd(0, 4, 6);
  } else {
    _tile_zero(1);
    _tile_loadd(5, x, kBlock);
    if (Bits == 4) _tile_dpbsud(1, 5, 6);
    else _tile_dpbssd(1, 5, 6);
  }
}

template <int R>
inline void keep(int32_t* to) {
  if (R == 16) _tile_stored(0, to, 64);
  else _tile_stored(1, to, 64);
}

// As `accumulate`, but for how integers become floats: added to the bits of 1.5 * 2^23, which is then taken off.
template <int Bits, int R>
inline void add(const uint16_t* scales, const float* factors, const int32_t* products, __m512* acc) {
  const __m512i bits = _mm512_set1_epi32(0x4b400000);
  const __m512 round = _mm512_set1_ps(kRound);
  __m512 d = load_half(scales), minimum = Bits == 4 ? load_half(scales + kLanes) : d;
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    __m512 dot = _mm512_sub_ps((__m512)_mm512_add_epi32(_mm512_load_si512(products + r * kLanes), bits), round);
    acc[r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(d, _mm512_set1_ps(factors[r])), acc[r]);
    if (Bits == 4) acc[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(factors[16 + r]), acc[r]);
  }
}

// The groups of several pieces one after the other.
struct Walk {
  const Piece *piece, *end;
  int g;

  static Walk over(const Piece* pieces, const Piece* end) { return Walk{pieces, end, pieces->g0 - 1}.next(); }
  Walk next() const {
    Walk to{piece, end, g + 1};
    while (to.piece < end && to.g >= to.piece->g1)
      if (++to.piece < end) to.g = to.piece->g0;
    return to;
  }
  bool more() const { return piece < end; }
  const uint8_t* quants(int b) const { return piece->w->quants(g, b); }
};

// What is added up: a group of outputs for a tile of rows.
template <int Bits, int R>
struct Sums {
  __m512 acc[R] = {};
  const uint16_t* scales = nullptr;
  const float* factors;
  Out out;
  int m, g;

  inline void begin(const Walk& at, Rows x, int row) {
    scales = reinterpret_cast<const uint16_t*>(at.piece->w->scales(at.g, 0));
    factors = x.scale(row, 0);
    out = at.piece->out;
    m = row;
    g = at.g;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
  }
  inline void take(const int32_t* products) {
    add<Bits, R>(scales, factors, products, acc);
    scales += Bits == 4 ? 160 : kLanes;
    factors += 3 * kTile;
  }
  inline void end(int rows) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      if (m + r < rows) finish(out, m + r, g, acc[r]);
  }
};

// Rows [m0, m1) by pieces of the same kind. A group's weights become bytes while its first rows are multiplied, but for
// the first kLead blocks: while the last rows of the group before it are.
template <int Bits, int R>
void tiles(const Piece* pieces, const Piece* end, Rows x, int m0, int m1, uint8_t* bytes) {
  alignas(64) int32_t products[kProducts][R * kLanes];
  const int blocks = x.blocks();
  unsigned turn = 0;
  Sums<Bits, R> sums;
  Walk at = Walk::over(pieces, end);
  if (!at.more()) return;
  for (int b = 0; Bits == 4 && b < kLead; b++) unpack(at.quants(b), bytes + b * 512);
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read
  while (at.more()) {
    const Walk next = at.next();
    const uint8_t *coming = at.quants(Bits == 4 ? kLead : 0), *weights = Bits == 4 ? bytes : at.quants(0);
    for (int m = m0; m < m1; m += R) {
      const int8_t* rows = x.quants(m, 0);
      auto step = [&](int b, int unpacked, bool adding) __attribute__((always_inline)) {
        if (coming) {
          if (Bits == 4) unpack(coming, bytes + unpacked * 512);
          fetch_lines<Bits == 4 ? 5 : 8>(coming + kEarly);
          coming += Bits == 4 ? 320 : 512;
        }
        multiply<Bits, R>(rows + b * 512, weights + b * 512);
        if (adding) sums.take(products[(turn - kLag) % kProducts]);
        keep<R>(products[turn++ % kProducts]);
      };
      int b = 0;
      for (const bool before = sums.scales; b < kLag; b++) step(b, b + kLead, before);
      if (sums.scales) sums.end(m1);
      sums.begin(at, x, m);
      for (; b < blocks - kLead; b++) step(b, b + kLead, true);
      if (Bits == 4) coming = m + R < m1 || !next.more() ? nullptr : next.quants(0);
      for (; b < blocks; b++) step(b, b + kLead - blocks, true);
      coming = nullptr;
    }
    at = next;
  }
  for (int b = 0; b < kLag; b++) sums.take(products[(turn++ - kLag) % kProducts]);
  sums.end(m1);
}

template <int R>
inline void multiply_half(const int8_t* x, const uint8_t* w) {
  _tile_loadd(7, w, 64);
  if (R == 16) {
    _tile_zero(0);
    _tile_loadd(2, x, kBlock);
    _tile_dpbsud(0, 2, 7);
  } else {
    _tile_zero(1);
    _tile_loadd(3, x, kBlock);
    _tile_dpbsud(1, 3, 7);
  }
}

// A group that is unpacked, to unsigned bytes: one product a block, or, where each half has a scale, two; less what quants
// that were made unsigned have added. In the order of `tile`, so with its bits.
template <int R, typename F>
void unpacked_tiles(const Unpacked<F>& from, int g, Rows x, int m0, int m1, Out out) {
  alignas(64) int32_t products[kProducts][R * kLanes];
  constexpr int parts = F::halves ? 2 : 1;
  const int steps = x.blocks() * parts;
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read
  for (int m = m0; m < m1; m += R) {
    __m512 acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    for (int s = 0; s < steps + kLag; s++) {
      if (s < steps) {
        const int8_t* rows = x.quants(m, s / parts);
        const uint8_t* weights = from.quants(s / parts);
        if (F::halves) multiply_half<R>(rows + s % 2 * 16, weights + s % 2 * 256);
        else multiply<4, R>(rows, weights);
      }
      if (s >= kLag) {
        const int b = (s - kLag) / parts, part = (s - kLag) % parts;
        const int32_t *product = products[(s - kLag) % kProducts], *excess = x.excesses(m, b);
        const float* factors = x.scale(m, b);
        const __m512 scale = from.scale(b, 0, part), minimum = from.minimum(b, 0, parts - 1);
        const __m512 first_minimum = from.minimum(b, 0);
        const __m512i round = _mm512_set1_epi32(0x4b400000);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const __m512i signed_ = _mm512_add_epi32(_mm512_load_si512(product + r * kLanes), less_excess<F::id>(excess + r, part));
          const __m512 dot = _mm512_sub_ps((__m512)_mm512_add_epi32(signed_, round), _mm512_set1_ps(kRound));
          acc[r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(factors[r])), acc[r]);
          if (part == parts - 1) acc[r] = add_minima<F>(acc[r], first_minimum, minimum, factors + r);
        }
      }
      if (s < steps) keep<R>(products[s % kProducts]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      if (m + r < m1) finish(out, m + r, g, acc[r]);
  }
}

// Pieces of the same form together.
template <int R>
void tiles(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  const Piece* end = pieces + count;
  for (const Piece *from = pieces, *to; from < end; from = to) {
    const Matrix& w = *from->w;
    for (to = from; to < end && to->w->form == w.form;) to++;
    if (w.form == kNibble) tiles<4, R>(from, to, x, m0, m1, scratch.bytes);
    else if (w.form == kByte) tiles<8, R>(from, to, x, m0, m1, scratch.bytes);
    else each_group<true>(from, int(to - from), kUnpack, scratch, [&](const auto& source, int g, Out out) {
      if constexpr (std::decay_t<decltype(source)>::bytes) unpacked_tiles<R>(source, g, x, m0, m1, out);
    });
  }
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  const bool narrow = x.blocks() < kLag + kLead;
  int left = narrow ? m1 - m0 : (m1 - m0) % kTile;
  if (!narrow && left > kTile / 2) left = 0;  // as good as a whole tile
  const int whole = m1 - left;
  if (m0 < whole) tiles<16>(pieces, count, x, m0, whole, scratch);
  if (narrow || left <= kFew) quire::gemm(pieces, count, x, whole, m1, scratch);
  else tiles<8>(pieces, count, x, whole, m1, scratch);
}

const Kernels kTable = QUIRE_KERNELS("amx", gemm);

}  // namespace amx
