// Where the taps of one query sample, which voxels that reads, and trilinear sums in score space.
//
// Sampling is linear, so the sample of a tap is never formed: products with whole voxels are
// computed once per voxel (rows.h) and interpolated as scalars. They come as a list of voxels:
// those of a box that encloses the taps, of one query or of a tile of them. A tap finds its 8
// corners in it at first + {0, step t} + {0, step h} + {0, 1}. Taps of one query that lie so far
// apart that their box holds more voxels than they have corners are listed corner by corner.
//
// Without offsets or with a shift, the taps are a rigid grid with one fractional part (rigid.h).
#pragma once

#include <cstdint>

#include "deformable_attention.h"
#include "vectors.h"

namespace megaslide {
namespace {

// Lists, and arrays over them, can be read and written this far beyond their end.
constexpr int64_t kSlack = 2 * kPad;

// One query's taps, in scratch memory; arrays of padded K unless noted.
struct Taps {
  int64_t step[3];     // in the list, from a voxel to the next along each axis
  bool slides[3];      // the shift passes its gradient
  // A rigid grid:
  int64_t start[3];    // lower corner of its first tap
  float part[3];       // weight of the upper corners
  int64_t at;          // `start` in the list
  // Others, in the order of plan.number:
  int32_t *cell[3];    // lower corner
  float *above[3];     // weight of the upper corner, in [0, 1]
  float *inside[3];    // 1 where the coordinate passes its gradient, 0 where it is clamped
  int32_t *first;      // lower corner in the list
  float *position;     // scratch
  float *corner[2];    // [4 * padded K] scratch
};

inline bool rigid(const Plan &plan) { return plan.kind <= MEGASLIDE_OFFSETS_SHIFT; }

// Whether a rigid grid can lie between voxels along this axis.
inline bool mixes(const Plan &plan, int axis) {
  return plan.grid[axis] > plan.window[axis];
}

inline float clamp(float x, float high) {  // passes NaN on
  const float low = x < 0.0f ? 0.0f : x;
  return low > high ? high : low;
}

inline int64_t window_start(const Plan &plan, int axis, int64_t voxel) {
  const int64_t start = voxel - plan.window[axis] / 2, last = plan.size[axis] - plan.window[axis];
  return start < 0 ? 0 : start > last ? last : start;
}

// Where the window of a query begins. Notes whether the shift passes its gradient.
inline float slide(const Plan &plan, int axis, int64_t voxel, const float *offset, Taps *taps) {
  const int64_t last = plan.size[axis] - plan.window[axis];
  const auto start = static_cast<float>(window_start(plan, axis, voxel));
  taps->slides[axis] = false;
  if (plan.kind == MEGASLIDE_OFFSETS_NONE || plan.kind == MEGASLIDE_OFFSETS_TAP || last == 0) {
    return start;
  }
  const auto last_start = static_cast<float>(last);
  const float slid = start + offset[axis];
  taps->slides[axis] = slid >= 0.0f && slid <= last_start;
  return clamp(slid, last_start);
}

inline void place_grid(const Plan &plan, int axis, float start, Taps *taps) {
  const float known = start >= 0.0f ? start : 0.0f;  // NaN must not become an index
  auto below = static_cast<int64_t>(known);
  // At the end of the axis the cell below; see corners() in reference.py.
  if (mixes(plan, axis) && below == plan.size[axis] - plan.window[axis]) --below;
  taps->start[axis] = below;
  taps->part[axis] = start - static_cast<float>(below);
}

// Cells, weights and clamping of taps at position[]; see corners() in reference.py for `at_end`.
inline void split_positions(const Plan &plan, int axis, bool at_end, const Taps &taps) {
  const auto high = static_cast<float>(plan.size[axis] - 1);
  const auto last_cell = static_cast<int32_t>(plan.size[axis] > 1 ? plan.size[axis] - 2 : 0);
  const float *__restrict position = taps.position;
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

inline void place_deformed(const Plan &plan, int axis, float start, const float *offset,
                           Taps *taps) {
  const int64_t count = padded(plan.taps), last = plan.size[axis] - plan.window[axis];
  float *__restrict position = taps->position;
  const float *__restrict index = plan.index[axis];
  for (int64_t j = 0; j < count; ++j) position[j] = start + index[j];
  if (plan.kind == MEGASLIDE_OFFSETS_AFFINE) {
    const float *__restrict t = plan.centred[0], *__restrict h = plan.centred[1],
                *__restrict w = plan.centred[2];
    const float by_t = offset[3 + axis], by_h = offset[6 + axis], by_w = offset[9 + axis];
    for (int64_t j = 0; j < count; ++j) position[j] += t[j] * by_t + h[j] * by_h + w[j] * by_w;
  } else {
    for (int64_t j = 0; j < plan.taps; ++j) position[j] += offset[3 * plan.number[j] + axis];
    for (int64_t j = plan.taps; j < count; ++j) position[j] = position[plan.taps - 1];
  }
  split_positions(plan, axis, last > 0 && start == static_cast<float>(last), *taps);
}

// `offset` is one query's and group's.
inline void place_taps(const Plan &plan, const float *offset, const int64_t voxel[3], Taps *taps) {
  for (int axis = 0; axis < 3; ++axis) {
    const float start = slide(plan, axis, voxel[axis], offset, taps);
    if (rigid(plan)) {
      place_grid(plan, axis, start, taps);
    } else {
      place_deformed(plan, axis, start, offset, taps);
    }
  }
}

// ---- lists ------------------------------------------------------------------------------------

// Voxels [low, end) on each axis. On an axis w of length 1, the one voxel twice: corners along w
// are read in pairs.
struct Box {
  int32_t low[3], end[3];
};

inline Box empty_box() { return {{INT32_MAX, INT32_MAX, INT32_MAX}, {0, 0, 0}}; }

// Extends the box to the corners of all taps.
inline void enclose(const Plan &plan, const Taps &taps, Box *box) {
  const int64_t count = padded(plan.taps);
  for (int axis = 0; axis < 3; ++axis) {
    int32_t least = 0, end = 0;
    if (rigid(plan)) {
      least = static_cast<int32_t>(taps.start[axis]);
      end = static_cast<int32_t>(taps.start[axis] + plan.window[axis] + mixes(plan, axis));
    } else {
      const int32_t *__restrict cell = taps.cell[axis];
      least = end = cell[0];
      for (int64_t j = 0; j < count; ++j) {
        least = cell[j] < least ? cell[j] : least;
        end = cell[j] > end ? cell[j] : end;
      }
      end += plan.size[axis] > 1 || axis == 2 ? 2 : 1;
    }
    box->low[axis] = least < box->low[axis] ? least : box->low[axis];
    box->end[axis] = end > box->end[axis] ? end : box->end[axis];
  }
}

// Voxels in the box, or `most` + 1 if more than `most`.
inline int64_t volume(const Box &box, int64_t most) {
  const int64_t plane = int64_t{box.end[1] - box.low[1]} * (box.end[2] - box.low[2]);
  if (plane > most) return most + 1;  // three factors can overflow, two cannot
  const int64_t all = plane * (box.end[0] - box.low[0]);
  return all > most ? most + 1 : all;
}

// Writes whole vectors, in order: what one line leaves beyond its end, the next overwrites.
inline void list_box(const Plan &plan, const Box &box, int32_t *voxel) {
  typedef Vec<kLanes, int32_t> Indices;
  Indices lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int64_t width = box.end[2] - box.low[2];
  for (int64_t t = box.low[0]; t < box.end[0]; ++t) {
    for (int64_t h = box.low[1]; h < box.end[1]; ++h, voxel += width) {
      const int64_t first = (t * plan.size[1] + h) * plan.size[2];
      const Indices last = Indices{} + static_cast<int32_t>(first + plan.size[2] - 1);
      for (int64_t w = 0; w < width; w += kLanes) {
        const Indices at = lane + static_cast<int32_t>(first + box.low[2] + w);
        store<kLanes>(voxel + w, at < last ? at : last);
      }
    }
  }
}

// Finds the taps in the list of the box.
inline void find_in_box(const Plan &plan, const Box &box, Taps *taps) {
  const int32_t by_h = box.end[2] - box.low[2], by_t = (box.end[1] - box.low[1]) * by_h;
  taps->step[0] = rigid(plan) || plan.size[0] > 1 ? by_t : 0;
  taps->step[1] = rigid(plan) || plan.size[1] > 1 ? by_h : 0;
  taps->step[2] = 1;
  if (rigid(plan)) {
    taps->at = (taps->start[0] - box.low[0]) * by_t + (taps->start[1] - box.low[1]) * by_h +
               taps->start[2] - box.low[2];
    return;
  }
  int32_t *__restrict first = taps->first;
  const int32_t *__restrict t = taps->cell[0], *__restrict h = taps->cell[1],
                *__restrict w = taps->cell[2];
  const int64_t count = padded(plan.taps);
  for (int64_t j = 0; j < count; ++j) {
    first[j] = (t[j] - box.low[0]) * by_t + (h[j] - box.low[1]) * by_h + w[j] - box.low[2];
  }
}

// Lists 8 corners per tap, and finds the taps there.
inline void list_corners(const Plan &plan, Taps *taps, int32_t *voxel) {
  for (int64_t j = 0; j < padded(plan.taps); ++j) {
    taps->first[j] = static_cast<int32_t>(8 * (j < plan.taps ? j : plan.taps - 1));
  }
  for (int64_t e = 0; e < 8 * plan.taps; ++e) {
    int64_t n = 0;
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t up = plan.size[axis] > 1 ? e >> (2 - axis) & 1 : 0;
      n = n * plan.size[axis] + taps->cell[axis][e / 8] + up;
    }
    voxel[e] = static_cast<int32_t>(n);
  }
  for (int axis = 0; axis < 3; ++axis) taps->step[axis] = 4 >> axis;
}

// ---- interpolation ----------------------------------------------------------------------------

// Values at the 8 corners of kLanes taps.
struct Corners {
  Floats lll, llh, lhl, lhh, hll, hlh, hhl, hhh;  // low or high along t, h, w
};

// list[first + by] and list[first + by + 1] of kLanes taps. Pairs, because reading 64 bits costs no
// more than reading 32.
inline void pairs_at(const float *list, const int32_t *first, Floats *low, Floats *high) {
#if defined(__AVX512F__)
  const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first));
  const __m256i odd = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first + 8));
  const __m512i none = _mm512_setzero_si512();
  const auto a = reinterpret_cast<Floats>(_mm512_mask_i32gather_epi64(none, 0xff, even, list, 4));
  const auto b = reinterpret_cast<Floats>(_mm512_mask_i32gather_epi64(none, 0xff, odd, list, 4));
  const __m512i from = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i next = _mm512_or_si512(from, _mm512_set1_epi32(1));
  *low = _mm512_permutex2var_ps(a, from, b);
  *high = _mm512_permutex2var_ps(a, next, b);
