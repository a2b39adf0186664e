// The plan of a call: what is the same for all its queries, and the tables that kernels read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "deformable_attention.h"

namespace megaslide {
namespace {

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

}  // namespace
}  // namespace megaslide
