#include "pool.h"

namespace quire {

namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kSpins = 4096;         // within a step: before giving the core away for a moment
constexpr int kIdleSpins = 1 << 14;  // between steps: about as long as a host takes to make the next batch

}  // namespace

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) {
  for (int worker = 1; worker < size_; worker++) threads_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run(int stages, const std::function<void(int)>& job) {
  if (int(counters_.size()) < stages) counters_ = std::vector<Counter>(stages);
  for (int i = 0; i < stages; i++) counters_[i].next.store(0, std::memory_order_relaxed);
  job_ = &job;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst)) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  job(0);
  barrier();
}

void Pool::barrier() {
  if (size_ == 1) return;
  uint64_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::work(int worker) {
  uint64_t seen = 0;
  while (true) {
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen && spins < kIdleSpins; spins++) pause();
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      parked_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
      parked_.fetch_sub(1, std::memory_order_seq_cst);
    }
    seen++;
    if (stop_) return;
    (*job_)(worker);
    barrier();
  }
}

}  // namespace quire
