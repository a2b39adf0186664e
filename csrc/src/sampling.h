// Where the taps of one query sample, which voxels that reads, and trilinear sums in score space.
//
// Sampling is linear, so the sample of a tap is never formed: products with whole voxels are
// computed once per voxel (rows.h) and interpolated as scalars. The voxels a query reads are the
// box that encloses its taps; taps that lie so far apart that the box holds more voxels than the
// taps have corners are listed corner by corner instead. Both are a list, and a tap finds its 8
// corners in it at first + {0, step t} + {0, step h} + {0, step w}.
#pragma once

#include <cstdint>

#include "deformable_attention.h"

// The arrays of a loop over taps do not overlap; beside gathers the compiler cannot check that.
#if defined(__clang__)
#define MEGASLIDE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MEGASLIDE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace megaslide {
namespace {

// One query's taps, in scratch memory; arrays of padded K unless noted.
struct Taps {
  int32_t *cell[3];    // lower corner
  float *above[3];     // weight of the upper corner, in [0, 1]
  float *inside[3];    // 1 where the coordinate passes its gradient, 0 where it is clamped
  int32_t *first;      // lower corner in the list
  int32_t *voxel;      // [capacity] the list
  int64_t count;       // its length
  int64_t step[3];
  bool slides[3];      // the shift passes its gradient
};

inline float clamp(float x, float high) {  // passes NaN on
  const float low = x < 0.0f ? 0.0f : x;
  return low > high ? high : low;
}

inline int64_t window_start(const Plan &plan, int axis, int64_t voxel) {
  const int64_t start = voxel - plan.window[axis] / 2, last = plan.size[axis] - plan.window[axis];
  return start < 0 ? 0 : start > last ? last : start;
}

// Cells, weights and clamping of taps at position[]; see corners() in reference.py for `at_end`.
inline void split_positions(const Plan &plan, int axis, bool at_end, const float *position,
                            const Taps &taps) {
  const auto high = static_cast<float>(plan.size[axis] - 1);
  const auto last_cell = static_cast<int32_t>(plan.size[axis] > 1 ? plan.size[axis] - 2 : 0);
  int32_t *__restrict cell = taps.cell[axis];
  float *__restrict above = taps.above[axis];
  float *__restrict inside = taps.inside[axis];
  const int64_t count = padded(plan.taps);
  for (int64_t j = 0; j < count; ++j) {
    const float x = position[j], clamped = clamp(x, high);
    const float known = clamped >= 0.0f ? clamped : 0.0f;  // NaN must not become an index
    auto below = static_cast<int32_t>(known);
    below -= (at_end & (static_cast<float>(below) == known)) ? 1 : 0;
    below = below < 0 ? 0 : below;
    below = below > last_cell ? last_cell : below;
    cell[j] = below;
    above[j] = clamped - static_cast<float>(below);
    inside[j] = ((x >= 0.0f) & (x <= high)) ? 1.0f : 0.0f;
  }
}

// `offset` is one query's and group's; `position` is scratch of padded K.
inline void place_taps(const Plan &plan, const float *offset, const int64_t voxel[3],
                       float *__restrict position, Taps *taps) {
  const int64_t count = padded(plan.taps);
  const bool slides = plan.kind != MEGASLIDE_OFFSETS_TAP;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t last = plan.size[axis] - plan.window[axis];
    auto start = static_cast<float>(window_start(plan, axis, voxel[axis]));
    const auto last_start = static_cast<float>(last);
    const float slid = start + offset[axis];
    taps->slides[axis] = slides && last > 0 && slid >= 0.0f && slid <= last_start;
    if (slides && last > 0) start = clamp(slid, last_start);
    const float *__restrict index = plan.index[axis];
    for (int64_t j = 0; j < count; ++j) position[j] = start + index[j];
    if (plan.kind == MEGASLIDE_OFFSETS_AFFINE) {
      const float *__restrict t = plan.centred[0], *__restrict h = plan.centred[1],
                  *__restrict w = plan.centred[2];
      const float by_t = offset[3 + axis], by_h = offset[6 + axis], by_w = offset[9 + axis];
      for (int64_t j = 0; j < count; ++j) position[j] += t[j] * by_t + h[j] * by_h + w[j] * by_w;
    } else if (plan.kind == MEGASLIDE_OFFSETS_TAP) {
      for (int64_t j = 0; j < plan.taps; ++j) position[j] += offset[3 * j + axis];
      for (int64_t j = plan.taps; j < count; ++j) position[j] = position[plan.taps - 1];
    }
    split_positions(plan, axis, last > 0 && start == last_start, position, *taps);
  }
}

