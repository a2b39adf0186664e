// Threads with an explicit count, whatever OpenMP's environment variables say.
#pragma once

#include <cstdint>
#include <functional>

namespace megaslide {

// Calls run(item, worker) once for every item of [0, items); worker < threads names the thread,
// for its scratch memory. Items are handed out in order to whoever is free, so a result must not
// depend on the worker. Falls back to fewer threads where the system refuses one. `run` must not
// throw.
void parallel_for(int64_t items, int threads,
                  const std::function<void(int64_t item, int worker)> &run);

}  // namespace megaslide
