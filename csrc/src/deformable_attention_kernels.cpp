// 3D-DSA for one instruction set: one query at a time, O(K + E) scratch, no K x head_dim array.
//
//   s[p] = q . k[p], g[p] = dout . v[p]         over the voxels p the query reads (rows.h)
//   score_j, dP_j = s, g interpolated at tap j  scalars (sampling.h)
//   P = softmax(scale score);  dS_j = scale P_j (dP_j - dout . out)
//   A[p], dA[p] = P_j, dS_j spread to voxels
//   out = sum A[p] v[p];  dq = sum dA[p] k[p];  dk[p] += dA[p] q;  dv[p] += A[p] dout
//   dx_j = d/dx of the interpolation of (dS_j s + P_j g)
#include <cmath>
#include <cstdint>

#include "deformable_attention.h"
#include "rows.h"
#include "sampling.h"

namespace megaslide {
namespace {

// ---- scratch ----------------------------------------------------------------------------------

struct Scratch {
  Taps taps;
  float *position;             // [padded K]
  float *scores, *values;      // [capacity] s and g over the list
  float *weights, *slopes;     // [capacity] A and dA over the list
  float *probability, *slope;  // [padded K + padded E] P and dS of taps, then of extra keys
  float *pull[3];              // [padded K] gradient of a tap's coordinate, per axis
};

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

int64_t divide(const Plan &plan, void *block, Scratch *scratch) {
  const int64_t taps = padded(plan.taps), all = taps + padded(plan.extra);
  Arena arena{static_cast<char *>(block), 0};
  for (int axis = 0; axis < 3; ++axis) {
    scratch->taps.cell[axis] = arena.take<int32_t>(taps);
    scratch->taps.above[axis] = arena.take<float>(taps);
    scratch->taps.inside[axis] = arena.take<float>(taps);
    scratch->pull[axis] = arena.take<float>(taps);
  }
  scratch->taps.first = arena.take<int32_t>(taps);
  scratch->taps.voxel = arena.take<int32_t>(padded(plan.capacity));
  scratch->position = arena.take<float>(taps);
  float **const lists[] = {&scratch->scores, &scratch->values, &scratch->weights,
                           &scratch->slopes};
  for (float **list : lists) {
    *list = arena.take<float>(padded(plan.capacity));
  }
  scratch->probability = arena.take<float>(all);
  scratch->slope = arena.take<float>(all);
  return arena.used;
}

int64_t scratch_bytes(const Plan &plan) {
  Scratch scratch;
  return divide(plan, nullptr, &scratch);
}

// ---- scalar pieces ----------------------------------------------------------------------------

// e^x for x <= 0 or little above: exponent from rounding x / ln 2, the rest by its series.
inline float exponential(float x) {
  const float kept = x < -87.0f ? -87.0f : x;
  const float shifted = kept * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: integer in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const uint32_t exponent = (__builtin_bit_cast(uint32_t, shifted) + 127u) << 23;
  const float result = series * __builtin_bit_cast(float, exponent);
  return x < -87.0f ? 0.0f : result;
}

inline float largest(const float *x, int64_t count) {
  Vec<kLanes> most = load<kLanes>(x);
  for (int64_t i = kLanes; i < count; i += kLanes) {
    const Vec<kLanes> next = load<kLanes>(x + i);
    most = next > most ? next : most;
  }
  float result = most[0];
  for (int i = 1; i < kLanes; ++i) result = most[i] > result ? most[i] : result;
  return result;
}

inline float total(const float *x, int64_t count) {
  Vec<kLanes> sum = load<kLanes>(x);
  for (int64_t i = kLanes; i < count; i += kLanes) sum += load<kLanes>(x + i);
  return sum_lanes<kLanes>(sum);
}

inline void fill(float *x, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) x[i] = value;
}

// Scaled scores to probabilities in place; padding (of taps, of extra keys) gets 0. Returns the
// log of the denominator.
float softmax(const Plan &plan, float *x) {
  const int64_t taps = padded(plan.taps), all = taps + padded(plan.extra);
  for (int64_t i = 0; i < all; ++i) x[i] *= plan.scale;
  fill(x + plan.taps, taps - plan.taps, -INFINITY);
  fill(x + taps + plan.extra, all - taps - plan.extra, -INFINITY);
  const float most = largest(x, all);
  for (int64_t i = 0; i < all; ++i) x[i] = exponential(x[i] - most);
  const float sum = total(x, all), inverse = 1.0f / sum;
  for (int64_t i = 0; i < all; ++i) x[i] *= inverse;
  return most + logf(sum);
}

inline float dot(const float *x, const float *y, int64_t d) {
  const int64_t whole = d / kLanes * kLanes;
  Vec<kLanes> lanes = {};
  for (int64_t c = 0; c < whole; c += kLanes) lanes += load<kLanes>(x + c) * load<kLanes>(y + c);
  float sum = sum_lanes<kLanes>(lanes);
  for (int64_t c = whole; c < d; ++c) sum += x[c] * y[c];
  return sum;
}

// ---- one query --------------------------------------------------------------------------------

// Rows of one batch element and head.
struct Rows {
  int64_t volume, extra;  // first float, in arrays like q and like extra_k
};

inline Rows rows_of(const Plan &plan, const Part &part) {
  const int64_t head = part.head * plan.head_dim;
  return {part.b * plan.voxels * plan.row + head, part.b * plan.extra * plan.row + head};
}

inline bool interpolates(const Plan &plan) { return plan.kind != MEGASLIDE_OFFSETS_NONE; }

inline List listed(const Plan &plan, const Taps &taps) {
  return {taps.voxel, plan.row, taps.count};
}

inline List extra_list(const Plan &plan) { return {plan.iota, plan.row, plan.extra}; }

void find_taps(const Plan &plan, const float *offsets, const Part &part, int64_t n,
               Scratch *scratch) {
  const int64_t plane = plan.size[1] * plan.size[2];
  const int64_t voxel[3] = {n / plane, n % plane / plan.size[2], n % plan.size[2]};
  if (!interpolates(plan)) return list_window(plan, voxel, &scratch->taps);
  const int64_t group = part.head / (plan.heads / plan.groups);
  const int64_t at = ((part.b * plan.voxels + n) * plan.groups + group) * plan.channels;
  place_taps(plan, offsets + at, voxel, scratch->position, &scratch->taps);
  list_voxels(plan, &scratch->taps);
}

void forward(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *block) {
  const RowProducts &products = row_products(plan.head_dim);
  const megaslide_attention_inputs &in = arrays.in;
  const Rows rows = rows_of(plan, part);
  const int64_t d = plan.head_dim, taps = padded(plan.taps);
  Scratch s;
  divide(plan, block, &s);
  for (int64_t n = part.first; n < part.last; ++n) {
    find_taps(plan, in.offsets, part, n, &s);
    const List list = listed(plan, s.taps);
    const float *q = in.q + rows.volume + n * plan.row;
    products.dots(q, in.k + rows.volume, list, d, interpolates(plan) ? s.scores : s.probability);
    if (interpolates(plan)) interpolate_taps(plan, s.taps, s.scores, s.probability);
    if (plan.extra > 0) {
      products.dots(q, in.extra_k + rows.extra, extra_list(plan), d, s.probability + taps);
    }
    const float lse = softmax(plan, s.probability);
    const float *weights = s.probability;
    if (interpolates(plan)) {
      fill(s.weights, padded(list.count), 0.0f);
      spread_taps(plan, s.taps, s.probability, s.weights);
      weights = s.weights;
    }
    float *out = arrays.out + rows.volume + n * plan.row;
    products.combine(weights, in.v + rows.volume, list, d, false, out);
    if (plan.extra > 0) {
      products.combine(s.probability + taps, in.extra_v + rows.extra, extra_list(plan), d, true,
                       out);
    }
    arrays.lse[(part.b * plan.voxels + n) * plan.heads + part.head] = lse;
  }
}

// P and dS of scores s and value products g that are not interpolated; s and g in place.
void slopes_of(const Plan &plan, int64_t count, float lse, float mean, float *__restrict s,
               float *__restrict g) {
  for (int64_t i = 0; i < count; ++i) {
    s[i] = exponential(plan.scale * s[i] - lse);
    g[i] = plan.scale * s[i] * (g[i] - mean);
  }
  fill(s + count, padded(count) - count, 0.0f);
  fill(g + count, padded(count) - count, 0.0f);
}

// P, dS and the gradient of the coordinates, of taps that are interpolated.
void slopes_of_taps(const Plan &plan, float lse, float mean, const Scratch &scratch) {
  const Taps &taps = scratch.taps;
  const int64_t count = padded(plan.taps), t = taps.step[0], h = taps.step[1], w = taps.step[2];
  const float scale = plan.scale;
  const int32_t *__restrict first = taps.first;
  const float *__restrict scores = scratch.scores, *__restrict values = scratch.values;
  const float *__restrict at = taps.above[0], *__restrict ah = taps.above[1],
              *__restrict aw = taps.above[2];
  const float *__restrict it = taps.inside[0], *__restrict ih = taps.inside[1],
              *__restrict iw = taps.inside[2];
  float *__restrict probability = scratch.probability, *__restrict slope = scratch.slope;
  float *__restrict pull_t = scratch.pull[0], *__restrict pull_h = scratch.pull[1],
                    *__restrict pull_w = scratch.pull[2];
  MEGASLIDE_INDEPENDENT
  for (int64_t j = 0; j < count; ++j) {
    const Corners s = corners_at(scores, first[j], t, h, w);
    const Corners g = corners_at(values, first[j], t, h, w);
    const float p = exponential(scale * interpolate(s, at[j], ah[j], aw[j]) - lse);
    const float ds = scale * p * (interpolate(g, at[j], ah[j], aw[j]) - mean);
    const Corners moved = blend(ds, s, p, g);
    pull_t[j] = it[j] * along_t(moved, ah[j], aw[j]);
    pull_h[j] = ih[j] * along_h(moved, at[j], aw[j]);
    pull_w[j] = iw[j] * along_w(moved, at[j], ah[j]);
    probability[j] = p;
    slope[j] = ds;
  }
  float *const padded_arrays[] = {probability, slope, pull_t, pull_h, pull_w};
  for (float *array : padded_arrays) fill(array + plan.taps, count - plan.taps, 0.0f);
}

// Gradient of one query's offsets from that of its taps' coordinates.
void pull_offsets(const Plan &plan, const Scratch &scratch, float *to) {
  const int64_t count = padded(plan.taps);
  for (int axis = 0; axis < 3; ++axis) {
    const float *pull = scratch.pull[axis];
    if (plan.kind == MEGASLIDE_OFFSETS_TAP) {
      for (int64_t j = 0; j < plan.taps; ++j) to[3 * j + axis] = pull[j];
      continue;
    }
    to[axis] = scratch.taps.slides[axis] ? total(pull, count) : 0.0f;
    for (int by = 0; by < 3 && plan.kind == MEGASLIDE_OFFSETS_AFFINE; ++by) {
      Vec<kLanes> sum = {};
      for (int64_t j = 0; j < count; j += kLanes) {
        sum += load<kLanes>(plan.centred[by] + j) * load<kLanes>(pull + j);
      }
      to[3 + 3 * by + axis] = sum_lanes<kLanes>(sum);
    }
  }
}

// One query's extra keys: adds to dq and to the extra keys' gradients.
void backward_extra(const Plan &plan, const BackwardArrays &arrays, const RowProducts &products,
                    int64_t row, int64_t extra, float lse, float mean, const Scratch &s) {
  const int64_t d = plan.head_dim, taps = padded(plan.taps);
  const float *q = arrays.in.q + row, *grad_out = arrays.grad_out + row;
  float *probability = s.probability + taps, *slope = s.slope + taps;
  const List list = extra_list(plan);
  products.dots(q, arrays.in.extra_k + extra, list, d, probability);
  products.dots(grad_out, arrays.in.extra_v + extra, list, d, slope);
  slopes_of(plan, plan.extra, lse, mean, probability, slope);
  products.combine(slope, arrays.in.extra_k + extra, list, d, true, arrays.grad.q + row);
  products.add_outer(slope, q, list, d, arrays.grad.extra_k + extra);
  products.add_outer(probability, grad_out, list, d, arrays.grad.extra_v + extra);
}

// A and dA over the list, from the scores and value products there.
void weigh_voxels(const Plan &plan, float lse, float mean, Scratch *s) {
  const int64_t count = padded(s->taps.count);
  if (!interpolates(plan)) return slopes_of(plan, s->taps.count, lse, mean, s->weights, s->slopes);
  slopes_of_taps(plan, lse, mean, *s);
  fill(s->weights, count, 0.0f);
  fill(s->slopes, count, 0.0f);
  spread_taps(plan, s->taps, s->probability, s->weights);
  spread_taps(plan, s->taps, s->slope, s->slopes);
}

void backward(const Plan &plan, const BackwardArrays &arrays, const Part &part, void *block) {
  const RowProducts &products = row_products(plan.head_dim);
  const megaslide_attention_inputs &in = arrays.in;
  const megaslide_attention_gradients &grad = arrays.grad;
  const Rows rows = rows_of(plan, part);
  const int64_t d = plan.head_dim;
  Scratch s;
  divide(plan, block, &s);
  for (int64_t n = part.first; n < part.last; ++n) {
    find_taps(plan, in.offsets, part, n, &s);
    const List list = listed(plan, s.taps);
    const int64_t row = rows.volume + n * plan.row;
    const float *q = in.q + row, *grad_out = arrays.grad_out + row;
    const float lse = arrays.lse[(part.b * plan.voxels + n) * plan.heads + part.head];
    const float mean = dot(grad_out, arrays.out + row, d);  // of dP under P
    products.dots(q, in.k + rows.volume, list, d, interpolates(plan) ? s.scores : s.weights);
    products.dots(grad_out, in.v + rows.volume, list, d, interpolates(plan) ? s.values : s.slopes);
    weigh_voxels(plan, lse, mean, &s);
    products.combine(s.slopes, in.k + rows.volume, list, d, false, grad.q + row);
    products.add_outer(s.slopes, q, list, d, grad.k + rows.volume);
    products.add_outer(s.weights, grad_out, list, d, grad.v + rows.volume);
    if (plan.extra > 0) backward_extra(plan, arrays, products, row, rows.extra, lse, mean, s);
    if (arrays.offsets != nullptr) {
      pull_offsets(plan, s, arrays.offsets + (n - part.first) * arrays.offset_row);
    }
  }
}

}  // namespace

namespace MEGASLIDE_ISA {
extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {scratch_bytes, forward, backward};
}  // namespace MEGASLIDE_ISA

}  // namespace megaslide
