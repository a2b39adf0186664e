// 3D-DSA behind the C interface: checks, memory, and how the work is divided among threads.
//
// Forward: blocks of queries of one batch element and head, all independent. Backward: one item
// per batch element and head, which alone adds to its rows of dk and dv, in the order of queries;
// so results are the same bits for any number of threads. A group's offsets get their gradient
// from several heads: each head writes its own, and they are added in the order of heads, chunk of
// queries by chunk of queries to bound that memory.
#include "deformable_attention.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>
#include <vector>

#include "instruction_set.h"
#include "megaslide.h"
#include "parallel.h"

namespace megaslide {
namespace {

constexpr int64_t kForwardBlock = 128;               // queries per item
constexpr int64_t kPartialFloats = int64_t{4} << 20;  // bound on the heads' own offset gradients

const AttentionKernels &kernels() {
#if defined(MEGASLIDE_X86_KERNELS)
  if (instruction_set() == InstructionSet::x86_64_v4) return x86_64_v4::attention_kernels;
  if (instruction_set() == InstructionSet::x86_64_v3) return x86_64_v3::attention_kernels;
#endif
  return baseline::attention_kernels;
}

// ---- arguments --------------------------------------------------------------------------------

bool valid_shape(const megaslide_attention_shape &shape) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t voxels = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t size = shape.size[axis];
    if (size < 1 || size > kMost / voxels) return false;
    if (shape.window[axis] < 1 || shape.window[axis] > size) return false;
    voxels *= size;
  }
  const bool sizes = shape.batch >= 0 && shape.heads >= 1 && shape.head_dim >= 1 &&
                     shape.extra >= 0 && shape.extra <= kMost && shape.threads >= 1;
  const bool groups = shape.groups >= 1 && shape.heads % shape.groups == 0;
  return sizes && groups && shape.kind >= MEGASLIDE_OFFSETS_NONE &&
         shape.kind <= MEGASLIDE_OFFSETS_TAP;
}

// Empty arrays may be null.
bool valid_inputs(const megaslide_attention_shape &shape, const megaslide_attention_inputs &in) {
  if (shape.batch == 0) return true;
  return in.q && in.k && in.v && (shape.kind == MEGASLIDE_OFFSETS_NONE || in.offsets) &&
         (shape.extra == 0 || (in.extra_k && in.extra_v));
}

bool valid_gradients(const megaslide_attention_shape &shape,
                     const megaslide_attention_gradients &grad) {
  if (shape.batch == 0) return true;
  return grad.q && grad.k && grad.v && (shape.extra == 0 || (grad.extra_k && grad.extra_v));
}

// ---- plan -------------------------------------------------------------------------------------

// A plan and the tables it points to.
struct PlannedWork {
  Plan plan;
  std::vector<float> index[3], centred[3];
  std::vector<int32_t> iota;
};

void plan_taps(PlannedWork *work) {
  Plan &plan = work->plan;
  const int64_t *window = plan.window;
  for (int64_t i = 0; i < padded(plan.taps); ++i) {
    const int64_t j = std::min(i, plan.taps - 1);
    const int64_t at[3] = {j / (window[1] * window[2]), j / window[2] % window[1], j % window[2]};
    for (int axis = 0; axis < 3; ++axis) {
      const auto index = static_cast<float>(at[axis]);
      work->index[axis].push_back(index);
      work->centred[axis].push_back(index - static_cast<float>(window[axis] - 1) / 2);
    }
  }
  for (int axis = 0; axis < 3; ++axis) {
    plan.index[axis] = work->index[axis].data();
    plan.centred[axis] = work->centred[axis].data();
  }
}

