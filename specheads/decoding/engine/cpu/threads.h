// Threads: how many share a loop, and how they wait for each other.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace specheads_kernels __attribute__((visibility("hidden"))) {

constexpr int64_t kGrainBytes = 32768;  // a further thread pays from so many bytes on that each reads

// Threads that work on several loops in turn: entering a parallel region twice takes as long as a small loop, waiting for each
// other a fifth of that. Without OpenMP each loop is a region.
class Team {
 public:
  // Run work(team) on all threads.
  template <typename Work>
  static void run(const Work& work) {
#ifdef _OPENMP
    const int most = omp_in_parallel() ? 1 : at::get_num_threads();
    std::atomic<int> arrived{0};
#pragma omp parallel num_threads(most)
    {
      Team team(omp_get_thread_num(), omp_get_num_threads(), arrived);
      work(team);
    }
#else
    std::atomic<int> arrived{0};
    Team team(0, 1, arrived);
    work(team);
#endif
  }

  // The same on one thread where a loop is too small to share: entering a region takes longer.
  template <typename Work>
  static void run_if(bool pays, const Work& work) {
    if (pays) return run(work);
    std::atomic<int> arrived{0};
    Team team(0, 1, arrived);
    work(team);
  }

  // Share the numbers from 0 to count among the threads, at least `grain` for each, and wait until all are done.
  template <typename Loop>
  void each(int64_t count, int64_t grain, const Loop& loop) {
#ifdef _OPENMP
    const int64_t threads = std::min<int64_t>(size_, (count + grain - 1) / grain);
    if (rank_ < threads) loop(count * rank_ / threads, count * (rank_ + 1) / threads);
    wait();
#else
    at::parallel_for(0, count, grain, loop);
#endif
  }

  // Run `work` on one thread while the others wait.
  template <typename Work>
  void once(const Work& work) {
    if (rank_ == 0) work();
    wait();
  }

 private:
  Team(int rank, int size, std::atomic<int>& arrived) : rank_(rank), size_(size), arrived_(arrived) {}

  void wait() {
    if (size_ == 1) return;
    target_ += size_;
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    for (int turn = 0; arrived_.load(std::memory_order_acquire) < target_; turn++) {
      if (turn > kTurns) std::this_thread::yield();  // there are more threads than cores
    }
  }

  static constexpr int kTurns = 100000;
  const int rank_, size_;
  int target_ = 0;
  std::atomic<int>& arrived_;
};

}  // namespace specheads_kernels
