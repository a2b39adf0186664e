// 3D-DSA for one instruction set: O(K + E) scratch per query of a tile, no K x head_dim array.
// Takes every shape and every displacement.
#include <cstdint>

#include "deformable_attention.h"
#include "queries.h"
#include "rows.h"
#include "touched.h"

namespace megaslide {
namespace {

// One query of a tile, and where it stands in the tile's lists.
struct Visit {
  Query query;
  Taps taps;
  Touched touched;
  int64_t at, count;
  int32_t first;  // voxel from which its list counts
};

struct Scratch {
  QueryScratch query;
  Visit visits[kTileQueries];
  int64_t queries;
  uint64_t *lines;                  // of one query's box
  int32_t *runs[2];                 // of all queries, in the list and in the box
  int32_t *voxel;                   // [queries, capacity] their lists, where they have their own
  Chunk *unsorted, *chunks;         // of the lists, query by query and in order
  int64_t chunk_count;
  int32_t *bucket_of, *bucket;      // of each chunk; of sort_chunks
  Chunk *extra_chunks;              // of the extra keys of one query
  float *q, *grad_out, *sum;        // [queries, head_dim] rows and results in fp32
  float *scores, *values;           // [queries, capacity] s and g over the lists
  float *weights, *slopes;          // of A and dA; in place of s and g, but for rigid grids
  float *box_scores, *box_values;   // [capacity] one query's, over its box
  float *box_weights, *box_slopes;
};

struct Buckets {
  int32_t low, high;  // those that occur
};

// Chunks are sorted by the number of a voxel without these bits: at most a line along w.
inline int bucket_bits(const Plan &plan) {
  return 63 - __builtin_clzll(static_cast<uint64_t>(plan.size[2]));
}

int64_t divide(const Plan &plan, void *block, Scratch *scratch) {
  Arena arena{static_cast<char *>(block), 0};
  divide(plan, &arena, &scratch->query);
  for (Visit &visit : scratch->visits) {
    visit.taps = scratch->query.taps;
    if (!rigid(plan)) take_taps(plan, &arena, &visit.taps);
  }
  const int64_t capacity = padded(plan.capacity);
  const int64_t all = kTileQueries * (capacity + kPad) + kSlack;
  scratch->lines = arena.take<uint64_t>(most_lines(plan));
  for (int32_t *&runs : scratch->runs) {
    runs = arena.take<int32_t>(kTileQueries * (most_lines(plan) + 1));
  }
  scratch->voxel = arena.take<int32_t>(rigid(plan) ? 0 : all);
  scratch->unsorted = arena.take<Chunk>(all / kPad);
  scratch->chunks = arena.take<Chunk>(all / kPad);
  scratch->bucket_of = arena.take<int32_t>(all / kPad);
  scratch->bucket = arena.take<int32_t>((plan.voxels >> bucket_bits(plan)) + 2);
  scratch->extra_chunks = arena.take<Chunk>(padded(plan.extra) / kPad);
  float **const rows[] = {&scratch->q, &scratch->grad_out, &scratch->sum};
  for (float **row : rows) *row = arena.take<float>(kTileQueries * plan.head_dim);
  scratch->scores = arena.take<float>(all);
  scratch->values = arena.take<float>(all);
  scratch->weights = rigid(plan) ? arena.take<float>(all) : scratch->scores;
  scratch->slopes = rigid(plan) ? arena.take<float>(all) : scratch->values;
  float **const boxes[] = {&scratch->box_scores, &scratch->box_values, &scratch->box_weights,
                           &scratch->box_slopes};
  for (float **box : boxes) *box = arena.take<float>(capacity + kSlack);
  return arena.used;
}

int64_t scratch_bytes(const Plan &plan) {
  Scratch scratch;
  return divide(plan, nullptr, &scratch);
}

// ---- lists of a tile --------------------------------------------------------------------------

// The numbers of the voxels of all lists, or of the one that the queries of rigid grids share.
inline const int32_t *lists(const Plan &plan, const Scratch &s) {
  return rigid(plan) ? plan.beyond : s.voxel;
}

// The chunks of all lists, query by query, and the bucket of each: that of its first voxel.
Buckets cut_lists(const Plan &plan, Scratch *s) {
  const int shift = bucket_bits(plan);
  const int32_t *const voxel = lists(plan, *s);
  Buckets buckets = {INT32_MAX, 0};
  s->chunk_count = 0;
  for (int64_t i = 0; i < s->queries; ++i) {
    const Visit &visit = s->visits[i];
    for (int64_t e = 0; e < visit.count; e += kPad) {
      const int64_t left = visit.count - e;
      const int64_t index = rigid(plan) ? e : visit.at + e;
      const int32_t bucket = (visit.first + voxel[index]) >> shift;
      buckets.low = bucket < buckets.low ? bucket : buckets.low;
      buckets.high = bucket > buckets.high ? bucket : buckets.high;
      s->bucket_of[s->chunk_count] = bucket;
      s->unsorted[s->chunk_count++] = {static_cast<int32_t>(i), static_cast<int32_t>(visit.at + e),
                                       static_cast<int32_t>(left < kPad ? left : kPad),
                                       static_cast<int32_t>(index), visit.first};
    }
  }
  return buckets;
}

// Chunks by buckets of about a line along w: queries of a tile that read the same rows do so one
// after the other, while the processor's first cache holds them.
void sort_chunks(const Buckets &buckets, Scratch *s) {
  const int32_t low = buckets.low, count = buckets.high - low + 1;
  int32_t *const first = s->bucket;  // chunk of each bucket, from `low` on
  for (int32_t b = 0; b <= count; ++b) first[b] = 0;
  for (int64_t n = 0; n < s->chunk_count; ++n) ++first[s->bucket_of[n] - low + 1];
  for (int32_t b = 0; b + 1 < count; ++b) first[b + 1] += first[b];
  for (int64_t n = 0; n < s->chunk_count; ++n) {
    s->chunks[first[s->bucket_of[n] - low]++] = s->unsorted[n];
  }
}

void list_tile(const Plan &plan, const float *offsets, const Part &part, Scratch *s) {
  const Tile tile = tile_at(plan, part.tile);
  int64_t at = 0, runs = 0;
  s->queries = tile.count;
  for (int64_t i = 0; i < tile.count; ++i) {
    Visit &visit = s->visits[i];
    visit.query = query_at(plan, tile, i);
    visit.touched.lines = s->lines;
    visit.touched.list = s->runs[0] + runs;
    visit.touched.box = s->runs[1] + runs;
    place_query(plan, offsets, part, visit.query, &visit.taps);
    visit.at = at;
    if (rigid(plan)) {
      visit.first = static_cast<int32_t>(first_of_grid(plan, visit.taps));
      visit.count = take_grid(plan, &visit.taps, &visit.touched);
    } else {
      visit.first = 0;
      visit.count = list_voxels(plan, &visit.taps, &visit.touched, s->voxel + at);
    }
    at += padded(visit.count) + kPad;  // pack() writes beyond a list's end, where s and g still are
    runs += visit.touched.runs + 1;
  }
  sort_chunks(cut_lists(plan, s), s);
  for (int64_t e = 0; e < plan.extra; e += kPad) {
    const int64_t left = plan.extra - e;
    const auto at = static_cast<int32_t>(e);
    s->extra_chunks[e / kPad] = {0, at, static_cast<int32_t>(left < kPad ? left : kPad), at, 0};
  }
}

inline Chunks chunks_of(const Plan &plan, const Scratch &s) {
  return {s.chunks, s.chunk_count, lists(plan, s)};
}

inline Chunks extra_chunks_of(const Plan &plan, const Scratch &s) {
  return {s.extra_chunks, padded(plan.extra) / kPad, plan.iota};
}

// ---- pieces -----------------------------------------------------------------------------------

inline float dot(const float *x, const float *y, int64_t d) {
  const int64_t whole = d / kLanes * kLanes;
  Floats lanes = {};
  for (int64_t c = 0; c < whole; c += kLanes) lanes += load<kLanes>(x + c) * load<kLanes>(y + c);
  float sum = sum_lanes<kLanes>(lanes);
  for (int64_t c = whole; c < d; ++c) sum += x[c] * y[c];
  return sum;
}

inline void widen_row(const float *from, int64_t d, float *to) {
  for (int64_t c = 0; c < d; ++c) to[c] = from[c];
}

inline void widen_row(const Bfloat16 *from, int64_t d, float *to) {
  for (int64_t c = 0; c < d; ++c) to[c] = widen(from[c]);
}

// First element of one batch element and head in an array like q.
inline int64_t first_of(const Plan &plan, const Part &part) {
  return part.b * plan.voxels * plan.row + part.head * plan.head_dim;
}

// The rows of a tile's queries in an array like q.
template <typename T>
void widen_rows(const Plan &plan, const Scratch &s, const void *volume, int64_t first, float *to) {
  for (int64_t i = 0; i < s.queries; ++i) {
    const T *row = static_cast<const T *>(volume) + first + s.visits[i].query.n * plan.row;
    widen_row(row, plan.head_dim, to + i * plan.head_dim);
  }
}

template <typename T>
void narrow_rows(const Plan &plan, const Scratch &s, int64_t first, void *volume) {
  for (int64_t i = 0; i < s.queries; ++i) {
    T *row = static_cast<T *>(volume) + first + s.visits[i].query.n * plan.row;
    narrow(s.sum + i * plan.head_dim, plan.head_dim, row);
  }
}

// ---- forward ----------------------------------------------------------------------------------

// From one query's scores to its weights; adds to `sum` what the extra keys give. Returns lse.
template <typename T>
float weigh_forward(const Plan &plan, const ForwardArrays &arrays, int64_t i, Scratch *s) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const Visit &visit = s->visits[i];
  const int64_t d = plan.head_dim, places = padded(plan.places);
  const Chunks keys = extra_chunks_of(plan, *s);
  float *probability = s->query.probability;
  s->query.taps = visit.taps;
  const float *scores = place(visit.touched, s->scores + visit.at, s->box_scores);
  interpolate_query(plan, s->query, scores, s->query.score_grid, probability);
  if (plan.extra > 0) {
    const T *rows = static_cast<const T *>(arrays.keys.extra_k);
    products.dots(keys, s->q + i * d, rows, d, probability + places);
  }
  const float lse = softmax(plan, probability);
  float *weights = box_or(visit.touched, s->weights + visit.at, s->box_weights);
  if (!rigid(plan)) fill(weights, padded(visit.touched.cells), 0.0f);
  spread_query(plan, s->query, probability, weights);
  pack(visit.touched, weights, s->weights + visit.at);
  if (plan.extra > 0) {
    const T *rows = static_cast<const T *>(arrays.keys.extra_v);
    products.combine(keys, probability + places, rows, d, s->sum + i * d);
  }
  return lse;
}

template <typename T>
bool forward(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *block) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const int64_t first = first_of(plan, part);
  const int64_t d = plan.head_dim;
  Scratch s;
  divide(plan, block, &s);
  list_tile(plan, arrays.offsets, part, &s);
  const Chunks chunks = chunks_of(plan, s);
  widen_rows<T>(plan, s, arrays.q, first, s.q);
  products.dots(chunks, s.q, static_cast<const T *>(arrays.keys.k), d, s.scores);
  fill(s.sum, s.queries * d, 0.0f);
  for (int64_t i = 0; i < s.queries; ++i) {
    arrays.lse[(part.b * plan.voxels + s.visits[i].query.n) * plan.heads + part.head] =
        weigh_forward<T>(plan, arrays, i, &s);
  }
  products.combine(chunks, s.weights, static_cast<const T *>(arrays.keys.v), d, s.sum);
  narrow_rows<T>(plan, s, first, arrays.out);
  return true;
}

