// Memory of a program that grows with the largest step so far. Refuses to know: what is kept in it.
#pragma once

#include <memory>

#include "common.h"

namespace quire {

inline int pad16(int n) { return (n + 15) / 16 * 16; }

template <typename T>
struct Buffer {  // aligned, never keeps contents when it grows
  std::unique_ptr<T[]> owner;
  size_t size = 0;

  T* need(size_t count) {
    if (count + 64 / sizeof(T) > size) owner.reset(new T[size = count + 64 / sizeof(T)]());
    return data();
  }
  T* data() const { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(owner.get()) + 63) & ~uintptr_t(63)); }
};

struct RowBuffer {
  Buffer<int8_t> q;
  Buffer<float> factors;
  Buffer<int32_t> excess;

  Rows need(int rows, int k) {
    rows = pad16(rows);
    const size_t blocks = size_t(rows) * (k / kBlock);
    return {q.need(size_t(rows) * k), factors.need(blocks * 3), excess.need(blocks * 3), k};
  }
};

}  // namespace quire
