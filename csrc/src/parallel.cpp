#include "parallel.h"

#include <algorithm>
#include <atomic>

#ifdef _OPENMP
#include <omp.h>
#else
#include <exception>
#include <thread>
#include <vector>
#endif

namespace megaslide {

void parallel_for(int64_t items, int threads,
                  const std::function<void(int64_t item, int worker)> &run) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int worker) {
    for (int64_t item = next++; item < items; item = next++) run(item, worker);
  };
  const int count = static_cast<int>(std::clamp<int64_t>(items, 1, std::max(threads, 1)));
  if (count == 1) {  // nobody to wake: a call on little data costs next to nothing
    work(0);
    return;
  }
#ifdef _OPENMP
  // OpenMP where there is one, because torch has it too: after each of its loops, torch's workers
  // spin for a while on the very cores that threads of our own would have to wait for.
#pragma omp parallel num_threads(count)
  work(omp_get_thread_num());
#else
  std::vector<std::thread> others;
  try {
    others.reserve(static_cast<size_t>(count - 1));
    for (int worker = 1; worker < count; ++worker) others.emplace_back(work, worker);
  } catch (const std::exception &) {
    // No thread or no memory for one. The threads there are do the rest.
  }
  work(0);
  for (std::thread &other : others) other.join();
#endif
}

}  // namespace megaslide
