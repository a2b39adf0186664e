// 3D-DSA for one instruction set, query by query: O(K + E) scratch, no K x head_dim array. Takes
// every shape and every displacement.
#include <cstdint>

#include "deformable_attention.h"
#include "queries.h"
#include "rows.h"
#include "touched.h"

namespace megaslide {
namespace {

struct Scratch {
  QueryScratch query;
  Touched touched;
  int32_t *voxel;              // [capacity] the query's list
  float *packed;               // [capacity] numbers over the list, where it is not the whole box
  float *scores, *values;      // [capacity] s and g over the box
  float *weights, *slopes;     // [capacity] A and dA over the box
  float *q, *grad_out, *sum;   // [head_dim] the query's rows and a result in fp32
};

int64_t divide(const Plan &plan, void *block, Scratch *scratch) {
  Arena arena{static_cast<char *>(block), 0};
  divide(plan, &arena, &scratch->query);
  const int64_t capacity = padded(plan.capacity) + kSlack;
  scratch->touched.lines = arena.take<uint64_t>(most_lines(plan));
  scratch->touched.list = arena.take<int32_t>(most_lines(plan) + 1);
  scratch->touched.box = arena.take<int32_t>(most_lines(plan) + 1);
  scratch->voxel = arena.take<int32_t>(capacity);
  float **const lists[] = {&scratch->packed, &scratch->scores, &scratch->values,
                           &scratch->weights, &scratch->slopes};
  for (float **list : lists) *list = arena.take<float>(capacity);
  float **const rows[] = {&scratch->q, &scratch->grad_out, &scratch->sum};
  for (float **row : rows) *row = arena.take<float>(plan.head_dim);
  return arena.used;
}

int64_t scratch_bytes(const Plan &plan) {
  Scratch scratch;
  return divide(plan, nullptr, &scratch);
}

inline float dot(const float *x, const float *y, int64_t d) {
  const int64_t whole = d / kLanes * kLanes;
  Floats lanes = {};
  for (int64_t c = 0; c < whole; c += kLanes) lanes += load<kLanes>(x + c) * load<kLanes>(y + c);
  float sum = sum_lanes<kLanes>(lanes);
  for (int64_t c = whole; c < d; ++c) sum += x[c] * y[c];
  return sum;
}

// A row as fp32: itself, or a copy in `to`.
inline const float *floats(const float *from, int64_t, float *) { return from; }

inline const float *floats(const Bfloat16 *from, int64_t d, float *to) {
  for (int64_t c = 0; c < d; ++c) to[c] = widen(from[c]);
  return to;
}

// Rows of one batch element and head.
struct Rows {
  int64_t volume, extra;  // first element, in arrays like q and like extra_k
};

inline Rows rows_of(const Plan &plan, const Part &part) {
  const int64_t head = part.head * plan.head_dim;
  return {part.b * plan.voxels * plan.row + head, part.b * plan.extra * plan.row + head};
}

inline List extra_list(const Plan &plan) { return {plan.iota, plan.row, plan.extra}; }

// Products with the query's list, at their places in its box.
template <typename T>
void dots(const RowProducts<T> &products, const float *x, const T *rows, const List &list,
          int64_t d, const Scratch &s, float *box) {
  float *to = packed_or(s.touched, box, s.packed);
  products.dots(x, rows, list, d, to);
  place(s.touched, to, box);
}

template <typename T>
bool forward(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *block) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const auto &in = arrays.in;
  const Rows rows = rows_of(plan, part);
  const T *k = static_cast<const T *>(in.k) + rows.volume;
  const T *v = static_cast<const T *>(in.v) + rows.volume;
  // Null where there are none, and then `rows.extra` is no offset to add.
  const T *extra_k = static_cast<const T *>(in.extra_k) + (plan.extra > 0 ? rows.extra : 0);
  const T *extra_v = static_cast<const T *>(in.extra_v) + (plan.extra > 0 ? rows.extra : 0);
  const int64_t d = plan.head_dim, taps = padded(plan.taps);
  Scratch s;
  divide(plan, block, &s);
  const Tile tile = tile_at(plan, part.tile);
  for (int64_t i = 0; i < tile.count; ++i) {
    const Query query = query_at(plan, tile, i);
    place_query(plan, in.offsets, part, query, &s.query.taps);
    const List list = {s.voxel, plan.row,
                       list_voxels(plan, &s.query.taps, &s.touched, s.voxel)};
    const int64_t row = rows.volume + query.n * plan.row;
    const float *q = floats(static_cast<const T *>(in.q) + row, d, s.q);
    float *probability = s.query.probability;
    dots(products, q, k, list, d, s, s.scores);
    interpolate_query(plan, s.query, s.scores, s.query.score_grid, probability);
    if (plan.extra > 0) products.dots(q, extra_k, extra_list(plan), d, probability + taps);
    arrays.lse[(part.b * plan.voxels + query.n) * plan.heads + part.head] =
        softmax(plan, probability);
    fill(s.weights, padded(s.touched.cells), 0.0f);
    spread_query(plan, s.query, probability, s.weights);
    products.combine(pack(s.touched, s.weights, s.packed), v, list, d, false, s.sum);
    if (plan.extra > 0) {
      products.combine(probability + taps, extra_v, extra_list(plan), d, true, s.sum);
    }
    narrow(s.sum, d, static_cast<T *>(arrays.out) + row);
  }
  return true;
}

// One query's extra keys: adds to dq and to the extra keys' gradients.
template <typename T>
void backward_extra(const Plan &plan, const BackwardArrays &arrays, int64_t extra, float lse,
                    float mean, const float *q, const float *grad_out, const Scratch &s) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const int64_t d = plan.head_dim, taps = padded(plan.taps);
  const T *extra_k = static_cast<const T *>(arrays.in.extra_k) + extra;
  float *probability = s.query.probability + taps, *slope = s.query.slope + taps;
  const List list = extra_list(plan);
  products.dots(q, extra_k, list, d, probability);
  products.dots(grad_out, static_cast<const T *>(arrays.in.extra_v) + extra, list, d, slope);
  slopes_of(plan, plan.extra, lse, mean, probability, slope);
  products.combine(slope, extra_k, list, d, true, s.sum);
  products.add_outer(slope, q, list, d, arrays.grad.extra_k + extra);
  products.add_outer(probability, grad_out, list, d, arrays.grad.extra_v + extra);
}

