// isa_avx512.cpp with tiles made of plain loops, so that its AMX kernels run on a host without them.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct EmulatedTile {
  alignas(64) uint8_t bytes[16][64];
};
thread_local EmulatedTile emulated[8];
thread_local struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} emulated_config;

void emulate_config(const void* from) { std::memcpy(&emulated_config, from, 64); }
void emulate_zero(int t) { std::memset(emulated[t].bytes, 0, sizeof emulated[t].bytes); }
void emulate_load(int t, const void* from, size_t stride) {
  emulate_zero(t);
  for (int r = 0; r < emulated_config.rows[t]; r++)
    std::memcpy(emulated[t].bytes[r], static_cast<const uint8_t*>(from) + r * stride, emulated_config.bytes[t]);
}
void emulate_store(int t, void* to, size_t stride) {
  for (int r = 0; r < emulated_config.rows[t]; r++)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, emulated[t].bytes[r], emulated_config.bytes[t]);
}

template <typename B>
void emulate_dots(int c, int a, int b) {
  for (int m = 0; m < emulated_config.rows[c]; m++)
    for (int n = 0; n < emulated_config.bytes[c] / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, &emulated[c].bytes[m][4 * n], 4);
      for (int k = 0; k < emulated_config.bytes[a] / 4; k++)
        for (int i = 0; i < 4; i++) sum += int8_t(emulated[a].bytes[m][4 * k + i]) * int(B(emulated[b].bytes[k][4 * n + i]));
      std::memcpy(&emulated[c].bytes[m][4 * n], &sum, 4);
    }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(from) emulate_config(from)
#define _tile_release() ((void)0)
#define _tile_loadd(t, from, stride) emulate_load(t, from, stride)
#define _tile_stored(t, to, stride) emulate_store(t, to, stride)
#define _tile_zero(t) emulate_zero(t)
#define _tile_dpbssd(c, a, b) emulate_dots<int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) emulate_dots<uint8_t>(c, a, b)
// What asks the processor whether it has tiles, and the system whether they may be used.
#include <sys/syscall.h>
#include <unistd.h>
#define __asm__(...) (a = b = c = 0, d = 3u << 24, (void)(a + b + c))
#define syscall(...) 0

#include "isa_avx512.cpp"
