// How a matrix keeps its weights as a type, and its scales as floats. Included once per instruction set, inside its
// namespace, after simd.h and of the instruction set: `bytes_to_floats` (kZero too large), `kUnit` (what one step of its 6-bit
// quants is) and `kUnpack` (rows from which on a group is unpacked first, by `unpack_block`). Refuses to know: products.

template <FormId Id>
struct FormOf {
  static constexpr FormId id = Id;
  static constexpr Form form = kForms[Id];
  static constexpr int bits = form.bits, run = form.run;
  static constexpr bool minima = form.minima, halves = form.halves;
  static constexpr bool bytes = false;  // quants lie as they are packed
};

template <typename Visit>
inline void with_form(const Matrix& w, Visit visit) {
  switch (w.form) {
    case kByte: return visit(FormOf<kByte>());
    case kNibble: return visit(FormOf<kNibble>());
    case kFive: return visit(FormOf<kFive>());
    case kSixK: return visit(FormOf<kSixK>());
    case kFiveK: return visit(FormOf<kFiveK>());
    case kFourK: return visit(FormOf<kFourK>());
    case kThreeK: return visit(FormOf<kThreeK>());
    case kTwoK: return visit(FormOf<kTwoK>());
    case kMxFour: return visit(FormOf<kMxFour>());
  }
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
  const uint8_t *group, *end;
  const uint8_t* first;      // scales of the first run
  vf factors[2][kVectors];   // of the run: of scales, and of minima
  vf scales[2][kVectors], minima_[2][kVectors];  // of the block's halves

  Packed(const Matrix& w, int g) : Packed(w.group(g), w.group_bytes(), w.scales(g, 0) - w.group(g)) {}
  Packed(const uint8_t* group, size_t bytes, size_t scales_at) : group(group), end(group + bytes), first(group + scales_at) {}
  QUIRE_INLINE const uint8_t* quants(int b) const { return group + F::form.quants_at(b); }
  QUIRE_INLINE const uint16_t* halves_of(int b) const {
    const uint8_t* at = !F::minima  ? first + b / F::run * F::form.behind_bytes()
                        : F::run == 1 ? quants(b) + F::form.quant_bytes()
                                      : group + F::form.head_at(b);
    return reinterpret_cast<const uint16_t*>(at);
  }
  QUIRE_INLINE vf scale(int b, int lane, int half = 0) const {
    if (F::run != 1) return scales[half][lane / W];
    if (F::id == kMxFour) return (vf)(load_bytes(first + b * kLanes + lane) << 23);
    return load_half(halves_of(b) + lane);
  }
  QUIRE_INLINE vf minimum(int b, int lane, int half = 0) const {
    if (!F::minima) return vf{};
    return F::run == 1 ? load_half(halves_of(b) + kLanes + lane) : minima_[half][lane / W];
  }
  QUIRE_INLINE void enter(int b) {
    if (F::run == 1) return;
    if (b % 8 == 0)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) {
        factors[0][i] = load_half(halves_of(b) + i * W) * (F::id == kSixK ? kUnit : 1.0f);
        factors[1][i] = F::minima ? -load_half(halves_of(b) + kLanes + i * W) : factors[0][i];
      }
    const uint8_t* integers = group + F::form.integers_at(b) + b % 8 * 2 * kLanes;
    const bytes16 first = load16(integers), second = load16(integers + kLanes);
    if (F::id == kTwoK) {
      take(scales[0], first & 15, kZero, factors[0]);
      take(scales[1], second & 15, kZero, factors[0]);
      take(minima_[0], first >> 4, kZero, factors[1]);
      take(minima_[1], second >> 4, kZero, factors[1]);
    } else if (F::halves) {  // signed
      take(scales[0], first ^ 128, 128.0f + kZero, factors[0]);
      take(scales[1], second ^ 128, 128.0f + kZero, factors[0]);
    } else {
      take(scales[0], first, kZero, factors[0]);
      take(minima_[0], second, kZero, factors[1]);
    }
  }
  // Asks for what is `Ahead` bytes further on: of longer runs, so many that are at least as far. Into the second-level cache,
  // which has more lines on their way at a time; 8 bits, which need no unpacking that would hide its latency, into the first.
  template <int Ahead>
  QUIRE_INLINE void fetch(int b) const {
    constexpr int level = F::bits == 8 ? 3 : 2;
    constexpr int lines = F::run == 1 && F::minima ? F::bits + 1 : F::bits, heads = F::form.head_bytes() / 64;
    constexpr int run = int(F::form.run_bytes()), runs = (Ahead + run - 1) / run;
    const uint8_t* next = quants(b) + (F::run == 1 ? Ahead : runs * run);
#pragma GCC unroll 8
    for (int i = 0; i < lines; i++) __builtin_prefetch(next + 64 * i, 0, level);
    if (heads && b % 8 < heads) __builtin_prefetch(group + F::form.head_at(b + 8 * runs) + b % 8 * 64);
  }

 private:
  // Integers less `zero`, times the run's factors: products of fp16 and few bits, which are exact.
  QUIRE_INLINE static void take(vf* to, bytes16 bytes, float zero, const vf* factors) {
    vf each[kVectors];
    bytes_to_floats(bytes, each);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) to[i] = (each[i] - zero) * factors[i];
  }
};