#else
  for (int i = 0; i < kLanes; ++i) {
    (*low)[i] = list[first[i]];
    (*high)[i] = list[first[i] + 1];
  }
#endif
}

inline Corners corners_at(const float *list, const Taps &taps, int64_t j) {
  const int32_t *first = taps.first + j;
  const int64_t t = taps.step[0], h = taps.step[1];
  Corners x;
  pairs_at(list, first, &x.lll, &x.llh);
  pairs_at(list + h, first, &x.lhl, &x.lhh);
  pairs_at(list + t, first, &x.hll, &x.hlh);
  pairs_at(list + t + h, first, &x.hhl, &x.hhh);
  return x;
}

inline Corners blend(Floats a, const Corners &x, Floats b, const Corners &y) {
  return {a * x.lll + b * y.lll, a * x.llh + b * y.llh, a * x.lhl + b * y.lhl,
          a * x.lhh + b * y.lhh, a * x.hll + b * y.hll, a * x.hlh + b * y.hlh,
          a * x.hhl + b * y.hhl, a * x.hhh + b * y.hhh};
}

inline Floats mix(Floats low, Floats high, Floats above) { return low + above * (high - low); }

// The trilinear value, and its derivative along each axis.
inline Floats interpolate(const Corners &x, Floats t, Floats h, Floats w) {
  return mix(mix(mix(x.lll, x.llh, w), mix(x.lhl, x.lhh, w), h),
             mix(mix(x.hll, x.hlh, w), mix(x.hhl, x.hhh, w), h), t);
}

