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

#include "bfloat16.h"
#include "instruction_set.h"
#include "megaslide.h"
#include "parallel.h"

namespace megaslide {
namespace {

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

// ---- plan -------------------------------------------------------------------------------------

// A plan and the tables it points to.
struct PlannedWork {
  Plan plan;
  std::vector<float> index[3], centred[3], holds_tap;
  std::vector<int32_t> number, iota, beyond;
};

// Taps whose indices have the same parity on every axis come together: in a window that is not
// deformed much, such taps share no voxel.
void order_taps(PlannedWork *work) {
  const int64_t *window = work->plan.window;
  for (int64_t parity = 0; parity < 8; ++parity) {
    for (int64_t t = parity >> 2; t < window[0]; t += 2) {
      for (int64_t h = parity >> 1 & 1; h < window[1]; h += 2) {
        for (int64_t w = parity & 1; w < window[2]; w += 2) {
          work->number.push_back(static_cast<int32_t>((t * window[1] + h) * window[2] + w));
        }
      }
    }
  }
  work->plan.number = work->number.data();
}

void plan_taps(PlannedWork *work) {
  order_taps(work);
  Plan &plan = work->plan;
  const int64_t *window = plan.window;
  for (int64_t i = 0; i < padded(plan.taps); ++i) {
    const int64_t j = work->number[static_cast<size_t>(std::min(i, plan.taps - 1))];
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

void plan_places(PlannedWork *work) {
  Plan &plan = work->plan;
  const int64_t *grid = plan.grid, *window = plan.window;
  for (int axis = 0; axis < 3; ++axis) {
    const bool mixes =
        plan.kind == MEGASLIDE_OFFSETS_SHIFT && plan.size[axis] > plan.window[axis];
    plan.grid[axis] = plan.window[axis] + (mixes ? 1 : 0);
  }
  const bool rigid = plan.kind <= MEGASLIDE_OFFSETS_SHIFT;
  plan.places = rigid ? window[0] * grid[1] * grid[2] : plan.taps;
  for (int64_t i = 0; i < padded(plan.places); ++i) {
    const bool column = i % grid[2] < window[2], row = i / grid[2] % grid[1] < window[1];
    const bool tap = i < plan.places && (!rigid || (column && row));
    work->holds_tap.push_back(tap ? 1.0f : 0.0f);
  }
  plan.holds_tap = work->holds_tap.data();
  const int64_t cells = grid[0] * grid[1] * grid[2];
  for (int64_t e = 0; e < padded(cells); ++e) {
    const int64_t i = e < cells ? e : 0;
    const int64_t line = i / (grid[1] * grid[2]) * plan.size[1] + i / grid[2] % grid[1];
    work->beyond.push_back(static_cast<int32_t>(line * plan.size[2] + i % grid[2]));
  }
  plan.beyond = work->beyond.data();
}

void plan_tiles(Plan *plan) {
  const int64_t video[3] = {2, 4, 8}, image[3] = {1, 8, 8};
  for (int axis = 0; axis < 3; ++axis) {
    plan->tile[axis] = plan->size[0] > 1 ? video[axis] : image[axis];
    plan->tiles[axis] = (plan->size[axis] + plan->tile[axis] - 1) / plan->tile[axis];
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
  plan.dtype = shape.dtype;
  plan.scale = shape.scale;
  const int64_t channels[] = {0, 3, 12, 3 * plan.taps};
  plan.channels = channels[shape.kind];
  plan.capacity = shape.kind == MEGASLIDE_OFFSETS_NONE ? plan.taps : 8 * plan.taps;
  plan_taps(work);
  plan_places(work);
  plan_tiles(&plan);
  for (int64_t e = 0; e < padded(plan.extra); ++e) {
    work->iota.push_back(static_cast<int32_t>(e < plan.extra ? e : 0));
  }
  plan.iota = work->iota.data();
}

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

// ---- forward ----------------------------------------------------------------------------------

int64_t tile_count(const Plan &plan) { return plan.tiles[0] * plan.tiles[1] * plan.tiles[2]; }

void run_forward(const Plan &plan, const ForwardArrays &arrays, int threads) {
  const Kernels kernel = kernels(plan.dtype);
  const int64_t tiles = tile_count(plan);
  const ThreadScratch scratch(scratch_bytes(plan, kernel), threads);
  parallel_for(plan.batch * plan.heads * tiles, threads, [&](int64_t item, int worker) {
    const int64_t row = item / tiles;
    const Part part{row / plan.heads, row % plan.heads, item % tiles};
    void *own = scratch.of(worker);
    if (kernel.first && kernel.first->forward(plan, arrays, part, own)) return;
    kernel.any->forward(plan, arrays, part, own);
  });
}

// ---- backward ---------------------------------------------------------------------------------

// What the queries of one batch element and head add to: fp32, and rows that follow each other.
struct Sums {
  float *k, *v, *extra_k, *extra_v, *end;
};

Sums sums_at(const Plan &plan, void *block) {
  const int64_t rows = plan.voxels * plan.head_dim, extra = plan.extra * plan.head_dim;
  auto *at = static_cast<float *>(block);
  return {at, at + rows, at + 2 * rows, at + 2 * rows + extra, at + 2 * (rows + extra)};
}

int64_t sum_bytes(const Plan &plan) {
  return 2 * (plan.voxels + plan.extra) * plan.head_dim * static_cast<int64_t>(sizeof(float));
}

// Rounds `count` rows of a batch element and head to the gradient, an array of T like q or extra_k.
template <typename T>
void round_rows(const Plan &plan, int64_t count, const Part &part, const float *from, void *to) {
  for (int64_t n = 0; n < count; ++n, from += plan.head_dim) {
    const int64_t row = (part.b * count + n) * plan.row + part.head * plan.head_dim;
    narrow(from, plan.head_dim, static_cast<T *>(to) + row);
  }
}

template <typename T>
void round_sums(const Plan &plan, const Part &part, const Sums &sums,
                const megaslide_attention_gradients &grad) {
  round_rows<T>(plan, plan.voxels, part, sums.k, grad.k);
  round_rows<T>(plan, plan.voxels, part, sums.v, grad.v);
  round_rows<T>(plan, plan.extra, part, sums.extra_k, grad.extra_k);
  round_rows<T>(plan, plan.extra, part, sums.extra_v, grad.extra_v);
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

void run_backward(const Plan &plan, const BackwardArrays &arrays,
                  const megaslide_attention_gradients &grad, int threads) {
  const Kernels kernel = kernels(plan.dtype);
  const int64_t items = plan.batch * plan.heads, tiles = tile_count(plan);
  const bool wanted = plan.kind != MEGASLIDE_OFFSETS_NONE && grad.offsets != nullptr;
  threads = static_cast<int>(std::clamp<int64_t>(items, 1, threads));
  const ThreadScratch scratch(scratch_bytes(plan, kernel), threads);
  const ThreadScratch all_sums(sum_bytes(plan), threads);
  const ThreadScratch offsets(kTileQueries * plan.channels * int64_t{sizeof(float)}, threads);
  Progress progress(items);
  parallel_for(items, threads, [&](int64_t item, int worker) {
    Part part{item / plan.heads, item % plan.heads, 0};
    const Sums sums = sums_at(plan, all_sums.of(worker));
    std::fill(sums.k, sums.end, 0.0f);
    BackwardArrays own = arrays;
    own.grad_k = sums.k, own.grad_v = sums.v;
    own.grad_extra_k = sums.extra_k, own.grad_extra_v = sums.extra_v;
    own.grad_offsets = wanted ? static_cast<float *>(offsets.of(worker)) : nullptr;
    for (; part.tile < tiles; ++part.tile) {
      const bool done = kernel.first && kernel.first->backward(plan, own, part, scratch.of(worker));
      if (!done) kernel.any->backward(plan, own, part, scratch.of(worker));
      if (!wanted) continue;
      if (part.head % (plan.heads / plan.groups) > 0) progress.await(item - 1, part.tile + 1);
      add_offsets(plan, part, own.grad_offsets, grad.offsets);
      progress.finish(item, part.tile + 1);
    }
    (plan.dtype == MEGASLIDE_FLOAT32 ? round_sums<float> : round_sums<Bfloat16>)(plan, part, sums,
                                                                                 grad);
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
    run_forward(plan, {*inputs, out, lse}, shape->threads);
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
    const BackwardArrays arrays = {*inputs, out,     lse,     grad_out, gradients->q,
                                   nullptr, nullptr, nullptr, nullptr,  nullptr};
    run_backward(plan, arrays, *gradients, shape->threads);
  });
}

}  // extern "C"