// ---- backward ---------------------------------------------------------------------------------

// One query's extra keys: adds to dq and to the extra keys' gradients.
template <typename T>
void backward_extra(const Plan &plan, const BackwardArrays &arrays, float lse, float mean,
                    int64_t i, const Scratch &s) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const int64_t d = plan.head_dim, places = padded(plan.places);
  const T *extra_k = static_cast<const T *>(arrays.keys.extra_k);
  const T *extra_v = static_cast<const T *>(arrays.keys.extra_v);
  const float *q = s.q + i * d, *grad_out = s.grad_out + i * d;
  float *probability = s.query.probability + places, *slope = s.query.slope + places;
  const Chunks keys = extra_chunks_of(plan, s);
  products.dots(keys, q, extra_k, d, probability);
  products.dots(keys, grad_out, extra_v, d, slope);
  slopes_of(plan, plan.extra, lse, mean, probability, slope);
  products.combine(keys, slope, extra_k, d, s.sum + i * d);
  products.add_outer(keys, slope, q, d, arrays.grad.extra_k);
  products.add_outer(keys, probability, grad_out, d, arrays.grad.extra_v);
}

// From one query's products to its weights A and dA. `mean` is that of dP under P.
void weigh_backward(const Plan &plan, float lse, float mean, int64_t i, float *offsets,
                    Scratch *s) {
  const Visit &visit = s->visits[i];
  s->query.taps = visit.taps;
  const float *scores = place(visit.touched, s->scores + visit.at, s->box_scores);
  const float *values = place(visit.touched, s->values + visit.at, s->box_values);
  float *weights = box_or(visit.touched, s->weights + visit.at, s->box_weights);
  float *slopes = box_or(visit.touched, s->slopes + visit.at, s->box_slopes);
  const int64_t zeros = rigid(plan) ? 0 : padded(visit.touched.cells);
  fill(weights, zeros, 0.0f);
  fill(slopes, zeros, 0.0f);
  weigh_query(plan, lse, mean, s->query, scores, values, weights, slopes, offsets);
  pack(visit.touched, weights, s->weights + visit.at);
  pack(visit.touched, slopes, s->slopes + visit.at);
}