void plan_work(const megaslide_attention_shape &shape, PlannedWork *work) {
  Plan &plan = work->plan;
  plan = {};
  plan.batch = shape.batch;
  plan.voxels = plan.taps = 1;
  for (int axis = 0; axis < 3; ++axis) {
    plan.size[axis] = shape.size[axis];
    plan.window[axis] = shape.window[axis];
    plan.voxels *= shape.size[axis];
    plan.taps *= shape.window[axis];
  }
  plan.heads = shape.heads;
  plan.head_dim = shape.head_dim;
  plan.groups = shape.groups;
  plan.extra = shape.extra;
  plan.row = shape.heads * shape.head_dim;
  plan.kind = shape.kind;
  plan.scale = shape.scale;
  const int64_t channels[] = {0, 3, 12, 3 * plan.taps};
  plan.channels = channels[shape.kind];
  plan.capacity = shape.kind == MEGASLIDE_OFFSETS_NONE ? plan.taps : 8 * plan.taps;
  plan_taps(work);
  for (int64_t e = 0; e < padded(plan.extra); ++e) {
    work->iota.push_back(static_cast<int32_t>(e < plan.extra ? e : 0));
  }
  plan.iota = work->iota.data();
}

// One block of scratch per thread, on cache lines of its own.
class ThreadScratch {
 public:
  ThreadScratch(const Plan &plan, int threads)
      : bytes_(static_cast<size_t>(kernels().scratch_bytes(plan))),
        block_(static_cast<char *>(
            ::operator new(bytes_ *static_cast<size_t>(threads), std::align_val_t{kAlign}))) {}
  ~ThreadScratch() { ::operator delete(block_, std::align_val_t{kAlign}); }
  ThreadScratch(const ThreadScratch &) = delete;
  ThreadScratch &operator=(const ThreadScratch &) = delete;

  void *of(int worker) const { return block_ + bytes_ * static_cast<size_t>(worker); }

 private:
  static constexpr size_t kAlign = 64;
  size_t bytes_;
  char *block_;
};

// ---- forward ----------------------------------------------------------------------------------

void run_forward(const Plan &plan, const ForwardArrays &arrays, int threads) {
  const AttentionKernels &kernel = kernels();
  const int64_t blocks = (plan.voxels + kForwardBlock - 1) / kForwardBlock;
  const int64_t items = plan.batch * plan.heads * blocks;
  const ThreadScratch scratch(plan, threads);
  parallel_for(items, threads, [&](int64_t item, int worker) {
    const int64_t first = item % blocks * kForwardBlock;
    const Part part{item / blocks / plan.heads, item / blocks % plan.heads, first,
                    std::min(first + kForwardBlock, plan.voxels)};
    kernel.forward(plan, arrays, part, scratch.of(worker));
  });
}

// ---- backward ---------------------------------------------------------------------------------

void clear_rows(const Plan &plan, int64_t count, int64_t b, int64_t head, float *rows) {
  float *row = rows + b * count * plan.row + head * plan.head_dim;
  for (int64_t n = 0; n < count; ++n, row += plan.row) std::fill_n(row, plan.head_dim, 0.0f);
}

void clear_gradients(const Plan &plan, const megaslide_attention_gradients &grad, int64_t b,
                     int64_t head) {
  clear_rows(plan, plan.voxels, b, head, grad.k);
  clear_rows(plan, plan.voxels, b, head, grad.v);
  if (plan.extra > 0) {
    clear_rows(plan, plan.extra, b, head, grad.extra_k);
    clear_rows(plan, plan.extra, b, head, grad.extra_v);
  }
}

// The heads' own offset gradients of one chunk of queries: [batch, heads, chunk, channels].
struct Partials {
  std::vector<float> floats;
  int64_t chunk;  // queries
};

Partials allocate_partials(const Plan &plan, bool wanted) {
  if (!wanted || plan.groups == plan.heads) return {{}, plan.voxels};
  const int64_t per_query = std::max<int64_t>(1, plan.batch * plan.heads * plan.channels);
  const int64_t chunk = std::clamp<int64_t>(kPartialFloats / per_query, 1, plan.voxels);
  return {std::vector<float>(static_cast<size_t>(per_query * chunk)), chunk};
}

