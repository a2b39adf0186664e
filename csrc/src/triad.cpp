// The yardstick for kernels that stream memory: STREAM's triad, with stores that skip the caches.
#include <algorithm>
#include <cstdint>

#include "megaslide.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace megaslide {
namespace {

constexpr int64_t kItem = 1 << 16;  // floats

void triad(float *a, const float *b, const float *c, float scalar, int64_t first, int64_t last) {
  int64_t i = first;
#if defined(__x86_64__)
  const __m128 factor = _mm_set1_ps(scalar);
  for (; i < last && reinterpret_cast<uintptr_t>(a + i) % 16 != 0; ++i) a[i] = b[i] + scalar * c[i];
  for (; i + 4 <= last; i += 4) {
    _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), _mm_mul_ps(factor, _mm_loadu_ps(c + i))));
  }
  _mm_sfence();
#endif
  for (; i < last; ++i) a[i] = b[i] + scalar * c[i];
}

}  // namespace
}  // namespace megaslide

extern "C" int32_t megaslide_triad(float *a, const float *b, const float *c, float scalar,
                                   int64_t count, int32_t threads) {
  using namespace megaslide;
  if (count < 0 || threads < 1 || (count > 0 && (!a || !b || !c))) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  parallel_for((count + kItem - 1) / kItem, threads, [&](int64_t item, int) {
    triad(a, b, c, scalar, item * kItem, std::min(count, (item + 1) * kItem));
  });
  return MEGASLIDE_OK;
}
