// How a matrix keeps its weights as a type, and its scales as floats. Included once per instruction set, inside its
// namespace, after simd.h and of the instruction set: `bytes_to_floats` (kZero too large), `kUnit` (what one step of its 6-bit
// quants is), `unpack_block` and `kUnpack` (rows from which on a group is unpacked first). Refuses to know: products.

template <int Bits, int Run>
struct Form {
  static constexpr int bits = Bits, run = Run, stored = Bits;  // stored: bits that a quant takes
  static constexpr int ahead = Run == 1 && Bits < 6 ? Bits + 1 : Bits;  // cache lines of a block, but for a run's head
  static constexpr bool minima = Bits < 6, halves = Bits == 6;  // halves: each half of a block has a scale
};

template <typename Visit>
inline void with_form(const Matrix& w, Visit visit) {
  if (w.run == 1) return w.bits == 4 ? visit(Form<4, 1>()) : w.bits == 5 ? visit(Form<5, 1>()) : visit(Form<8, 1>());
  return w.bits == 5 ? visit(Form<5, 8>()) : visit(Form<6, 8>());
}

inline bytes16 load16(const uint8_t* p) {
  bytes16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

constexpr int kVectors = kLanes / W;

// A group as it is packed. `enter` is called with every block in turn. Given by value, so that scales stay in registers.
template <typename F>
struct Packed : F {
  const uint8_t* group;
  const uint16_t* first;    // fp16 of the first run
  vf factors[2][kVectors];  // of the run: of scales, and of minima
  vf scales[2][kVectors];   // of the block: the scale, and that of the second half or the minimum

  Packed(const Matrix& w, int g) : group(w.group(g)), first(w.scales(g, 0)) {}
  QUIRE_INLINE Matrix w() const { return {group, 0, 0, F::bits, F::run}; }  // places within a group do not depend on n and k
  QUIRE_INLINE const uint16_t* halves_of(int b) const {
    return F::minima ? w().scales(0, b) : first + b / F::run * kLanes;
  }
  QUIRE_INLINE const uint8_t* quants(int b) const { return w().quants(0, b); }
  QUIRE_INLINE vf scale(int b, int lane) const { return F::run == 1 ? load_half(halves_of(b) + lane) : scales[0][lane / W]; }
  QUIRE_INLINE vf other(int b, int lane) const {
    if (!F::minima && !F::halves) return vf{};
    return F::run == 1 ? load_half(halves_of(b) + kLanes + lane) : scales[1][lane / W];
  }
  QUIRE_INLINE void enter(int b) {
    if (F::run == 1) return;
    if (b % 8 == 0)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) {
        factors[0][i] = load_half(halves_of(b) + i * W) * (F::halves ? kUnit : 1.0f);
        factors[1][i] = F::minima ? -load_half(halves_of(b) + kLanes + i * W) : factors[0][i];
      }
    const uint8_t* integers = w().integers(0, b);
    auto integer = [&](int i) __attribute__((always_inline)) { return load16(integers + i * kLanes); };
    const int sub = b % 8;
    if (F::halves) {
      take(0, integer(2 * sub) ^ 128, 128.0f + kZero);
      take(1, integer(2 * sub + 1) ^ 128, 128.0f + kZero);
    } else if (sub < 4) {
      take(0, integer(sub) & 63, kZero);
      take(1, integer(4 + sub) & 63, kZero);
    } else {
      bytes16 low = integer(sub + 4);
      take(0, (low & 15) | (integer(sub - 4) >> 2 & 48), kZero);
      take(1, low >> 4 | (integer(sub) >> 2 & 48), kZero);
    }
  }

 private:
  // Integers less `zero`, times the run's factors: products of fp16 and few bits, which are exact.
  QUIRE_INLINE void take(int which, bytes16 bytes, float zero) {
    vf each[kVectors];
    bytes_to_floats(bytes, each);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) scales[which][i] = (each[i] - zero) * factors[which][i];
  }
};

// A group unpacked into scratch (see `scratch_bytes`).
template <typename F>
struct Unpacked : F {
  static constexpr int stored = 8, ahead = 0;
  uint8_t* const bytes;
  float* const floats;

  Unpacked(Scratch scratch, int blocks)
      : bytes(scratch.bytes), floats(reinterpret_cast<float*>(scratch.bytes + size_t(blocks) * kBlock * kLanes)) {}
  QUIRE_INLINE void enter(int) const {}
  QUIRE_INLINE const uint8_t* quants(int b) const { return bytes + b * 512; }
  QUIRE_INLINE vf scale(int b, int lane) const { return load(floats + b * 2 * kLanes + lane); }
  QUIRE_INLINE vf other(int b, int lane) const { return scale(b, kLanes + lane); }
};

template <typename F>
inline void unpack_scales(Packed<F>& from, int b, const Unpacked<F>& to) {
  from.enter(b);
  for (int i = 0; i < kLanes; i += W) {
    store(to.floats + b * 2 * kLanes + i, from.scale(b, i));
    store(to.floats + (b * 2 + 1) * kLanes + i, from.other(b, i));
  }
}

// What `multiply` makes of each group, unpacked first where there are rows enough for it to be worth that.
template <typename Multiply>
void each_group(const Piece* pieces, int count, int rows, Scratch scratch, Multiply multiply) {
  for (const Piece* p = pieces; p < pieces + count; p++)
    with_form(*p->w, [&](auto form) {
      using F = decltype(form);
      constexpr bool as_packed = F::run == 1 && F::bits != 5;  // bytes, or next to them
      for (int g = p->g0; g < p->g1; g++) {
        Packed<F> from(*p->w, g);
        if (as_packed || rows < kUnpack) {
          multiply(from, g, p->out);
        } else {
          Unpacked<F> to(scratch, p->w->blocks());
          for (int b = 0; b < p->w->blocks(); b++) {
            unpack_scales(from, b, to);
            unpack_block<F::bits>(from.quants(b), to.bytes + b * 512);
          }
          multiply(to, g, p->out);
        }
      }
    });
}
