// Trilinear sums over a rigid grid of taps: all taps share one fractional part, so axis after axis
// is interpolated once for the grid, (kt+1)(kh+1)(kw+1) voxels in all, and nothing is gathered.
// Without offsets, or along an axis that the window fills, an axis is only copied.
//
// Grids are kept as rows along w, `pitch` floats apart; lanes beyond kw hold anything.
#pragma once

#include <cstdint>

#include "sampling.h"

namespace megaslide {
namespace {

// What interpolating one list leaves behind, in scratch memory.
struct Grid {
  float *along_w;   // [kt+1, kh+1, pitch] interpolated along w
  float *along_hw;  // [kt+1, kh, pitch] and along h
};

struct GridShape {
  int64_t taps[3], voxels[3], pitch;
};

inline GridShape grid_shape(const Plan &plan) {
  GridShape shape = {};
  for (int axis = 0; axis < 3; ++axis) {
    shape.taps[axis] = plan.window[axis];
    shape.voxels[axis] = plan.window[axis] + (mixes(plan, axis) ? 1 : 0);
  }
  shape.pitch = padded(plan.window[2]);
  return shape;
}

inline int64_t grid_floats(const Plan &plan) {
  const GridShape shape = grid_shape(plan);
  return shape.voxels[0] * shape.voxels[1] * (shape.pitch + kPad) + kSlack;
}

// The lanes of x that are columns of the grid; 0 in the others.
inline Floats columns_of(const GridShape &shape, int64_t column, Floats x) {
  typedef Vec<kLanes, int32_t> Indices;
  Indices lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < Indices{} + static_cast<int32_t>(shape.taps[2] - column) ? x : Floats{};
}

// Rows of the grid are packed in an array over taps, whose last row alone must not be overrun.
inline void store_columns(const GridShape &shape, int64_t column, bool last, Floats x, float *to) {
  if (!last) return store<kLanes>(to, x);
  const int64_t left = shape.taps[2] - column;
  for (int i = 0; i < kLanes && i < left; ++i) to[i] = x[i];
}

inline void interpolate_w(const Plan &plan, const GridShape &shape, const Taps &taps,
                          const float *list, float *to) {
  const Floats part = broadcast(taps.part[2]);
  for (int64_t t = 0; t < shape.voxels[0]; ++t) {
    for (int64_t h = 0; h < shape.voxels[1]; ++h) {
      const float *row = list + taps.at + t * taps.step[0] + h * taps.step[1];
      for (int64_t c = 0; c < shape.pitch; c += kLanes, to += kLanes) {
        const Floats low = load<kLanes>(row + c);
        store<kLanes>(to, mixes(plan, 2) ? mix(low, load<kLanes>(row + c + 1), part) : low);
      }
    }
  }
}

// sample[j] = trilinear sum of list[] at tap j.
inline void interpolate_grid(const Plan &plan, const Taps &taps, const float *list,
                             const Grid &grid, float *sample) {
  const GridShape shape = grid_shape(plan);
  const int64_t plane = shape.voxels[1] * shape.pitch, kept = shape.taps[1] * shape.pitch;
  interpolate_w(plan, shape, taps, list, grid.along_w);
  const Floats part_h = broadcast(taps.part[1]), part_t = broadcast(taps.part[0]);
  for (int64_t t = 0; t < shape.voxels[0]; ++t) {
    const float *from = grid.along_w + t * plane;
    float *to = grid.along_hw + t * kept;
    for (int64_t c = 0; c < kept; c += kLanes) {
      const Floats low = load<kLanes>(from + c);
      const bool mixed = mixes(plan, 1);
      store<kLanes>(to + c, mixed ? mix(low, load<kLanes>(from + c + shape.pitch), part_h) : low);
    }
  }
  const int64_t rows = shape.taps[0] * shape.taps[1];
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < shape.pitch; c += kLanes) {
      const float *from = grid.along_hw + row * shape.pitch + c;
      const Floats low = load<kLanes>(from);
      const Floats x = mixes(plan, 0) ? mix(low, load<kLanes>(from + kept), part_t) : low;
      store_columns(shape, c, row + 1 == rows, x, sample + row * shape.taps[2] + c);
    }
  }
}