// Pads the list with its first voxel, so that products may run over whole vectors.
inline void pad_list(Taps *taps) {
  for (int64_t e = taps->count; e < padded(taps->count); ++e) taps->voxel[e] = taps->voxel[0];
}

inline void list_corners(const Plan &plan, Taps *taps) {
  const int64_t height = plan.size[1], width = plan.size[2];
  int64_t up[3];
  for (int axis = 0; axis < 3; ++axis) up[axis] = plan.size[axis] > 1 ? 1 : 0;
  for (int64_t j = 0; j < padded(plan.taps); ++j) {
    taps->first[j] = static_cast<int32_t>(8 * (j < plan.taps ? j : plan.taps - 1));
  }
  for (int64_t e = 0; e < 8 * plan.taps; ++e) {
    const int64_t j = e / 8;
    const int64_t t = taps->cell[0][j] + (e >> 2 & 1) * up[0];
    const int64_t h = taps->cell[1][j] + (e >> 1 & 1) * up[1];
    const int64_t w = taps->cell[2][j] + (e & 1) * up[2];
    taps->voxel[e] = static_cast<int32_t>((t * height + h) * width + w);
  }
  taps->count = 8 * plan.taps;
  for (int axis = 0; axis < 3; ++axis) taps->step[axis] = 4 >> axis;
}

inline void list_box(const Plan &plan, const int32_t low[3], const int64_t extent[3],
                     Taps *taps) {
  int64_t e = 0;
  for (int64_t t = low[0]; t < low[0] + extent[0]; ++t) {
    for (int64_t h = low[1]; h < low[1] + extent[1]; ++h) {
      const int64_t first = (t * plan.size[1] + h) * plan.size[2] + low[2];
      for (int64_t w = 0; w < extent[2]; ++w) taps->voxel[e++] = static_cast<int32_t>(first + w);
    }
  }
  taps->count = e;
  const auto by_t = static_cast<int32_t>(extent[1] * extent[2]);
  const auto by_h = static_cast<int32_t>(extent[2]);
  const int64_t step[3] = {by_t, by_h, 1};
  for (int axis = 0; axis < 3; ++axis) taps->step[axis] = plan.size[axis] > 1 ? step[axis] : 0;
  int32_t *__restrict first = taps->first;
  const int32_t *__restrict t = taps->cell[0], *__restrict h = taps->cell[1],
                *__restrict w = taps->cell[2];
  const int64_t count = padded(plan.taps);
  for (int64_t j = 0; j < count; ++j) {
    first[j] = (t[j] - low[0]) * by_t + (h[j] - low[1]) * by_h + w[j] - low[2];
  }
}

inline void list_voxels(const Plan &plan, Taps *taps) {
  int32_t low[3];
  int64_t extent[3];
  const int64_t count = padded(plan.taps);
  for (int axis = 0; axis < 3; ++axis) {
    const int32_t *__restrict cell = taps->cell[axis];
    int32_t least = cell[0], most = cell[0];
    for (int64_t j = 0; j < count; ++j) {
      least = cell[j] < least ? cell[j] : least;
      most = cell[j] > most ? cell[j] : most;
    }
    low[axis] = least;
    extent[axis] = most - least + (plan.size[axis] > 1 ? 2 : 1);
  }
  // Three factors can overflow, two cannot: N fits in 31 bits.
  const int64_t plane = extent[1] * extent[2];
  if (plane <= 8 * plan.taps && extent[0] * plane <= 8 * plan.taps) {
    list_box(plan, low, extent, taps);
  } else {
    list_corners(plan, taps);
  }
  pad_list(taps);
}

