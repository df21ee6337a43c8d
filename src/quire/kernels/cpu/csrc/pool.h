// A fixed team of threads that runs one job at a time; the caller is worker 0. Within a job, workers meet at
// barriers and take chunks of a stage's work from shared counters, so that a slow core is given less.
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

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int size() const { return size_; }

  // Runs job(worker) on every worker and returns when all are done. `stages` counters start at zero.
  void run(int stages, const std::function<void(int)>& job);

  // For use inside a job: wait until every worker is here.
  void barrier();

  // For use inside a job: the first of up to `step` items of a stage nobody took yet; >= total when none is left.
  int take(int stage, int step) { return counters_[stage].next.fetch_add(step, std::memory_order_relaxed); }

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
