// 3D-DSA behind the C interface: checks, memory, and how the work is divided among threads.
//
// Forward: tiles of queries of one batch element and head, all independent. Backward: one item per
// batch element and head, whose queries add to sums of their own, in the order of tiles; so results
// are the same bits for any number of threads. A group's offsets get their gradient from several
// heads, in the order of heads: a head follows the one before it, tile by tile.
#include "deformable_attention.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include "attention_plan.h"
#include "bfloat16.h"
#include "instruction_set.h"
#include "megaslide.h"
#include "parallel.h"

namespace megaslide {
namespace {

constexpr int64_t kTilesPerThread = 8;  // about, where there are so many

// Kernels that take everything, and those that are asked first, or null.
struct Kernels {
  const AttentionKernels *any, *first;
};

Kernels kernels(int32_t dtype) {
#if defined(MEGASLIDE_AMX_KERNELS)
  if (instruction_set() >= InstructionSet::x86_64_v4_amx && dtype == MEGASLIDE_BFLOAT16) {
    return {&x86_64_v4_bf16::attention_kernels, &x86_64_v4_amx::attention_kernels};
  }
#endif
#if defined(MEGASLIDE_X86_KERNELS)
  if (instruction_set() >= InstructionSet::x86_64_v4_bf16 && dtype == MEGASLIDE_BFLOAT16) {
    return {&x86_64_v4_bf16::attention_kernels, nullptr};
  }
  if (instruction_set() >= InstructionSet::x86_64_v4) {
    return {&x86_64_v4::attention_kernels, nullptr};
  }
  if (instruction_set() >= InstructionSet::x86_64_v3) {
    return {&x86_64_v3::attention_kernels, nullptr};
  }
#else
  (void)dtype;
#endif
  return {&baseline::attention_kernels, nullptr};
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
  const bool dtype = shape.dtype == MEGASLIDE_FLOAT32 || shape.dtype == MEGASLIDE_BFLOAT16;
  return sizes && groups && dtype && shape.kind >= MEGASLIDE_OFFSETS_NONE &&
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

// ---- memory -----------------------------------------------------------------------------------

// A block per thread, on cache lines of its own.
class ThreadScratch {
 public:
  ThreadScratch(int64_t bytes, int threads)
      : bytes_((static_cast<size_t>(bytes) + kAlign - 1) / kAlign * kAlign),
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

int64_t scratch_bytes(const Plan &plan, const Kernels &kernels) {
  const int64_t any = kernels.any->scratch_bytes(plan);
  return kernels.first == nullptr ? any : std::max(any, kernels.first->scratch_bytes(plan));
}

// ---- rows of one head -------------------------------------------------------------------------

template <typename T>
HeadRows<T> rows_at(const Plan &plan, void *block) {
  const int64_t rows = plan.voxels * plan.head_dim, extra = plan.extra * plan.head_dim;
  auto *at = static_cast<T *>(block);
  return {at, at + rows, at + 2 * rows, at + 2 * rows + extra, at + 2 * (rows + extra)};
}

int64_t head_bytes(const Plan &plan, int64_t element) {
  return 2 * (plan.voxels + plan.extra) * plan.head_dim * element;
}

int64_t element_bytes(const Plan &plan) { return plan.dtype == MEGASLIDE_FLOAT32 ? 4 : 2; }

// Where row n of a batch element and head begins in an array with `count` rows for each.
int64_t row_of(const Plan &plan, const Part &part, int64_t count, int64_t n) {
  return (part.b * count + n) * plan.row + part.head * plan.head_dim;
}

// Copies rows [first, last) of `count`.
template <typename T>
void gather_rows(const Plan &plan, const Part &part, const void *from, int64_t count,
                 int64_t first, int64_t last, T *to) {
  for (int64_t n = first; n < last; ++n) {
    const T *row = static_cast<const T *>(from) + row_of(plan, part, count, n);
    std::copy_n(row, plan.head_dim, to + n * plan.head_dim);
  }
}

// One share of the rows of k and v, and with the first all extra keys.
struct Share {
  int64_t number, of;
};

template <typename T>
void gather_keys(const Plan &plan, const Part &part, const Share &share,
                 const megaslide_attention_inputs &in, void *block) {
  const HeadRows<T> to = rows_at<T>(plan, block);
  const int64_t first = plan.voxels * share.number / share.of;
  const int64_t last = plan.voxels * (share.number + 1) / share.of;
  gather_rows(plan, part, in.k, plan.voxels, first, last, to.k);
  gather_rows(plan, part, in.v, plan.voxels, first, last, to.v);
  const int64_t extra = share.number == 0 ? plan.extra : 0;
  gather_rows(plan, part, in.extra_k, plan.extra, 0, extra, to.extra_k);
  gather_rows(plan, part, in.extra_v, plan.extra, 0, extra, to.extra_v);
}

void gather_any(const Plan &plan, const Part &part, const Share &share,
                const megaslide_attention_inputs &in, void *block) {
  const auto gather = plan.dtype == MEGASLIDE_FLOAT32 ? gather_keys<float> : gather_keys<Bfloat16>;
  gather(plan, part, share, in, block);
}

HeadRows<const void> keys_at(const Plan &plan, void *block) {
  if (plan.dtype == MEGASLIDE_FLOAT32) {
    const auto rows = rows_at<float>(plan, block);
    return {rows.k, rows.v, rows.extra_k, rows.extra_v, rows.end};
  }
  const auto rows = rows_at<Bfloat16>(plan, block);
  return {rows.k, rows.v, rows.extra_k, rows.extra_v, rows.end};
}

// ---- forward ----------------------------------------------------------------------------------

int64_t tile_count(const Plan &plan) { return plan.tiles[0] * plan.tiles[1] * plan.tiles[2]; }

// As many heads at a time as give all threads several tiles.
void run_forward(const Plan &plan, const megaslide_attention_inputs &in, void *out, float *lse,
                 int threads) {
  const Kernels kernel = kernels(plan.dtype);
  const int64_t tiles = tile_count(plan), heads = plan.batch * plan.heads;
  const int64_t wanted = std::max<int64_t>(kTilesPerThread * threads / tiles, 1);
  const int64_t together = std::min(wanted, heads);
  const ThreadScratch scratch(scratch_bytes(plan, kernel), threads);
  const ThreadScratch keys(head_bytes(plan, element_bytes(plan)), static_cast<int>(together));
  const auto part_of = [&](int64_t head, int64_t tile) {
    return Part{head / plan.heads, head % plan.heads, tile};
  };
  for (int64_t first = 0; first < heads; first += together) {
    const int64_t count = std::min(together, heads - first);
    parallel_for(count * threads, threads, [&](int64_t item, int) {
      void *block = keys.of(static_cast<int>(item / threads));
      gather_any(plan, part_of(first + item / threads, 0), {item % threads, threads}, in, block);
    });
    parallel_for(count * tiles, threads, [&](int64_t item, int worker) {
      const Part part = part_of(first + item / tiles, item % tiles);
      const HeadRows<const void> own = keys_at(plan, keys.of(static_cast<int>(item / tiles)));
      const ForwardArrays arrays = {in.q, in.offsets, own, out, lse};
      void *block = scratch.of(worker);
      if (kernel.first && kernel.first->forward(plan, arrays, part, block)) return;
      kernel.any->forward(plan, arrays, part, block);
    });
  }
}

// ---- backward ---------------------------------------------------------------------------------

// Rounds `count` rows of a batch element and head to the gradient, an array of T like q or extra_k.
template <typename T>
void round_rows(const Plan &plan, const Part &part, const float *from, int64_t count, void *to) {
  for (int64_t n = 0; n < count; ++n, from += plan.head_dim) {
    narrow(from, plan.head_dim, static_cast<T *>(to) + row_of(plan, part, count, n));
  }
}

template <typename T>
void round_sums(const Plan &plan, const Part &part, const HeadRows<float> &sums,
                const megaslide_attention_gradients &grad) {
  round_rows<T>(plan, part, sums.k, plan.voxels, grad.k);
  round_rows<T>(plan, part, sums.v, plan.voxels, grad.v);
  round_rows<T>(plan, part, sums.extra_k, plan.extra, grad.extra_k);
  round_rows<T>(plan, part, sums.extra_v, plan.extra, grad.extra_v);
}

// The gradient of a tile's offsets by one head: written by the first head of a group, and added to
// by the others.
void add_offsets(const Plan &plan, const Part &part, const float *from, float *grad_offsets) {
  const int64_t heads = plan.heads / plan.groups, group = part.head / heads;
  const bool first = part.head % heads == 0;
  const Tile tile = tile_at(plan, part.tile);
  for (int64_t i = 0; i < tile.count; ++i, from += plan.channels) {
    const int64_t n = query_at(plan, tile, i).n;
    float *to = grad_offsets + ((part.b * plan.voxels + n) * plan.groups + group) * plan.channels;
    for (int64_t c = 0; c < plan.channels; ++c) to[c] = first ? from[c] : to[c] + from[c];
  }
}

// Tiles that each head has added to its group's offsets. Heads are begun in order, so the one
// before is done or has a thread.
class Progress {
 public:
  explicit Progress(int64_t heads) : tiles_(static_cast<size_t>(heads)) {}

  void await(int64_t head, int64_t tiles) const {
    while (of(head).load(std::memory_order_acquire) < tiles) std::this_thread::yield();
  }
  void finish(int64_t head, int64_t tiles) {
    tiles_[static_cast<size_t>(head)].store(tiles, std::memory_order_release);
  }

 private:
  const std::atomic<int64_t> &of(int64_t head) const { return tiles_[static_cast<size_t>(head)]; }

  std::vector<std::atomic<int64_t>> tiles_;
};

void run_backward(const Plan &plan, const megaslide_attention_inputs &in,
                  const BackwardArrays &arrays, const megaslide_attention_gradients &grad,
                  int threads) {
  const Kernels kernel = kernels(plan.dtype);
  const int64_t heads = plan.batch * plan.heads, tiles = tile_count(plan);
  const bool wanted = plan.kind != MEGASLIDE_OFFSETS_NONE && grad.offsets != nullptr;
  threads = static_cast<int>(std::clamp<int64_t>(heads, 1, threads));
  const ThreadScratch scratch(scratch_bytes(plan, kernel), threads);
  const ThreadScratch keys(head_bytes(plan, element_bytes(plan)), threads);
  const ThreadScratch sums(head_bytes(plan, sizeof(float)), threads);
  const ThreadScratch offsets(kTileQueries * plan.channels * int64_t{sizeof(float)}, threads);
  Progress progress(heads);
  parallel_for(heads, threads, [&](int64_t head, int worker) {
    Part part{head / plan.heads, head % plan.heads, 0};
    gather_any(plan, part, {0, 1}, in, keys.of(worker));
    BackwardArrays own = arrays;
    own.keys = keys_at(plan, keys.of(worker));
    own.grad = rows_at<float>(plan, sums.of(worker));
    own.grad_offsets = wanted ? static_cast<float *>(offsets.of(worker)) : nullptr;
    std::fill(own.grad.k, own.grad.end, 0.0f);
    for (; part.tile < tiles; ++part.tile) {
      void *block = scratch.of(worker);
      const bool done = kernel.first && kernel.first->backward(plan, own, part, block);
      if (!done) kernel.any->backward(plan, own, part, block);
      if (!wanted) continue;
      if (part.head % (plan.heads / plan.groups) > 0) progress.await(head - 1, part.tile + 1);
      add_offsets(plan, part, own.grad_offsets, grad.offsets);
      progress.finish(head, part.tile + 1);
    }
    const auto round = plan.dtype == MEGASLIDE_FLOAT32 ? round_sums<float> : round_sums<Bfloat16>;
    round(plan, part, own.grad, grad);
  });
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
                                    const megaslide_attention_inputs *inputs, void *out,
                                    float *lse) {
  using namespace megaslide;
  const bool given = shape && inputs && (shape->batch == 0 || (out && lse));
  if (!given || !valid_shape(*shape) || !valid_inputs(*shape, *inputs)) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  return planned(*shape, [&](const Plan &plan) {
    run_forward(plan, *inputs, out, lse, shape->threads);
  });
}

int32_t megaslide_attention_backward(const megaslide_attention_shape *shape,
                                     const megaslide_attention_inputs *inputs, const void *out,
                                     const float *lse, const void *grad_out,
                                     const megaslide_attention_gradients *gradients) {
  using namespace megaslide;
  const bool given = shape && inputs && gradients &&
                     (shape->batch == 0 || (out && lse && grad_out));
  if (!given || !valid_shape(*shape) || !valid_inputs(*shape, *inputs) ||
      !valid_gradients(*shape, *gradients)) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  return planned(*shape, [&](const Plan &plan) {
    const BackwardArrays arrays = {inputs->q, inputs->offsets, {}, out, lse, grad_out,
                                   gradients->q, {}, nullptr};
    run_backward(plan, *inputs, arrays, *gradients, shape->threads);
  });
}

}  // extern "C"
