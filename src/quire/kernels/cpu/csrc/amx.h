// Multiplication by AMX tiles for many rows; few rows stay with VNNI, and so do forms whose halves of a block have scales of
// their own: two products a block take tiles as long. Included by isa_avx512.cpp in its namespace.
//
// A tile product takes 16 rows x one block of 32 inputs x one group of 16 outputs. Block scales cannot be applied inside a
// tile, so each product is stored, then scaled and added by vectors. What a tile stored cannot be read back before it has
// reached the cache, so additions run kLag blocks behind, and from one group into the next: there is no place where only
// tiles or only vectors are at work.
namespace amx {

constexpr int kTile = 16;     // rows
constexpr int kFew = 8;       // rows left over that VNNI does sooner than a mostly empty tile
constexpr int kLag = 3;       // blocks after its multiplication a product is added
constexpr int kProducts = 4;  // kept at a time
constexpr int kLead = 4;      // blocks before its multiplication a block is unpacked
constexpr int kEarly = 2560;  // bytes: weights are asked for this far ahead of that

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

// Tile 0: a product; 1: activations [16 rows, 32]; 2: weights [8 quads, 16 x 4].
void begin() {
  Config config;
  auto tile = [&](int t, int rows, int bytes) {
    config.rows[t] = uint8_t(rows);
    config.bytes[t] = uint16_t(bytes);
  };
  tile(0, kTile, 64);
  tile(1, kTile, kBlock);
  tile(2, 8, 64);
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic names only its first bytes as read
  _tile_loadconfig(&config);
}

void end() { _tile_release(); }

// What of `load_block` was made unsigned is signed again: the sign costs tiles nothing.
template <FormId Id>
QUIRE_INLINE __m512i as_signed(__m512i w) {
  if constexpr (Id == kMxFour) return _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  return w;
}

// Blocks of a group on their way through scratch: bytes as tiles take them, and scales and minima as floats. 8-bit weights
// stay where they are.
template <typename F>
struct TileWeights {
  static constexpr bool needed = F::id != kByte;
  uint8_t* const bytes;
  float* const floats;

  TileWeights(Scratch scratch, int blocks)
      : bytes(scratch.bytes), floats(reinterpret_cast<float*>(scratch.bytes + size_t(blocks) * kBlock * kLanes)) {}
  QUIRE_INLINE void put(Packed<F>& from, int b) const {
    from.template fetch<kEarly>(b);
    if constexpr (needed) {
      from.enter(b);
      __m512i w[8];
      load_block<F::id>(from.quants(b), w);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) _mm512_store_si512(bytes + b * 512 + 64 * i, as_signed<F::id>(w[i]));
      store(floats + b * 2 * kLanes, from.scale(b, 0));
      if (F::minima) store(floats + b * 2 * kLanes + kLanes, from.minimum(b, 0));
    }
  }
};

template <bool Signed>
inline void multiply(const int8_t* x, const uint8_t* w, int32_t* to) {
  _tile_zero(0);
  _tile_loadd(1, x, kBlock);
  _tile_loadd(2, w, 64);
  if (Signed) _tile_dpbssd(0, 1, 2);
  else _tile_dpbsud(0, 1, 2);
  _tile_stored(0, to, 64);
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
};

// What is added up: a group of outputs for a tile of rows.
template <typename F>
struct Sums {
  __m512 acc[kTile] = {};
  bool begun = false;
  const uint16_t* halves;  // scales of 8-bit weights
  const float *floats, *factors;
  Out out;
  int m, g;