template <FormId Id>
void unpack_block(const uint8_t* from, uint8_t* to);

// A group unpacked into scratch (see `scratch_bytes`): quants as bytes, scales and minima as floats.
template <typename F>
struct Unpacked : F {
  static constexpr bool bytes = true;
  uint8_t* const quants_;
  float* const floats;

  Unpacked(Scratch scratch, int blocks)
      : quants_(scratch.bytes), floats(reinterpret_cast<float*>(scratch.bytes + size_t(blocks) * kBlock * kLanes)) {}
  QUIRE_INLINE void enter(int) const {}
  template <int Ahead>
  QUIRE_INLINE void fetch(int) const {}
  QUIRE_INLINE const uint8_t* quants(int b) const { return quants_ + b * 512; }
  QUIRE_INLINE vf scale(int b, int lane, int half = 0) const { return load(floats + (b * 4 + half) * kLanes + lane); }
  QUIRE_INLINE vf minimum(int b, int lane, int half = 0) const { return load(floats + (b * 4 + 2 + half) * kLanes + lane); }
  void put(Packed<F>& from, int b) const {
    from.enter(b);
    unpack_block<F::id>(from.quants(b), quants_ + b * 512);
    for (int half = 0; half <= F::halves; half++)
      for (int i = 0; i < kLanes; i += W) {
        store(floats + (b * 4 + half) * kLanes + i, from.scale(b, i, half));
        if (F::minima) store(floats + (b * 4 + 2 + half) * kLanes + i, from.minimum(b, i, half));
      }
  }
};

// What `multiply` makes of each group, unpacked first where there are rows enough for it to be worth that.
template <typename Multiply>
void each_group(const Piece* pieces, int count, int rows, Scratch scratch, Multiply multiply) {
  for (const Piece* p = pieces; p < pieces + count; p++)
    with_form(*p->w, [&](auto form) {
      using F = decltype(form);
      constexpr bool as_packed = kUnpack == INT32_MAX || F::bits == 4 || F::bits == 8;  // bytes, or next to them
      const size_t bytes = p->w->group_bytes(), scales_at = p->w->scales(0, 0) - p->w->group(0);
      const uint8_t* group = p->w->group(p->g0);
      for (int g = p->g0; g < p->g1; g++, group += bytes) {
        Packed<F> from(group, bytes, scales_at);
        if constexpr (!as_packed) {
          if (rows >= kUnpack) {
            const Unpacked<F> to(scratch, p->w->blocks());
            for (int b = 0; b < p->w->blocks(); b++) to.put(from, b);
            multiply(to, g, p->out);
            continue;
          }
        }
        multiply(from, g, p->out);
      }
    });
}