// Adds the heads of each group, in order; item = (b, group).
void add_heads(const Plan &plan, const Partials &partials, int64_t first, int64_t last,
               int64_t item, float *grad_offsets) {
  const int64_t heads = plan.heads / plan.groups, b = item / plan.groups;
  const int64_t group = item % plan.groups, stride = partials.chunk * plan.channels;
  const float *from = partials.floats.data() + (b * plan.heads + group * heads) * stride;
  for (int64_t n = first; n < last; ++n, from += plan.channels) {
    float *to = grad_offsets + ((b * plan.voxels + n) * plan.groups + group) * plan.channels;
    for (int64_t c = 0; c < plan.channels; ++c) {
      float sum = 0.0f;
      for (int64_t head = 0; head < heads; ++head) sum += from[head * stride + c];
      to[c] = sum;
    }
  }
}

void run_backward(const Plan &plan, const BackwardArrays &arrays, int threads) {
  const AttentionKernels &kernel = kernels();
  const ThreadScratch scratch(plan, threads);
  float *grad_offsets = plan.kind == MEGASLIDE_OFFSETS_NONE ? nullptr : arrays.grad.offsets;
  Partials partials = allocate_partials(plan, grad_offsets != nullptr);
  const bool direct = partials.floats.empty();
  for (int64_t first = 0; first < plan.voxels; first += partials.chunk) {
    const int64_t last = std::min(first + partials.chunk, plan.voxels);
    parallel_for(plan.batch * plan.heads, threads, [&](int64_t item, int worker) {
      const Part part{item / plan.heads, item % plan.heads, first, last};
      BackwardArrays own = arrays;
      own.offset_row = direct ? plan.groups * plan.channels : plan.channels;
      if (grad_offsets != nullptr) {
        own.offsets = direct ? grad_offsets + (part.b * plan.voxels * plan.groups + part.head) *
                                                  plan.channels
                             : partials.floats.data() + item * partials.chunk * plan.channels;
      }
      if (first == 0) clear_gradients(plan, arrays.grad, part.b, part.head);
      kernel.backward(plan, own, part, scratch.of(worker));
    });
    if (direct) continue;
    parallel_for(plan.batch * plan.groups, threads, [&](int64_t item, int) {
      add_heads(plan, partials, first, last, item, grad_offsets);
    });
  }
}

template <typename Run>
int32_t planned(const megaslide_attention_shape &shape, const Run &run) {
  try {
    PlannedWork work;
    plan_work(shape, &work);
    run(work.plan);
  } catch (const std::bad_alloc &) {
    return MEGASLIDE_OUT_OF_MEMORY;
  }
  return MEGASLIDE_OK;
}

}  // namespace
}  // namespace megaslide

extern "C" {

int32_t megaslide_attention_forward(const megaslide_attention_shape *shape,
                                    const megaslide_attention_inputs *inputs, float *out,
                                    float *lse) {
  using namespace megaslide;
  const bool given = shape && inputs && (shape->batch == 0 || (out && lse));
  if (!given || !valid_shape(*shape) || !valid_inputs(*shape, *inputs)) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  return planned(*shape, [&](const Plan &plan) {
    run_forward(plan, {*inputs, out, lse}, shape->threads);
  });
}

int32_t megaslide_attention_backward(const megaslide_attention_shape *shape,
                                     const megaslide_attention_inputs *inputs, const float *out,
                                     const float *lse, const float *grad_out,
                                     const megaslide_attention_gradients *gradients) {
  using namespace megaslide;
  const bool given = shape && inputs && gradients &&
                     (shape->batch == 0 || (out && lse && grad_out));
  if (!given || !valid_shape(*shape) || !valid_inputs(*shape, *inputs) ||
      !valid_gradients(*shape, *gradients)) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  return planned(*shape, [&](const Plan &plan) {
    run_backward(plan, {*inputs, out, lse, grad_out, *gradients, nullptr, 0}, shape->threads);
  });
}

}  // extern "C"
