// What the driver (adamw.cpp) and the kernels of each instruction set share.
#pragma once

#include <cstdint>

#include "megaslide.h"

namespace megaslide {

constexpr int64_t kBlock = MEGASLIDE_ADAMW_BLOCK;

struct AdamWArrays {
  megaslide_adamw_state state;
  const void *grad;
  bool grad_is_bf16;
};

struct AdamWKernels {
  // Updates elements [first, last); `first` is a multiple of kBlock, and so is `last` but at the
  // end of the region.
  void (*update)(const AdamWArrays &arrays, const megaslide_adamw_coefficients &coefficients,
                 int64_t first, int64_t last);
};

namespace baseline {
extern const AdamWKernels adamw_kernels;
}
namespace x86_64_v3 {
extern const AdamWKernels adamw_kernels;
}
namespace x86_64_v4 {
extern const AdamWKernels adamw_kernels;
}

}  // namespace megaslide
