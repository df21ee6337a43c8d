#include "pool.h"

#include <chrono>

namespace quire {

namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(20);   // within a step: then the core may serve who we wait for
constexpr auto kIdle = std::chrono::microseconds(300);  // between steps: about what a host takes to make a batch

// Spins while `waiting`, for at most `limit`; a pause takes from 1 to 140 cycles, so time is what counts.
template <typename Waiting>
void spin(Waiting waiting, Clock::duration limit) {
  Clock::time_point end{};
  for (int i = 1; waiting(); i++) {
    pause();
    if (i % 16) continue;
    Clock::time_point now = Clock::now();
    if (end == Clock::time_point{}) end = now + limit;
    if (now > end) return;
  }
}

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
  stages *= size_;
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

void Pool::barrier(Ahead& ahead) {
  if (size_ == 1) return;
  uint64_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  auto waiting = [&] { return phase_.load(std::memory_order_acquire) == phase; };
  for (; ahead.at < ahead.end && waiting(); ahead.at += 64) __builtin_prefetch(ahead.at);
  spin(waiting, kSpin);
  while (waiting()) std::this_thread::yield();
}

void Pool::work(int worker) {
  uint64_t seen = 0;
  while (true) {
    auto waiting = [&] { return epoch_.load(std::memory_order_acquire) == seen; };
    spin(waiting, kIdle);
    if (waiting()) {
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