// Sums of the gradient of a grid's scores times their derivative along each axis.
struct Pull {
  Floats along[3];
};

// The adjoint along one axis that mixes: voxel i gets (1 - part) of tap i and part of tap i - 1.
inline Floats adjoint(const float *from, int64_t stride, bool first, bool last, Floats part) {
  const Floats own = last ? Floats{} : load<kLanes>(from);
  const Floats before = first ? Floats{} : load<kLanes>(from - stride);
  return own + part * (before - own);
}

// list[] = value[j] times the trilinear weights of tap j, in the rows of the list that the grid
// reads, kSlack zeros after each: rows are written in order. Where `grid` is given, adds to `pull`
// the gradient of the coordinates by the list that it was made from.
inline void spread_grid(const Plan &plan, const Taps &taps, const float *value, const Grid *grid,
                        const float *from, float *work, float *list, Pull *pull) {
  const GridShape shape = grid_shape(plan);
  const int64_t pitch = shape.pitch, kept = shape.taps[1] * pitch;
  const int64_t plane = shape.voxels[1] * pitch, rows = shape.taps[0] * shape.taps[1];
  float *values = work, *by_t = values + rows * pitch;
  float *line = by_t + kept + kPad;  // one row, with zeros around it
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < pitch; c += kLanes) {
      const Floats x = columns_of(shape, c, load<kLanes>(value + row * shape.taps[2] + c));
      store<kLanes>(values + row * pitch + c, x);
      if (grid == nullptr || !mixes(plan, 0)) continue;
      const float *at = grid->along_hw + row * pitch + c;
      pull->along[0] += columns_of(shape, c, x * (load<kLanes>(at + kept) - load<kLanes>(at)));
    }
  }
  const Floats part_t = broadcast(taps.part[0]), part_h = broadcast(taps.part[1]),
               part_w = broadcast(taps.part[2]);
  for (int i = 0; i < kPad; ++i) line[i - kPad] = line[pitch + i] = 0.0f;
  for (int64_t t = 0; t < shape.voxels[0]; ++t) {
    for (int64_t c = 0; c < kept; c += kLanes) {
      const float *at = values + t * kept + c;
      store<kLanes>(by_t + c, mixes(plan, 0) ? adjoint(at, kept, t == 0, t == shape.taps[0], part_t)
                                             : load<kLanes>(at));
      if (grid == nullptr || !mixes(plan, 1)) continue;
      const float *along_w = grid->along_w + t * plane + c;
      const Floats slope = load<kLanes>(along_w + pitch) - load<kLanes>(along_w);
      pull->along[1] += columns_of(shape, c % pitch, load<kLanes>(by_t + c) * slope);
    }
    for (int64_t h = 0; h < shape.voxels[1]; ++h) {
      const int64_t row = taps.at + t * taps.step[0] + h * taps.step[1];
      for (int64_t c = 0; c < pitch; c += kLanes) {
        const float *at = by_t + h * pitch + c;
        store<kLanes>(line + c, mixes(plan, 1)
                                    ? adjoint(at, pitch, h == 0, h == shape.taps[1], part_h)
                                    : load<kLanes>(at));
        if (grid == nullptr || !mixes(plan, 2)) continue;
        const float *voxel = from + row + c;
        const Floats slope = load<kLanes>(voxel + 1) - load<kLanes>(voxel);
        pull->along[2] += columns_of(shape, c, load<kLanes>(line + c) * slope);
      }
      for (int64_t c = 0; c < pitch + (mixes(plan, 2) ? 1 : 0); c += kLanes) {
        const Floats own = load<kLanes>(line + c);
        store<kLanes>(list + row + c,
                      mixes(plan, 2) ? own + part_w * (load<kLanes>(line + c - 1) - own) : own);
      }
    }
  }
}

}  // namespace
}  // namespace megaslide