inline Floats along_t(const Corners &x, Floats h, Floats w) {
  return mix(mix(x.hll, x.hlh, w), mix(x.hhl, x.hhh, w), h) -
         mix(mix(x.lll, x.llh, w), mix(x.lhl, x.lhh, w), h);
}

inline Floats along_h(const Corners &x, Floats t, Floats w) {
  return mix(mix(x.lhl, x.lhh, w) - mix(x.lll, x.llh, w),
             mix(x.hhl, x.hhh, w) - mix(x.hll, x.hlh, w), t);
}

inline Floats along_w(const Corners &x, Floats t, Floats h) {
  return mix(mix(x.llh - x.lll, x.lhh - x.lhl, h), mix(x.hlh - x.hll, x.hhh - x.hhl, h), t);
}

// sample[j] = trilinear sum of list[] at tap j.
inline void interpolate_taps(const Plan &plan, const Taps &taps, const float *list,
                             float *sample) {
  for (int64_t j = 0; j < padded(plan.taps); j += kLanes) {
    const Floats t = load<kLanes>(taps.above[0] + j), h = load<kLanes>(taps.above[1] + j),
                 w = load<kLanes>(taps.above[2] + j);
    store<kLanes>(sample + j, interpolate(corners_at(list, taps, j), t, h, w));
  }
}