// Without offsets the taps are voxels: the list is the window, and nothing is interpolated.
inline void list_window(const Plan &plan, const int64_t voxel[3], Taps *taps) {
  int32_t low[3];
  for (int axis = 0; axis < 3; ++axis) {
    low[axis] = static_cast<int32_t>(window_start(plan, axis, voxel[axis]));
  }
  int64_t e = 0;
  for (int64_t t = low[0]; t < low[0] + plan.window[0]; ++t) {
    for (int64_t h = low[1]; h < low[1] + plan.window[1]; ++h) {
      const int64_t first = (t * plan.size[1] + h) * plan.size[2] + low[2];
      for (int64_t w = 0; w < plan.window[2]; ++w) {
        taps->voxel[e++] = static_cast<int32_t>(first + w);
      }
    }
  }
  taps->count = e;
  pad_list(taps);
}

// ---- interpolation ----------------------------------------------------------------------------

// A value at the 8 corners of one tap. Named members, not an array: the compiler then keeps them in
// vector registers, one lane per tap.
struct Corners {
  float lll, llh, lhl, lhh, hll, hlh, hhl, hhh;  // low or high along t, h, w
};

inline Corners corners_at(const float *list, int64_t first, int64_t t, int64_t h, int64_t w) {
  const float *low = list + first, *high = low + t;
  return {low[0], low[w], low[h], low[h + w], high[0], high[w], high[h], high[h + w]};
}

inline Corners blend(float a, const Corners &x, float b, const Corners &y) {
  return {a * x.lll + b * y.lll, a * x.llh + b * y.llh, a * x.lhl + b * y.lhl,
          a * x.lhh + b * y.lhh, a * x.hll + b * y.hll, a * x.hlh + b * y.hlh,
          a * x.hhl + b * y.hhl, a * x.hhh + b * y.hhh};
}

inline float mix(float low, float high, float above) { return low + above * (high - low); }

// The trilinear value, and its derivative along each axis.
inline float interpolate(const Corners &x, float t, float h, float w) {
  return mix(mix(mix(x.lll, x.llh, w), mix(x.lhl, x.lhh, w), h),
             mix(mix(x.hll, x.hlh, w), mix(x.hhl, x.hhh, w), h), t);
}

inline float along_t(const Corners &x, float h, float w) {
  return mix(mix(x.hll, x.hlh, w), mix(x.hhl, x.hhh, w), h) -
         mix(mix(x.lll, x.llh, w), mix(x.lhl, x.lhh, w), h);
}

inline float along_h(const Corners &x, float t, float w) {
  return mix(mix(x.lhl, x.lhh, w) - mix(x.lll, x.llh, w),
             mix(x.hhl, x.hhh, w) - mix(x.hll, x.hlh, w), t);
}

inline float along_w(const Corners &x, float t, float h) {
  return mix(mix(x.llh - x.lll, x.lhh - x.lhl, h), mix(x.hlh - x.hll, x.hhh - x.hhl, h), t);
}

// sample[j] = trilinear sum of list[] at tap j.
inline void interpolate_taps(const Plan &plan, const Taps &taps, const float *__restrict list,
                             float *__restrict sample) {
  const int64_t count = padded(plan.taps), t = taps.step[0], h = taps.step[1], w = taps.step[2];
  const int32_t *__restrict first = taps.first;
  const float *__restrict at = taps.above[0], *__restrict ah = taps.above[1],
              *__restrict aw = taps.above[2];
  MEGASLIDE_INDEPENDENT
  for (int64_t j = 0; j < count; ++j) {
    sample[j] = interpolate(corners_at(list, first[j], t, h, w), at[j], ah[j], aw[j]);
  }
}

// list[] += value[j] times the trilinear weights of tap j: the adjoint of the above.
inline void spread_taps(const Plan &plan, const Taps &taps, const float *value, float *list) {
  const int64_t t = taps.step[0], h = taps.step[1], w = taps.step[2];
  for (int64_t j = 0; j < plan.taps; ++j) {
    const float high = value[j] * taps.above[0][j], low = value[j] - high;
    const float low_h = low * taps.above[1][j], low_l = low - low_h;
    const float high_h = high * taps.above[1][j], high_l = high - high_h;
    const float above = taps.above[2][j], below = 1.0f - above;
    float *to = list + taps.first[j];
    to[0] += low_l * below;
    to[w] += low_l * above;
    to[h] += low_h * below;
    to[h + w] += low_h * above;
    to[t] += high_l * below;
    to[t + w] += high_l * above;
    to[t + h] += high_h * below;
    to[t + h + w] += high_h * above;
  }
}

}  // namespace
}  // namespace megaslide