template <typename T>
bool backward(const Plan &plan, const BackwardArrays &arrays, const Part &part, void *block) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const auto &in = arrays.in;
  const Rows rows = rows_of(plan, part);
  const T *k = static_cast<const T *>(in.k) + rows.volume;
  const T *v = static_cast<const T *>(in.v) + rows.volume;
  const int64_t d = plan.head_dim;
  Scratch s;
  divide(plan, block, &s);
  const Tile tile = tile_at(plan, part.tile);
  for (int64_t i = 0; i < tile.count; ++i) {
    const Query query = query_at(plan, tile, i);
    place_query(plan, in.offsets, part, query, &s.query.taps);
    const List list = {s.voxel, plan.row,
                       list_voxels(plan, &s.query.taps, &s.touched, s.voxel)};
    const int64_t row = rows.volume + query.n * plan.row;
    const float *q = floats(static_cast<const T *>(in.q) + row, d, s.q);
    const float *grad_out = floats(static_cast<const T *>(arrays.grad_out) + row, d, s.grad_out);
    const float *out = floats(static_cast<const T *>(arrays.out) + row, d, s.sum);
    const float lse = arrays.lse[(part.b * plan.voxels + query.n) * plan.heads + part.head];
    const float mean = dot(grad_out, out, d);  // of dP under P
    dots(products, q, k, list, d, s, s.scores);
    dots(products, grad_out, v, list, d, s, s.values);
    fill(s.weights, padded(s.touched.cells), 0.0f);
    fill(s.slopes, padded(s.touched.cells), 0.0f);
    weigh_query(plan, lse, mean, s.query, s.scores, s.values, s.weights, s.slopes,
                offsets_at(arrays, part, query, i));
    const float *slopes = pack(s.touched, s.slopes, s.packed);
    products.combine(slopes, k, list, d, false, s.sum);
    products.add_outer(slopes, q, list, d, arrays.grad.k + rows.volume);
    const float *weights = pack(s.touched, s.weights, s.packed);
    products.add_outer(weights, grad_out, list, d, arrays.grad.v + rows.volume);
    if (plan.extra > 0) {
      backward_extra<T>(plan, arrays, rows.extra, lse, mean, q, grad_out, s);
    }
    narrow(s.sum, d, static_cast<T *>(arrays.grad.q) + row);
  }
  return true;
}

bool forward_any(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *block) {
  return (plan.dtype == MEGASLIDE_FLOAT32 ? forward<float> : forward<Bfloat16>)(plan, arrays, part,
                                                                                block);
}

bool backward_any(const Plan &plan, const BackwardArrays &arrays, const Part &part, void *block) {
  return (plan.dtype == MEGASLIDE_FLOAT32 ? backward<float> : backward<Bfloat16>)(plan, arrays,
                                                                                  part, block);
}

}  // namespace

namespace MEGASLIDE_ISA {
extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {scratch_bytes, forward_any, backward_any};
}  // namespace MEGASLIDE_ISA

}  // namespace megaslide
