// Trilinear sums over a rigid grid of taps: all taps share one fractional part, so axis after axis
// is interpolated once for the grid, (kt+1)(kh+1)(kw+1) voxels in all, and nothing is gathered.
// Without offsets, or along an axis that the window fills, an axis is only copied.
//
// Taps stand where the lower corners of their cells do, in the grid of voxels without its last
// plane: neighbours along an axis are the same distance apart everywhere, and each axis is one loop
// over whole vectors. Places in the last row and column of an axis that mixes hold no tap: what a
// sum leaves there is dropped, and their weight is 0. The neighbour of a list's last voxel is
// whatever memory holds behind it, perhaps NaN, which no weight of 0 makes harmless: it is not used.
#pragma once

#include <cstdint>

#include "sampling.h"

namespace megaslide {
namespace {

// What interpolating one list leaves behind, in scratch memory of grid_floats().
struct Grid {
  float *along_w;   // [grid] interpolated along w
  float *along_hw;  // [grid] and along h
};

inline int64_t grid_cells(const Plan &plan) { return plan.grid[0] * plan.grid[1] * plan.grid[2]; }

// Number of its first voxel.
inline int64_t first_of_grid(const Plan &plan, const Taps &taps) {
  return (taps.start[0] * plan.size[1] + taps.start[1]) * plan.size[2] + taps.start[2];
}

// Behind the grid follow zeros: a row, which its last row finds as its upper neighbour.
inline int64_t grid_floats(const Plan &plan) {
  return grid_cells(plan) + padded(plan.grid[2]) + kSlack;
}

// The rows along w of a grid in a list; one long row where they follow each other without gaps.
struct GridRows {
  int64_t planes, rows, width;
};

inline GridRows grid_rows(const Plan &plan, const Taps &taps) {
  const int64_t *grid = plan.grid;
  const bool whole = taps.step[1] == grid[2] && taps.step[0] == grid[1] * grid[2];
  if (whole) return {1, 1, grid_cells(plan)};
  return {grid[0], grid[1], grid[2]};
}

// x in the first `count` lanes, 0 in the others.
inline Floats first_lanes(int64_t count, Floats x) {
  typedef Vec<kLanes, int32_t> Indices;
  Indices lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < Indices{} + static_cast<int32_t>(count < kLanes ? count : kLanes) ? x : Floats{};
}

inline void zero_behind(const Plan &plan, int64_t cells, float *grid) {
  for (int64_t i = 0; i < padded(plan.grid[2]) + kPad; ++i) grid[cells + i] = 0.0f;
}

// sample[place] = trilinear sum of list[] at the place's tap.
inline void interpolate_grid(const Plan &plan, const Taps &taps, const float *list,
                             const Grid &grid, float *sample) {
  const GridRows rows = grid_rows(plan, taps);
  const Floats part_t = broadcast(taps.part[0]), part_h = broadcast(taps.part[1]),
               part_w = broadcast(taps.part[2]);
  float *to = grid.along_w;
  for (int64_t t = 0; t < rows.planes; ++t) {
    for (int64_t h = 0; h < rows.rows; ++h, to += rows.width) {
      const float *row = list + taps.at + t * taps.step[0] + h * taps.step[1];
      for (int64_t c = 0; c < rows.width; c += kLanes) {
        const Floats low = load<kLanes>(row + c);
        store<kLanes>(to + c, mixes(plan, 2) ? mix(low, load<kLanes>(row + c + 1), part_w) : low);
      }
    }
  }
  zero_behind(plan, grid_cells(plan) - (mixes(plan, 2) ? 1 : 0), grid.along_w);
  const int64_t width = plan.grid[2], plane = plan.grid[1] * width;
  for (int64_t i = 0; i < grid_cells(plan); i += kLanes) {
    const float *from = grid.along_w + i;
    const Floats low = load<kLanes>(from);
    store<kLanes>(grid.along_hw + i,
                  mixes(plan, 1) ? mix(low, load<kLanes>(from + width), part_h) : low);
  }
  zero_behind(plan, grid_cells(plan), grid.along_hw);
  for (int64_t i = 0; i < plan.places; i += kLanes) {
    const float *from = grid.along_hw + i;
    const Floats low = load<kLanes>(from);
    store<kLanes>(sample + i, mixes(plan, 0) ? mix(low, load<kLanes>(from + plane), part_t) : low);
  }
}

// Sums of the gradient of a grid's scores times their derivative along each axis.
struct Pull {
  Floats along[3];
};

// The adjoint along one axis that mixes: voxel i gets (1 - part) of tap i and part of tap i - 1.
inline Floats adjoint(Floats own, Floats before, Floats part) {
  return own + part * (before - own);
}

// by_t[voxel] = the adjoint of the interpolation along t, of value[place].
inline void spread_t(const Plan &plan, const Taps &taps, const float *value, float *by_t) {
  const int64_t plane = plan.grid[1] * plan.grid[2];
  const Floats part = broadcast(taps.part[0]);
  for (int64_t t = 0; t < plan.grid[0]; ++t) {
    for (int64_t i = t * plane; i < (t + 1) * plane; i += kLanes) {
      const Floats own = t < plan.window[0] ? load<kLanes>(value + i) : Floats{};
      const Floats before = t > 0 ? load<kLanes>(value + i - plane) : Floats{};
      store<kLanes>(by_t + i, mixes(plan, 0) ? adjoint(own, before, part) : own);
    }
  }
}

// The gradient of the coordinates along t and h, of a grid that `value` and `by_t` weigh.
inline void pull_th(const Plan &plan, const Grid &grid, const float *value, const float *by_t,
                    Pull *pull) {
  const int64_t width = plan.grid[2], plane = plan.grid[1] * width;
  for (int64_t i = 0; i < plan.places && mixes(plan, 0); i += kLanes) {
    const float *at = grid.along_hw + i;
    const Floats slope = load<kLanes>(at + plane) - load<kLanes>(at);
    pull->along[0] += first_lanes(plan.places - i, load<kLanes>(value + i) * slope);
  }
  for (int64_t i = 0; i < grid_cells(plan) && mixes(plan, 1); i += kLanes) {
    const float *at = grid.along_w + i;
    const Floats slope = load<kLanes>(at + width) - load<kLanes>(at);
    pull->along[1] += first_lanes(grid_cells(plan) - i, load<kLanes>(by_t + i) * slope);
  }
}

// list[] = value[place] times the trilinear weights of its tap, in the rows of the list that the
// grid reads, kPad zeros after each: rows are written in order. Where `grid` is given, adds to
// `pull` the gradient of the coordinates by the list that it was made from.
inline void spread_grid(const Plan &plan, const Taps &taps, const float *value, const Grid *grid,
                        const float *from, float *work, float *list, Pull *pull) {
  const GridRows rows = grid_rows(plan, taps);
  const int64_t width = plan.grid[2], before = padded(width);
  float *by_t = work + before, *by_h = by_t + grid_floats(plan) + kPad;
  for (int64_t i = 0; i < before; ++i) by_t[i - before] = 0.0f;
  for (int i = 0; i < kPad; ++i) by_h[i - kPad] = 0.0f;
  spread_t(plan, taps, value, by_t);
  if (grid != nullptr) pull_th(plan, *grid, value, by_t, pull);
  const Floats part_h = broadcast(taps.part[1]), part_w = broadcast(taps.part[2]);
  for (int64_t i = 0; i < grid_cells(plan); i += kLanes) {
    const Floats own = load<kLanes>(by_t + i);
    store<kLanes>(by_h + i,
                  mixes(plan, 1) ? adjoint(own, load<kLanes>(by_t + i - width), part_h) : own);
  }
  const float *line = by_h;
  for (int64_t t = 0; t < rows.planes; ++t) {
    for (int64_t h = 0; h < rows.rows; ++h, line += rows.width) {
      const int64_t row = taps.at + t * taps.step[0] + h * taps.step[1];
      for (int64_t c = 0; c < rows.width; c += kLanes) {
        const int64_t left = rows.width - c;
        const Floats own = load<kLanes>(line + c);
        const Floats x = mixes(plan, 2) ? adjoint(own, load<kLanes>(line + c - 1), part_w) : own;
        store<kLanes>(list + row + c, first_lanes(left, x));
        if (grid == nullptr || !mixes(plan, 2)) continue;
        const Floats slope = load<kLanes>(from + row + c + 1) - load<kLanes>(from + row + c);
        pull->along[2] += first_lanes(left - 1, own * slope);
      }
    }
  }
}

}  // namespace
}  // namespace megaslide
