// A fixed team of threads that runs one job at a time; the caller is worker 0. Within a job, workers meet at
// barriers and take items of a stage's work from shared counters, so that a slow core is given less.
// Refuses to know: what the work is.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

// While it lives, numbers too small for a normal float are nought on this thread: a state that fades away would otherwise be
// computed by microcode, a hundred times slower. ARM needs no such thing.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  const unsigned before_;
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
};

// Memory that a worker will read next.
struct Ahead {
  const uint8_t *at, *end;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int size() const { return size_; }

  // Runs job(worker) on every worker and returns when all are done. `stages` counters start at zero.
  void run(int stages, const std::function<void(int)>& job);

  // For use inside a job: wait until every worker is here, asking for memory `ahead` meanwhile.
  void barrier(Ahead& ahead);
  void barrier() {
    Ahead nothing{nullptr, nullptr};
    barrier(nothing);
  }

  // For use inside a job: an item of a stage that nobody took yet, or `total` when none is left. A worker begins in a
  // stretch of its own, so that what it takes next lies behind what it took last; then it helps others.
  int take(int stage, int worker, int total) {
    for (int i = 0; i < size_; i++) {
      int owner = (worker + i) % size_;
      int at = start(owner, total) + counters_[stage * size_ + owner].next.fetch_add(1, std::memory_order_relaxed);
      if (at < start(owner + 1, total)) return at;
    }
    return total;
  }

  // The first item of a worker's own stretch.
  int start(int worker, int total) const { return int(int64_t(total) * worker / size_); }

 private:
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };

  void work(int worker);

  int size_;
  std::vector<std::thread> threads_;
  std::vector<Counter> counters_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint64_t> phase_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace quire
