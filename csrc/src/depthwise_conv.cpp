// Depthwise convolution behind the C interface: checks, and how the work is divided among threads.
//
// Outputs are independent. The weight's gradient is a sum over all tokens: tiles of rows, whose
// size depends on the shape alone, have sums of their own, and these are added in order; so results
// are the same bits for any number of threads.
#include "depthwise_conv.h"

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "instruction_set.h"
#include "megaslide.h"
#include "parallel.h"

namespace megaslide {
namespace {

constexpr int64_t kWorthWaking = 65536;  // numbers of x that take about as long as waking a thread
constexpr int64_t kConvTokens = 512;     // of a tile: short enough to share out, long enough to
constexpr int64_t kSumTokens = 2048;     // make its sums, 28 numbers per channel, few

const DepthwiseKernels &kernels() {
#if defined(MEGASLIDE_X86_KERNELS)
  if (instruction_set() >= InstructionSet::x86_64_v4) return x86_64_v4::depthwise_kernels;
  if (instruction_set() == InstructionSet::x86_64_v3) return x86_64_v3::depthwise_kernels;
#endif
  return baseline::depthwise_kernels;
}

bool valid(const megaslide_depthwise_shape &shape) {
  if (shape.batch < 0 || shape.channels < 1 || shape.threads < 1) return false;
  int64_t most = std::numeric_limits<int64_t>::max() / std::max<int64_t>(shape.batch, 1);
  most /= shape.channels;
  for (const int64_t size : shape.size) {
    if (size < 1 || size > most) return false;
    most /= size;
  }
  return true;
}

// How [rows, channels] is cut: into `count` runs of `rows` rows, and `blocks` of channels.
struct Tiling {
  int64_t all, rows, count, channels, blocks;
  int threads;

  Tiling(const megaslide_depthwise_shape &shape, int64_t tokens)
      : all(shape.batch * shape.size[0] * shape.size[1]),
        rows(std::max<int64_t>(1, tokens / shape.size[2])),
        count((all + rows - 1) / rows),
        channels(shape.channels),
        blocks((channels + kChannels - 1) / kChannels) {
    const int64_t worth = all * shape.size[2] * channels / kWorthWaking;
    threads = static_cast<int>(std::clamp<int64_t>(worth, 1, shape.threads));
  }
  // Item by item along the rows, whose neighbours the cache then has.
  Tile at(int64_t item) const {
    const int64_t first = item % count * rows, channel = item / count * kChannels;
    return {first, std::min(first + rows, all), channel, std::min(kChannels, channels - channel)};
  }
};

void add_in_order(const float *parts, int64_t count, int64_t numbers, float *to) {
  std::fill_n(to, numbers, 0.0f);
  for (int64_t part = 0; part < count; ++part, parts += numbers) {
    for (int64_t i = 0; i < numbers; ++i) to[i] += parts[i];
  }
}

void run_sums(const SumArrays &arrays, float *sums) {
  const DepthwiseKernels &kernel = kernels();
  const Tiling tiling(arrays.shape, kSumTokens);
  const int64_t numbers = kSums * tiling.channels;
  std::vector<float> parts(static_cast<size_t>(tiling.count == 1 ? 0 : tiling.count * numbers));
  parallel_for(tiling.count * tiling.blocks, tiling.threads, [&](int64_t item, int) {
    float *own = tiling.count == 1 ? sums : parts.data() + item % tiling.count * numbers;
    kernel.sum(arrays, tiling.at(item), own);
  });
  if (tiling.count != 1) add_in_order(parts.data(), tiling.count, numbers, sums);
}

}  // namespace
}  // namespace megaslide

extern "C" {

int32_t megaslide_depthwise_conv(const megaslide_depthwise_shape *shape, const void *x,
                                 const float *weight, const float *bias, void *out) {
  using namespace megaslide;
  if (!shape || !valid(*shape) || !weight || (shape->batch > 0 && !(x && out))) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  const DepthwiseKernels &kernel = kernels();
  const Tiling tiling(*shape, kConvTokens);
  const ConvArrays arrays{*shape, x, weight, bias, out};
  parallel_for(tiling.count * tiling.blocks, tiling.threads,
               [&](int64_t item, int) { kernel.convolve(arrays, tiling.at(item)); });
  return MEGASLIDE_OK;
}

int32_t megaslide_depthwise_conv_sums(const megaslide_depthwise_shape *shape, const void *x,
                                      const void *grad_out, float *sums) {
  using namespace megaslide;
  if (!shape || !valid(*shape) || !sums || (shape->batch > 0 && !(x && grad_out))) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  try {
    run_sums({*shape, x, grad_out}, sums);
  } catch (const std::bad_alloc &) {
    return MEGASLIDE_OUT_OF_MEMORY;
  }
  return MEGASLIDE_OK;
}

}  // extern "C"
