#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace megaslide {

void parallel_for(int64_t items, int threads,
                  const std::function<void(int64_t item, int worker)> &run) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int worker) {
    for (int64_t item = next++; item < items; item = next++) run(item, worker);
  };
  std::vector<std::thread> others;
  try {
    const int64_t count = std::min<int64_t>(threads, items) - 1;
    others.reserve(static_cast<size_t>(std::max<int64_t>(count, 0)));
    for (int worker = 1; worker <= count; ++worker) others.emplace_back(work, worker);
  } catch (const std::exception &) {
    // No thread or no memory for one. The threads there are do the rest.
  }
  work(0);
  for (std::thread &other : others) other.join();
}

}  // namespace megaslide
