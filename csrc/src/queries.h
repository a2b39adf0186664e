// The scalar part of one query's attention, from the products with voxels to their weights:
//
//   s[p] = q . k[p], g[p] = dout . v[p]         over a list of voxels p (sampling.h): given
//   score_j, dP_j = s, g interpolated at tap j
//   P = softmax(scale score);  dS_j = scale P_j (dP_j - dout . out)
//   A[p], dA[p] = P_j, dS_j spread to voxels
//   dx_j = d/dx of the interpolation of (dS_j s + P_j g)
//
// The vector part is the kernels' own: out = sum A[p] v[p];  dq = sum dA[p] k[p];
// dk[p] += dA[p] q;  dv[p] += A[p] dout.
#pragma once

#include <cmath>
#include <cstdint>

#include "deformable_attention.h"
#include "rigid.h"
#include "rows.h"
#include "sampling.h"

namespace megaslide {
namespace {

// ---- scratch ----------------------------------------------------------------------------------

constexpr int64_t kCacheLine = 64;

// Gives out aligned pieces of one block; from null, it only measures.
struct Arena {
  char *next;
  int64_t used;
  template <typename T>
  T *take(int64_t count) {
    char *piece = next == nullptr ? nullptr : next + used;
    const auto bytes = count * static_cast<int64_t>(sizeof(T));
    used += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    return reinterpret_cast<T *>(piece);
  }
};

struct QueryScratch {
  Taps taps;
  Grid score_grid, value_grid;
  float *work;                 // of spread_grid
  float *probability, *slope;  // [padded places + padded E] P and dS, of taps, then of extra keys
  float *pull[3];              // [padded K] gradient of a tap's coordinate, per axis
};

// What is read of one query's taps once they have been found in its list.
inline void take_taps(const Plan &plan, Arena *arena, Taps *taps) {
  const int64_t count = padded(plan.taps);
  for (int axis = 0; axis < 3; ++axis) {
    taps->above[axis] = arena->take<float>(count);
    taps->inside[axis] = arena->take<float>(count);
  }
  taps->first = arena->take<int32_t>(count);
}

inline void divide(const Plan &plan, Arena *arena, QueryScratch *scratch) {
  const int64_t taps = padded(plan.taps);
  take_taps(plan, arena, &scratch->taps);
  for (int32_t *&cell : scratch->taps.cell) cell = arena->take<int32_t>(taps);
  for (float *&pull : scratch->pull) pull = arena->take<float>(taps);
  scratch->taps.position = arena->take<float>(taps);
  for (float *&corner : scratch->taps.corner) corner = arena->take<float>(4 * taps);
  const int64_t grid = grid_floats(plan);
  Grid *const grids[] = {&scratch->score_grid, &scratch->value_grid};
  for (Grid *one : grids) {
    one->along_w = arena->take<float>(grid);
    one->along_hw = arena->take<float>(grid);
  }
  scratch->work = arena->take<float>(2 * grid + padded(plan.grid[2]) + kPad);
  const int64_t places = padded(plan.places) + padded(plan.extra) + kSlack;
  scratch->probability = arena->take<float>(places);
  scratch->slope = arena->take<float>(places);
}

// ---- scalar pieces ----------------------------------------------------------------------------

// e^x for x <= 0 or little above: exponent from rounding x / ln 2, the rest by its series.
inline Floats exponential(Floats x) {
  const Floats kept = x < -87.0f ? broadcast(-87.0f) : x;
  const Floats shifted = kept * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: integer in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats series = broadcast(1.0f / 5040);
  constexpr float kSeries[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  MEGASLIDE_UNROLL(8)
  for (const float next : kSeries) series = series * r + next;
  const Bits exponent = (reinterpret_cast<Bits>(shifted) + 127u) << 23;
  const Floats result = series * reinterpret_cast<Floats>(exponent);
  return x < -87.0f ? Floats{} : result;
}

inline float total(const float *x, int64_t count) {
  Floats sum = load<kLanes>(x);
  for (int64_t i = kLanes; i < count; i += kLanes) sum += load<kLanes>(x + i);
  return sum_lanes<kLanes>(sum);
}

inline void fill(float *x, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) x[i] = value;
}

// x at places that hold a tap, `otherwise` at others.
inline void drop_absent(const Plan &plan, float otherwise, float *x) {
  for (int64_t i = 0; i < padded(plan.places); i += kLanes) {
    const Floats held = load<kLanes>(plan.holds_tap + i);
    store<kLanes>(x + i, held > 0.0f ? load<kLanes>(x + i) : broadcast(otherwise));
  }
}

// Scaled scores to probabilities in place; places without a tap and padding get 0. Returns the log
// of the denominator.
inline float softmax(const Plan &plan, float *x) {
  const int64_t places = padded(plan.places), all = places + padded(plan.extra);
  Floats greatest = broadcast(-INFINITY);
  for (int64_t i = 0; i < places; i += kLanes) {
    const Floats held = load<kLanes>(plan.holds_tap + i);
    const Floats score = held > 0.0f ? plan.scale * load<kLanes>(x + i) : broadcast(-INFINITY);
    greatest = score > greatest ? score : greatest;
    store<kLanes>(x + i, score);
  }
  for (int64_t i = places; i < places + plan.extra; ++i) x[i] *= plan.scale;
  fill(x + places + plan.extra, all - places - plan.extra, -INFINITY);
  for (int64_t i = places; i < all; i += kLanes) {
    const Floats score = load<kLanes>(x + i);
    greatest = score > greatest ? score : greatest;
  }
  const float most = largest_lane<kLanes>(greatest);
  Floats sum = {};
  for (int64_t i = 0; i < all; i += kLanes) {
    const Floats e = exponential(load<kLanes>(x + i) - most);
    store<kLanes>(x + i, e);
    sum += e;
  }
  const float denominator = sum_lanes<kLanes>(sum), inverse = 1.0f / denominator;
  for (int64_t i = 0; i < all; ++i) x[i] *= inverse;
  return most + logf(denominator);
}

// ---- one query --------------------------------------------------------------------------------

inline void place_query(const Plan &plan, const float *offsets, const Part &part,
                        const Query &query, Taps *taps) {
  const int64_t group = part.head / (plan.heads / plan.groups);
  const int64_t at = ((part.b * plan.voxels + query.n) * plan.groups + group) * plan.channels;
  place_taps(plan, offsets == nullptr ? nullptr : offsets + at, query.voxel, taps);
}

// scores[j] from the products with the list.
inline void interpolate_query(const Plan &plan, const QueryScratch &s, const float *list,
                              const Grid &grid, float *scores) {
  if (rigid(plan)) {
    interpolate_grid(plan, s.taps, list, grid, scores);
  } else {
    interpolate_taps(plan, s.taps, list, scores);
  }
}

// The list's weights, from those of the taps; a deformed window adds to zeros.
inline void spread_query(const Plan &plan, const QueryScratch &s, const float *values,
                         float *list) {
  if (rigid(plan)) {
    spread_grid(plan, s.taps, values, nullptr, nullptr, s.work, list, nullptr);
  } else {
    spread_taps(plan, s.taps, values, list);
  }
}

// P and dS from scores x and value products g of `count` taps or keys, padded; in place.
inline void slopes_of(const Plan &plan, int64_t count, float lse, float mean, float *x, float *g) {
  for (int64_t i = 0; i < padded(count); i += kLanes) {
    const Floats p = exponential(plan.scale * load<kLanes>(x + i) - lse);
    store<kLanes>(x + i, p);
    store<kLanes>(g + i, plan.scale * p * (load<kLanes>(g + i) - mean));
  }
  fill(x + count, padded(count) - count, 0.0f);
  fill(g + count, padded(count) - count, 0.0f);
}

// P, dS and the gradient of the coordinates, of a deformed window.
inline void slopes_of_taps(const Plan &plan, float lse, float mean, const float *scores,
                           const float *values, const QueryScratch &s) {
  const Taps &taps = s.taps;
  const int64_t count = padded(plan.taps);
  for (int64_t j = 0; j < count; j += kLanes) {
    const Floats t = load<kLanes>(taps.above[0] + j), h = load<kLanes>(taps.above[1] + j),
                 w = load<kLanes>(taps.above[2] + j);
    const Corners x = corners_at(scores, taps, j), g = corners_at(values, taps, j);
    const Floats p = exponential(plan.scale * interpolate(x, t, h, w) - lse);
    const Floats ds = plan.scale * p * (interpolate(g, t, h, w) - mean);
    const Corners moved = blend(ds, x, p, g);
    store<kLanes>(s.pull[0] + j, load<kLanes>(taps.inside[0] + j) * along_t(moved, h, w));
    store<kLanes>(s.pull[1] + j, load<kLanes>(taps.inside[1] + j) * along_h(moved, t, w));
    store<kLanes>(s.pull[2] + j, load<kLanes>(taps.inside[2] + j) * along_w(moved, t, h));
    store<kLanes>(s.probability + j, p);
    store<kLanes>(s.slope + j, ds);
  }
  float *const padded_arrays[] = {s.probability, s.slope, s.pull[0], s.pull[1], s.pull[2]};
  for (float *array : padded_arrays) fill(array + plan.taps, count - plan.taps, 0.0f);
}

// Gradient of one query's offsets from that of its taps' coordinates.
inline void pull_offsets(const Plan &plan, const QueryScratch &s, float *to) {
  const int64_t count = padded(plan.taps);
  for (int axis = 0; axis < 3; ++axis) {
    const float *pull = s.pull[axis];
    if (plan.kind == MEGASLIDE_OFFSETS_TAP) {
      for (int64_t j = 0; j < plan.taps; ++j) to[3 * plan.number[j] + axis] = pull[j];
      continue;
    }
    to[axis] = s.taps.slides[axis] ? total(pull, count) : 0.0f;
    for (int by = 0; by < 3; ++by) {
      Floats sum = {};
      for (int64_t j = 0; j < count; j += kLanes) {
        sum += load<kLanes>(plan.centred[by] + j) * load<kLanes>(pull + j);
      }
      to[3 + 3 * by + axis] = sum_lanes<kLanes>(sum);
    }
  }
}

// A and dA over a list, from the products there with q and with dout; a deformed window adds to
// zeros. `offsets` takes the gradient of the query's offsets where it is not null.
inline void weigh_query(const Plan &plan, float lse, float mean, const QueryScratch &s,
                        const float *scores, const float *values, float *weights, float *slopes,
                        float *offsets) {
  if (!rigid(plan)) {
    slopes_of_taps(plan, lse, mean, scores, values, s);
    spread_taps(plan, s.taps, s.probability, weights);
    spread_taps(plan, s.taps, s.slope, slopes);
    if (offsets != nullptr) pull_offsets(plan, s, offsets);
    return;
  }
  interpolate_grid(plan, s.taps, scores, s.score_grid, s.probability);
  interpolate_grid(plan, s.taps, values, s.value_grid, s.slope);
  slopes_of(plan, plan.places, lse, mean, s.probability, s.slope);
  drop_absent(plan, 0.0f, s.probability);
  drop_absent(plan, 0.0f, s.slope);
  const bool pulled = offsets != nullptr;
  Pull pull = {};
  spread_grid(plan, s.taps, s.probability, pulled ? &s.value_grid : nullptr, values, s.work,
              weights, &pull);
  spread_grid(plan, s.taps, s.slope, pulled ? &s.score_grid : nullptr, scores, s.work, slopes,
              &pull);
  for (int axis = 0; axis < 3 && pulled; ++axis) {
    offsets[axis] = s.taps.slides[axis] ? sum_lanes<kLanes>(pull.along[axis]) : 0.0f;
  }
}

// Where the gradient of a query's offsets goes, or null.
inline float *offsets_at(const Plan &plan, const BackwardArrays &arrays, int64_t i) {
  return arrays.grad_offsets == nullptr ? nullptr : arrays.grad_offsets + i * plan.channels;
}

}  // namespace
}  // namespace megaslide
