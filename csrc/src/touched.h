// The voxels that the taps of one deformed window touch, instead of the whole box around them.
//
// A box around a stretched and sheared window is half empty, and every row in its list costs
// head_dim. Along w the touched voxels of a box's line are one run: the list holds the runs one
// after the other, and numbers over the list are copied to their places in the box and back.
#pragma once

#include <cstdint>

#include "rigid.h"
#include "sampling.h"

namespace megaslide {
namespace {

constexpr int64_t kLongestLine = 64;  // bits of a line's mask

struct Touched {
  uint64_t *lines;      // [lines of the box] bit w: voxel w is touched
  int32_t *list, *box;  // [runs + 1] where a run begins in the list and in the box
  int64_t runs;         // 0: a rigid grid, whose list is the box
  int64_t cells;        // of the box
};

// Lines of a box that holds at most `capacity` voxels, two at least along w.
inline int64_t most_lines(const Plan &plan) { return plan.capacity / 2 + 1; }

inline void mark_lines(const Plan &plan, const Box &box, const Taps &taps, uint64_t *lines) {
  const int64_t ts = box.end[0] - box.low[0], hs = box.end[1] - box.low[1];
  for (int64_t i = 0; i < ts * hs; ++i) lines[i] = 0;
  const int32_t *t = taps.cell[0], *h = taps.cell[1], *w = taps.cell[2];
  for (int64_t j = 0; j < plan.taps; ++j) {
    lines[(t[j] - box.low[0]) * hs + h[j] - box.low[1]] |= uint64_t{3} << (w[j] - box.low[2]);
  }
  // Upper corners along h, then along t; an axis of length 1 has one line and no upper corner.
  for (int64_t i = ts * hs - 1; i > 0; --i) lines[i] |= i % hs == 0 ? 0 : lines[i - 1];
  for (int64_t i = ts * hs - 1; i >= hs; --i) lines[i] |= lines[i - hs];
}

// Lists the runs of the box. Returns the length of the list.
inline int64_t list_runs(const Plan &plan, const Box &box, Touched *touched, int32_t *voxel) {
  typedef Vec<kLanes, int32_t> Indices;
  Indices lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int64_t hs = box.end[1] - box.low[1], ws = box.end[2] - box.low[2];
  int64_t count = 0;
  touched->runs = 0;
  for (int64_t i = 0; i < (box.end[0] - box.low[0]) * hs; ++i) {
    const uint64_t line = touched->lines[i];
    if (line == 0) continue;
    const int64_t from = __builtin_ctzll(line), run = 64 - __builtin_clzll(line) - from;
    const int64_t t = box.low[0] + i / hs, h = box.low[1] + i % hs;
    const int64_t first = (t * plan.size[1] + h) * plan.size[2] + box.low[2] + from;
    for (int64_t j = 0; j < run; j += kLanes) {
      store<kLanes>(voxel + count + j, lane + static_cast<int32_t>(first + j));
    }
    touched->list[touched->runs] = static_cast<int32_t>(count);
    touched->box[touched->runs++] = static_cast<int32_t>(i * ws + from);
    count += run;
  }
  touched->list[touched->runs] = static_cast<int32_t>(count);
  return count;
}

// A rigid grid's list is the grid. Returns its length.
inline int64_t take_grid(const Plan &plan, Taps *taps, Touched *touched) {
  taps->at = 0;
  taps->step[0] = plan.grid[1] * plan.grid[2];
  taps->step[1] = plan.grid[2];
  taps->step[2] = 1;
  touched->runs = 0;
  touched->cells = grid_cells(plan);
  return touched->cells;
}

// One query's list, padded with its first voxel so that products may run over whole vectors.
// Returns its length without the padding.
inline int64_t list_voxels(const Plan &plan, Taps *taps, Touched *touched, int32_t *voxel) {
  Box box = empty_box();
  enclose(plan, *taps, &box);
  int64_t count = touched->cells = volume(box, 8 * plan.taps);
  touched->runs = 0;
  const bool lines = plan.size[2] > 1 && box.end[2] - box.low[2] <= kLongestLine;
  if (count > 8 * plan.taps) {
    count = touched->cells = 8 * plan.taps;
    list_corners(plan, taps, voxel);
  } else {
    find_in_box(plan, box, taps);
    if (lines) {
      mark_lines(plan, box, *taps, touched->lines);
      count = list_runs(plan, box, touched, voxel);
    } else {
      list_box(plan, box, voxel);
    }
  }
  if (count == touched->cells) {  // the list is the box
    touched->runs = 1;
    touched->list[0] = touched->box[0] = 0;
    touched->list[1] = static_cast<int32_t>(count);
  }
  for (int64_t e = count; e < padded(count); ++e) voxel[e] = voxel[0];
  return count;
}

// Copies whole vectors, in order: what one run leaves beyond its end, the next overwrites.
inline void copy_runs(const Touched &touched, const int32_t *from_at, const int32_t *to_at,
                      const float *from, float *to) {
  for (int64_t run = 0; run < touched.runs; ++run) {
    const int64_t length = touched.list[run + 1] - touched.list[run];
    const float *x = from + from_at[run];
    float *y = to + to_at[run];
    for (int64_t i = 0; i < length; i += kLanes) store<kLanes>(y + i, load<kLanes>(x + i));
  }
}

// Numbers over the list as numbers over the box: themselves, or in `box`.
inline const float *place(const Touched &touched, const float *list, float *box) {
  if (touched.runs == 0) return list;
  copy_runs(touched, touched.list, touched.box, list, box);
  return box;
}

// Where numbers over the box go: to the list, or to `box`, from which pack() moves them.
inline float *box_or(const Touched &touched, float *list, float *box) {
  return touched.runs == 0 ? list : box;
}

// Zeros fill the list's padding. What lies behind the list is overwritten.
inline void pack(const Touched &touched, const float *box, float *list) {
  if (touched.runs == 0) return;
  copy_runs(touched, touched.box, touched.list, box, list);
  const int64_t count = touched.list[touched.runs];
  for (int64_t e = count; e < padded(count); ++e) list[e] = 0.0f;
}

}  // namespace
}  // namespace megaslide
