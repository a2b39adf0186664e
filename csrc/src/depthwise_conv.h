// What the driver (depthwise_conv.cpp) and the kernels of each instruction set share.
#pragma once

#include <cstdint>

#include "megaslide.h"

namespace megaslide {

// Channels that are worked on together: of long rows, the nine that meet in an output stay cached.
constexpr int64_t kChannels = 128;
constexpr int64_t kSums = MEGASLIDE_DEPTHWISE_SUMS;

struct ConvArrays {
  megaslide_depthwise_shape shape;
  const void *x;
  const float *weight, *bias;
  void *out;
};

struct SumArrays {
  megaslide_depthwise_shape shape;
  const void *x, *grad_out;
};

// Rows [first, last) of the batch * T * H there are, and at most kChannels channels.
struct Tile {
  int64_t first, last, channel, channels;
};

struct DepthwiseKernels {
  void (*convolve)(const ConvArrays &arrays, const Tile &tile);
  // Writes the tile's sums to its channels of to [kSums, D].
  void (*sum)(const SumArrays &arrays, const Tile &tile, float *to);
};

namespace baseline {
extern const DepthwiseKernels depthwise_kernels;
}
namespace x86_64_v3 {
extern const DepthwiseKernels depthwise_kernels;
}
namespace x86_64_v4 {
extern const DepthwiseKernels depthwise_kernels;
}

}  // namespace megaslide
