// What the driver (deformable_attention.cpp) and the kernels of each instruction set share.
//
// B batch, N = T*H*W voxels, K taps, E extra keys; axes are ordered (t, h, w). A "row" is the
// head_dim floats of one voxel (or extra key) and head; rows of neighbours are `row` floats apart.
#pragma once

#include <cstdint>

#include "megaslide.h"

namespace megaslide {

// Arrays over taps are padded to a multiple of this, so that loops over them need no remainder.
constexpr int64_t kPad = 16;

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// Everything that is the same for all queries.
struct Plan {
  int64_t batch, voxels, heads, head_dim, groups, extra;
  int64_t row;       // floats between the rows of neighbouring voxels: heads * head_dim
  int64_t channels;  // numbers per offset group
  int64_t size[3], window[3];
  int64_t taps;  // K
  int64_t capacity;  // most voxels one query may read, counted with repetition
  int32_t kind;
  float scale;
  const float *index[3];    // [padded K] index of a tap in the window; padding repeats the last
  const float *centred[3];  // the same, from the window's centre
  const int32_t *iota;      // [padded E] 0, 1, 2, ...
};

struct ForwardArrays {
  megaslide_attention_inputs in;
  float *out, *lse;
};

struct BackwardArrays {
  megaslide_attention_inputs in;
  const float *out, *lse, *grad_out;
  megaslide_attention_gradients grad;
  // Gradient of the offsets by one head: query `first` of the chunk is at offsets[0], others
  // follow `offset_row` floats apart. Null where it is not wanted.
  float *offsets;
  int64_t offset_row;
};

// Queries [first, last) of one batch element and head.
struct Part {
  int64_t b, head, first, last;
};

struct AttentionKernels {
  int64_t (*scratch_bytes)(const Plan &plan);  // per thread
  void (*forward)(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *scratch);
  // Adds to the rows of k, v and the extra keys, which belong to (b, head) alone.
  void (*backward)(const Plan &plan, const BackwardArrays &arrays, const Part &part,
                   void *scratch);
};

namespace baseline {
extern const AttentionKernels attention_kernels;
}
namespace x86_64_v3 {
extern const AttentionKernels attention_kernels;
}
namespace x86_64_v4 {
extern const AttentionKernels attention_kernels;
}

}  // namespace megaslide