  inline void begin(const Walk& at, const TileWeights<F>& from, Rows x, int row) {
    begun = true;
    halves = reinterpret_cast<const uint16_t*>(at.piece->w->scales(at.g, 0));
    floats = from.floats;
    factors = x.scale(row, 0);
    out = at.piece->out;
    m = row;
    g = at.g;
#pragma GCC unroll 16
    for (int r = 0; r < kTile; r++) acc[r] = _mm512_setzero_ps();
  }
  QUIRE_INLINE void take(const int32_t* products) {
    const __m512 scale = F::id == kByte ? load_half(halves) : load(floats);
    const __m512 minimum = F::minima ? load(floats + kLanes) : scale;
#pragma GCC unroll 16
    for (int r = 0; r < kTile; r++) {
      acc[r] = accumulate(acc[r], _mm512_load_si512(products + r * kLanes), scale, factors[r]);
      acc[r] = add_minima<F>(acc[r], minimum, minimum, factors + r);
    }
    halves += kLanes;
    floats += 2 * kLanes;
    factors += 3 * kTile;
  }
  inline void end(int rows) {
#pragma GCC unroll 16
    for (int r = 0; r < kTile; r++)
      if (m + r < rows) finish(out, m + r, g, acc[r]);
  }
};

// Rows [m0, m1) by pieces of the same form. A group is unpacked while its first rows are multiplied, but for the first kLead
// blocks: while the last rows of the group before it are.
template <typename F>
void tiles(const Piece* pieces, const Piece* end, Rows x, int m0, int m1, Scratch scratch) {
  alignas(64) int32_t products[kProducts][kTile * kLanes];
  const int blocks = x.blocks();
  const TileWeights<F> unpacked(scratch, blocks);
  unsigned turn = 0;
  Sums<F> sums;
  Walk at = Walk::over(pieces, end);
  if (!at.more()) return;
  Packed<F> coming(*at.piece->w, at.g);
  for (int b = 0; b < kLead; b++) unpacked.put(coming, b);
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read
  while (at.more()) {
    const Walk next = at.next();
    const uint8_t* weights = unpacked.needed ? unpacked.bytes : at.piece->w->quants(at.g, 0);
    for (int m = m0; m < m1; m += kTile) {
      const int8_t* rows = x.quants(m, 0);
      bool unpacks = m == m0;
      auto step = [&](int b, int coming_block, bool adding) __attribute__((always_inline)) {
        if (unpacks) unpacked.put(coming, coming_block);
        if (adding) sums.take(products[(turn - kLag) % kProducts]);
        multiply<!F::minima>(rows + b * 512, weights + b * 512, products[turn++ % kProducts]);
      };
      int b = 0;
      for (const bool before = sums.begun; b < kLag; b++) step(b, b + kLead, before);
      if (sums.begun) sums.end(m1);
      sums.begin(at, unpacked, x, m);
      for (; b < blocks - kLead; b++) step(b, b + kLead, true);
      unpacks = m + kTile >= m1 && next.more();
      if (unpacks) coming = Packed<F>(*next.piece->w, next.g);
      for (; b < blocks; b++) step(b, b + kLead - blocks, true);
    }
    at = next;
  }
  for (int b = 0; b < kLag; b++) sums.take(products[(turn++ - kLag) % kProducts]);
  sums.end(m1);
}

void gemm(const Piece* pieces, int count, Rows x, int m0, int m1, Scratch scratch) {
  const int left = (m1 - m0) % kTile, whole = left > kFew ? m1 : m1 - left;  // most of a tile is as good as all of one
  const Piece* end = pieces + count;
  for (const Piece *from = pieces, *to; from < end; from = to) {  // those of the same form together
    for (to = from; to < end && to->w->form == from->w->form;) to++;
    const bool by_tiles = !from->w->how().halves && x.blocks() > kLag + kLead && m0 < whole;
    if (by_tiles)
      with_form(*from->w, [&](auto form) {
        if constexpr (!form.halves) tiles<decltype(form)>(from, to, x, m0, whole, scratch);
      });
    const int rest = by_tiles ? whole : m0;
    if (rest < m1) quire::gemm(from, int(to - from), x, rest, m1, scratch);
  }
}

const Kernels kTable = QUIRE_KERNELS("amx", gemm);

}  // namespace amx