template <typename T>
bool backward(const Plan &plan, const BackwardArrays &arrays, const Part &part, void *block) {
  const RowProducts<T> &products = row_products<T>(plan.head_dim);
  const int64_t first = first_of(plan, part);
  const T *k = static_cast<const T *>(arrays.keys.k);
  const T *v = static_cast<const T *>(arrays.keys.v);
  const int64_t d = plan.head_dim;
  Scratch s;
  divide(plan, block, &s);
  list_tile(plan, arrays.offsets, part, &s);
  const Chunks chunks = chunks_of(plan, s);
  widen_rows<T>(plan, s, arrays.q, first, s.q);
  widen_rows<T>(plan, s, arrays.grad_out, first, s.grad_out);
  widen_rows<T>(plan, s, arrays.out, first, s.sum);
  products.dots(chunks, s.q, k, d, s.scores);
  products.dots(chunks, s.grad_out, v, d, s.values);
  for (int64_t i = 0; i < s.queries; ++i) {
    const Query &query = s.visits[i].query;
    const float lse = arrays.lse[(part.b * plan.voxels + query.n) * plan.heads + part.head];
    const float mean = dot(s.grad_out + i * d, s.sum + i * d, d);
    fill(s.sum + i * d, d, 0.0f);
    weigh_backward(plan, lse, mean, i, offsets_at(plan, arrays, i), &s);
    if (plan.extra > 0) backward_extra<T>(plan, arrays, lse, mean, i, s);
  }
  products.combine(chunks, s.slopes, k, d, s.sum);
  products.add_outer(chunks, s.slopes, s.q, d, arrays.grad.k);
  products.add_outer(chunks, s.weights, s.grad_out, d, arrays.grad.v);
  narrow_rows<T>(plan, s, first, arrays.grad_q);
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