// Two pairs of kLanes taps, four numbers a tap: low, high, next low, next high. Where there is an
// order that costs less, it is not that of the taps.
inline void store_pairs(float *to, Floats low, Floats high, Floats next_low, Floats next_high) {
#if defined(__AVX512F__)
  const auto first = [](Floats a, Floats b) { return _mm512_maskz_unpacklo_ps(0xffff, a, b); };
  const auto last = [](Floats a, Floats b) { return _mm512_maskz_unpackhi_ps(0xffff, a, b); };
  const auto own = reinterpret_cast<__m512d>(first(low, high));
  const auto own_last = reinterpret_cast<__m512d>(last(low, high));
  const auto next = reinterpret_cast<__m512d>(first(next_low, next_high));
  const auto next_last = reinterpret_cast<__m512d>(last(next_low, next_high));
  const __m512d quads[] = {_mm512_maskz_unpacklo_pd(0xff, own, next),
                           _mm512_maskz_unpackhi_pd(0xff, own, next),
                           _mm512_maskz_unpacklo_pd(0xff, own_last, next_last),
                           _mm512_maskz_unpackhi_pd(0xff, own_last, next_last)};
  for (int i = 0; i < 4; ++i) store<kLanes>(to + i * kLanes, reinterpret_cast<Floats>(quads[i]));
#else
  for (int i = 0; i < kLanes; ++i) {
    to[4 * i] = low[i];
    to[4 * i + 1] = high[i];
    to[4 * i + 2] = next_low[i];
    to[4 * i + 3] = next_high[i];
  }
#endif
}

// The tap, of kLanes, whose numbers store_pairs() puts in place i.
inline int64_t stored_tap(int64_t i) {
#if defined(__AVX512F__)
  return i % 4 * 4 + i / 4;
#else
  return i;
#endif
}

// Adds two pairs. The next one is written first: it is zeros where both go to one place.
inline void add_pairs(float *to, float *next, const float *pairs) {
  double first, last;  // as bits, which are moved 64 at once
  __builtin_memcpy(&first, to, sizeof first);
  __builtin_memcpy(&last, next, sizeof last);
  typedef Vec<2, double> Both;
  const Both sums = reinterpret_cast<Both>(reinterpret_cast<Vec<4>>(Both{first, last}) +
                                           load<4>(pairs));
  first = sums[0];
  last = sums[1];
  __builtin_memcpy(next, &last, sizeof last);
  __builtin_memcpy(to, &first, sizeof first);
}

// list[] += value[j] times the trilinear weights of tap j: the adjoint of the above. Taps come in
// an order in which neighbours do not touch (plan.number): an addition to a pair of floats, one of
// which the addition just before wrote, would wait for that.
inline void spread_taps(const Plan &plan, const Taps &taps, const float *value, float *list) {
  float *const below = taps.corner[0], *const above = taps.corner[1];
  const int64_t count = plan.taps, by_t = taps.step[0], by_h = taps.step[1];
  for (int64_t j = 0; j < padded(count); j += kLanes) {
    const Floats x = load<kLanes>(value + j), w = load<kLanes>(taps.above[2] + j);
    const Floats h = load<kLanes>(taps.above[1] + j);
    const Floats high = x * load<kLanes>(taps.above[0] + j), low = x - high;
    const auto store_plane = [&](Floats plane, float *to) {
      const Floats next = plane * h, own = plane - next;
      const Floats own_above = own * w, next_above = next * w;
      store_pairs(to + 4 * j, own - own_above, own_above, next - next_above, next_above);
    };
    store_plane(low, below);
    store_plane(high, above);
  }
  const int32_t *const first = taps.first;
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t tap = j + stored_tap(i);
      if (tap >= count) continue;
      float *to = list + first[tap];
      add_pairs(to + by_t, to + by_t + by_h, above + 4 * (j + i));
      add_pairs(to, to + by_h, below + 4 * (j + i));
    }
  }
}

}  // namespace
}  // namespace megaslide
