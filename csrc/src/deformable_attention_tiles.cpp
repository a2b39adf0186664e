// 3D-DSA in bf16 for a tile of queries, with the matrix tiles of AMX.
//
// The queries of a tile read overlapping voxels, so products with all voxels of the box that
// encloses their taps are one dense product per 16 queries. Each query then finds its taps in its
// row of scores, and leaves its weights in a row over the same box:
//
//   S = Q K', G = dO V'                   [16, columns]
//   O = A V, dQ = dA K                    [16, head_dim]
//   dK' = Q' dA, dV' = dO' A              [head_dim, 16 columns], over all queries of the tile
//
// Columns are the voxels of the box, then the extra keys, then zeros up to a multiple of 32. Sums
// are fp32; A and dA are rounded to bf16 as weights of a product.
//
// A matrix tile is 16 rows of 64 bytes. The left operand holds 16 rows of 32 numbers; the right
// one 16 rows, each of a pair of numbers that follow each other along the sum, for 16 columns.
#include <cstdint>

#include "deformable_attention.h"
#include "queries.h"
#include "rows.h"
#if defined(MEGASLIDE_EMULATED_TILES)
#include "../tests/emulated_tiles.h"
#endif

namespace megaslide {
namespace {

// ---- the rule ---------------------------------------------------------------------------------

// Wider boxes would leave the processor's second cache, and hold little that a query reads.
constexpr int64_t kMostColumns = 4096;
constexpr int64_t kMostHeadDim = 256;

constexpr int64_t kRows = 16, kPairs = 16, kDepth = 32, kBytes = 1024;  // of a matrix tile

inline int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Scratch {
  QueryScratch query;
  int32_t *voxel;                          // [columns + kSlack]
  const uint16_t **rows;                   // [columns] where they come from, null for zeros
  uint16_t *key_columns, *value_columns;   // K', V' as right operands [columns/16, d/32]
  uint16_t *pair_rows;                     // V, backward K, as a right operand [columns/32, d/16]
  uint16_t *left, *left_too;               // Q, dO of 16 queries as left operands [d/32]
  float *scores, *values;                  // [16, stride]
  uint16_t *weights;                       // [16, stride] A, backward dA, as a left operand
  float *line[2][2];                       // [stride] A and dA of two queries
  float *sum;                              // [16, d]
  // Backward alone:
  uint32_t *pairs[2];                      // [32, stride] A and dA of pairs of queries
  uint16_t *turned[2];                     // dO' and Q' as left operands [d/16, 2]
};

struct Widths {
  int64_t columns;
  int64_t stride;  // of rows over columns; not a power of two, whose rows would share cache sets
  int64_t d;       // padded head_dim
};

Widths widths_of(const Plan &plan, int64_t columns) {
  return {columns, columns + kSlack + kRows, rounded(plan.head_dim, kDepth)};
}

int64_t divide(const Plan &plan, const Widths &most, void *block, Scratch *s) {
  Arena arena{static_cast<char *>(block), 0};
  divide(plan, &arena, &s->query);
  s->voxel = arena.take<int32_t>(most.columns + kSlack);
  s->rows = arena.take<const uint16_t *>(most.columns);
  uint16_t **const operands[] = {&s->key_columns, &s->value_columns, &s->pair_rows};
  for (uint16_t **operand : operands) *operand = arena.take<uint16_t>(most.columns * most.d);
  s->left = arena.take<uint16_t>(kRows * most.d);
  s->left_too = arena.take<uint16_t>(kRows * most.d);
  s->scores = arena.take<float>(kRows * most.stride);
  s->values = arena.take<float>(kRows * most.stride);
  s->weights = arena.take<uint16_t>(kRows * most.stride);
  for (auto &of_query : s->line) {
    for (float *&line : of_query) line = arena.take<float>(most.stride);
  }
  s->sum = arena.take<float>(kRows * most.d);
  for (uint32_t *&pairs : s->pairs) pairs = arena.take<uint32_t>(kTileQueries / 2 * most.stride);
  for (uint16_t *&turned : s->turned) turned = arena.take<uint16_t>(kTileQueries * most.d);
  return arena.used;
}

int64_t most_columns(const Plan &plan) {
  const int64_t all = rounded(2 * plan.voxels + plan.extra, kDepth);  // 2: see Box
  return all < kMostColumns ? all : kMostColumns;
}

int64_t scratch_bytes(const Plan &plan) {
  Scratch scratch;
  return divide(plan, widths_of(plan, most_columns(plan)), nullptr, &scratch);
}

// ---- rearranging ------------------------------------------------------------------------------

typedef __m512i Words;

// Transposes a 16 x 16 matrix of 32-bit numbers.
MEGASLIDE_INLINE void transpose(Words *x) {
  Words a[16];
  MEGASLIDE_UNROLL(8)
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_maskz_unpacklo_epi32(0xffff, x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, x[2 * i], x[2 * i + 1]);
  }
  MEGASLIDE_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = _mm512_maskz_unpacklo_epi64(0xff, a[4 * i], a[4 * i + 2]);
    x[4 * i + 1] = _mm512_maskz_unpackhi_epi64(0xff, a[4 * i], a[4 * i + 2]);
    x[4 * i + 2] = _mm512_maskz_unpacklo_epi64(0xff, a[4 * i + 1], a[4 * i + 3]);
    x[4 * i + 3] = _mm512_maskz_unpackhi_epi64(0xff, a[4 * i + 1], a[4 * i + 3]);
  }
  MEGASLIDE_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_maskz_shuffle_i32x4(0xffff, x[i], x[4 + i], 0x88);
    a[4 + i] = _mm512_maskz_shuffle_i32x4(0xffff, x[i], x[4 + i], 0xdd);
    a[8 + i] = _mm512_maskz_shuffle_i32x4(0xffff, x[8 + i], x[12 + i], 0x88);
    a[12 + i] = _mm512_maskz_shuffle_i32x4(0xffff, x[8 + i], x[12 + i], 0xdd);
  }
  MEGASLIDE_UNROLL(8)
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_maskz_shuffle_i32x4(0xffff, a[i], a[8 + i], 0x88);
    x[8 + i] = _mm512_maskz_shuffle_i32x4(0xffff, a[i], a[8 + i], 0xdd);
  }
}

// Numbers [at, at + 32) of a row of d, zeros beyond its end and for no row.
inline Words row_at(const uint16_t *row, int64_t at, int64_t d) {
  const int64_t left = row == nullptr ? 0 : d - at;
  const int64_t count = left < 0 ? 0 : left > kDepth ? kDepth : left;
  const auto some = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  return _mm512_maskz_loadu_epi16(some, row + (left > 0 ? at : 0));
}

// 16 rows as 16 columns of a right operand, their numbers along the sum.
inline void pack_columns(const uint16_t *const *rows, int64_t columns, int64_t d, int64_t width,
                         uint16_t *to) {
  for (int64_t column = 0; column < columns; column += kRows) {
    for (int64_t at = 0; at < width; at += kDepth, to += kBytes / 2) {
      Words x[kRows];
      for (int i = 0; i < kRows; ++i) x[i] = row_at(rows[column + i], at, d);
      transpose(x);
      for (int i = 0; i < kRows; ++i) _mm512_storeu_si512(to + i * kDepth, x[i]);
    }
  }
}

// a0 b0 a1 b1 ... of 16-bit numbers: the lower and the upper half.
MEGASLIDE_INLINE void interleave(Words a, Words b, Words *low, Words *high) {
  alignas(64) static constexpr uint16_t kFirst[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const Words first = _mm512_load_si512(kFirst);
  *low = _mm512_permutex2var_epi16(a, first, b);
  *high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(first, _mm512_set1_epi16(16)), b);
}

// Rows as a right operand, themselves along the sum.
inline void pack_pairs(const uint16_t *const *rows, int64_t columns, int64_t d, int64_t width,
                       uint16_t *to) {
  for (int64_t step = 0; step < columns; step += kDepth, to += kDepth * width) {
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      const uint16_t *const *both = rows + step + 2 * pair;
      for (int64_t at = 0; at < width; at += kDepth) {
        Words low, high;
        interleave(row_at(both[0], at, d), row_at(both[1], at, d), &low, &high);
        uint16_t *tile = to + at / kRows * (kBytes / 2) + pair * kDepth;
        _mm512_storeu_si512(tile, low);
        _mm512_storeu_si512(tile + kBytes / 2, high);
      }
    }
  }
}

// Rows as left operands, their numbers along the sum.
inline void pack_left(const uint16_t *const *rows, int64_t d, int64_t width, uint16_t *to) {
  for (int64_t at = 0; at < width; at += kDepth, to += kBytes / 2) {
    for (int i = 0; i < kRows; ++i) _mm512_storeu_si512(to + i * kDepth, row_at(rows[i], at, d));
  }
}

// fp32 to bf16.
inline void round_line(const float *line, int64_t columns, uint16_t *to) {
  for (int64_t c = 0; c < columns; c += kDepth) {
    const __m512 low = _mm512_loadu_ps(line + c), high = _mm512_loadu_ps(line + c + kRows);
    _mm512_storeu_si512(to + c, reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(high, low)));
  }
}

// Lines of two queries as pairs in bf16, and zeros in their place.
inline void take_pair(float *const lines[2], int64_t columns, uint32_t *to) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const Words turns = _mm512_load_si512(kTurns);
  for (int64_t c = 0; c < columns; c += kRows) {
    const __m512 first = _mm512_loadu_ps(lines[0] + c), next = _mm512_loadu_ps(lines[1] + c);
    const auto both = reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(next, first));
    _mm512_storeu_si512(to + c, _mm512_permutexvar_epi16(turns, both));
    _mm512_storeu_ps(lines[0] + c, _mm512_setzero_ps());
    _mm512_storeu_ps(lines[1] + c, _mm512_setzero_ps());
  }
}

// The tile's rows as left operands [d/16, steps], themselves along the sum; 32 in each step.
inline void pack_turned(const uint16_t *const *rows, int64_t steps, int64_t d, int64_t width,
                        uint16_t *to) {
  for (int64_t at = 0; at < width; at += kDepth) {
    for (int64_t step = 0; step < steps; ++step) {
      Words low[kPairs], high[kPairs];
      for (int64_t pair = 0; pair < kPairs; ++pair) {
        const uint16_t *const *both = rows + step * kDepth + 2 * pair;
        interleave(row_at(both[0], at, d), row_at(both[1], at, d), low + pair, high + pair);
      }
      transpose(low);
      transpose(high);
      uint16_t *tile = to + (at / kRows * steps + step) * (kBytes / 2);
      for (int i = 0; i < kRows; ++i) {
        _mm512_storeu_si512(tile + i * kDepth, low[i]);
        _mm512_storeu_si512(tile + steps * (kBytes / 2) + i * kDepth, high[i]);
      }
    }
  }
}

inline float dot(const uint16_t *x, const uint16_t *y, int64_t d) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t at = 0; at < d; at += kDepth) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row_at(x, at, d)),
                           reinterpret_cast<__m512bh>(row_at(y, at, d)));
  }
  return sum_lanes<kLanes>(Floats(sum));
}

// ---- matrix tiles -----------------------------------------------------------------------------

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile registers, from here to the end of the scope.
class TileRegisters {
 public:
  TileRegisters() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters &) = delete;
  TileRegisters &operator=(const TileRegisters &) = delete;
};

// to[16, columns] = left . columns; `to` has rows of `stride`.
inline void multiply_columns(const uint16_t *left, const uint16_t *right, int64_t columns,
                             int64_t width, int64_t stride, float *to) {
  if (width == 64) {
    _tile_loadd(4, left, 64);
    _tile_loadd(5, left + kBytes / 2, 64);
    for (int64_t column = 0; column < columns; column += kRows, right += kBytes) {
      _tile_zero(0);
      _tile_loadd(2, right, 64);
      _tile_dpbf16ps(0, 4, 2);
      _tile_loadd(3, right + kBytes / 2, 64);
      _tile_dpbf16ps(0, 5, 3);
      _tile_stored(0, to + column, stride * 4);
    }
    return;
  }
  for (int64_t column = 0; column < columns; column += kRows) {
    _tile_zero(0);
    for (int64_t at = 0; at < width; at += kDepth, right += kBytes / 2) {
      _tile_loadd(4, left + at * kRows, 64);
      _tile_loadd(2, right, 64);
      _tile_dpbf16ps(0, 4, 2);
    }
    _tile_stored(0, to + column, stride * 4);
  }
}

// to[16, d] = weights . rows, from rows packed as pairs.
inline void multiply_rows(const uint16_t *weights, int64_t stride, const uint16_t *right,
                          int64_t columns, int64_t width, float *to) {
  const int64_t step = kDepth * width;
  for (int64_t at = 0; at < width; at += kDepth) {
    _tile_zero(0);
    _tile_zero(1);
    const bool four = at + kDepth < width;
    if (four) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint16_t *tile = right + at * kRows * 2;
    for (int64_t c = 0; c < columns; c += kDepth, tile += step) {
      _tile_loadd(4, weights + c, stride * 2);
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, tile + kBytes / 2, 64);
      _tile_dpbf16ps(1, 4, 6);
      if (!four) continue;
      _tile_loadd(5, tile + kBytes, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, tile + 3 * kBytes / 2, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, to + at, width * 4);
    _tile_stored(1, to + at + kRows, width * 4);
    if (!four) break;
    _tile_stored(2, to + at + kDepth, width * 4);
    _tile_stored(3, to + at + kDepth + kRows, width * 4);
    at += kDepth;
  }
}

// to[32, 16] = 32 dimensions of the queries' rows times 16 columns of their weights.
inline void multiply_queries(const uint16_t *turned, int64_t steps, const uint32_t *pairs,
                             int64_t stride, float *to) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(2, pairs + step * kPairs * stride, stride * 4);
    _tile_loadd(4, turned + step * (kBytes / 2), 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_loadd(5, turned + (steps + step) * (kBytes / 2), 64);
    _tile_dpbf16ps(1, 5, 2);
  }
  _tile_stored(0, to, 64);
  _tile_stored(1, to + kRows * kRows, 64);
}

// rows[i][0 .. d) += column i of from[16, 16]; null rows take nothing.
inline void add_columns(const float *from, int64_t d, float *const *rows) {
  Words x[kRows];
  for (int i = 0; i < kRows; ++i) x[i] = _mm512_loadu_si512(from + i * kRows);
  transpose(x);
  const auto some = static_cast<__mmask16>(d >= kRows ? 0xffff : (1 << d) - 1);
  for (int i = 0; i < kRows; ++i) {
    if (rows[i] == nullptr) continue;
    const __m512 sum = _mm512_maskz_loadu_ps(some, rows[i]) + reinterpret_cast<__m512>(x[i]);
    _mm512_mask_storeu_ps(rows[i], some, sum);
  }
}

// ---- a tile of queries ------------------------------------------------------------------------

struct Work {
  const Plan &plan;
  const Part &part;
  const Tile tile;
  Scratch s;
  Widths width;
  Box box;
  int64_t voxels;                 // in the box
  int64_t first;  // element of the part's rows in an array like q
};

// False where the tile is not for this kernel.
bool begin(const float *offsets, void *block, Work *work) {
  const Plan &plan = work->plan;
  if (plan.head_dim > kMostHeadDim || plan.extra > kMostColumns) return false;
  divide(plan, widths_of(plan, 0), block, &work->s);
  work->box = empty_box();
  for (int64_t i = 0; i < work->tile.count; ++i) {
    place_query(plan, offsets, work->part, query_at(plan, work->tile, i), &work->s.query.taps);
    enclose(plan, work->s.query.taps, &work->box);
  }
  work->voxels = volume(work->box, kMostColumns);
  const int64_t columns = rounded(work->voxels + plan.extra, kDepth);
  if (columns > most_columns(plan)) return false;
  work->width = widths_of(plan, columns);
  divide(plan, work->width, block, &work->s);
  list_box(plan, work->box, work->s.voxel);
  work->first = work->part.b * plan.voxels * plan.row + work->part.head * plan.head_dim;
  return true;
}

// Sets s.rows to the rows of the columns: voxels, then extra keys.
void find_rows(const Work &work, const void *volume, const void *extra) {
  const auto *from = static_cast<const uint16_t *>(volume);
  const Plan &plan = work.plan;
  int64_t c = 0;
  for (; c < work.voxels; ++c) work.s.rows[c] = from + work.s.voxel[c] * plan.head_dim;
  for (int64_t e = 0; e < plan.extra; ++e, ++c) {
    work.s.rows[c] = static_cast<const uint16_t *>(extra) + e * plan.head_dim;
  }
  for (; c < work.width.columns; ++c) work.s.rows[c] = nullptr;
}

// Rows [first, first + count) of the tile's queries in an array like q; null beyond the last.
void find_queries(const Work &work, const void *array, int64_t first, int64_t count,
                  const uint16_t **rows) {
  const auto *from = static_cast<const uint16_t *>(array) + work.first;
  for (int64_t i = 0; i < count; ++i) {
    const bool beyond = first + i >= work.tile.count;
    const int64_t n = beyond ? 0 : query_at(work.plan, work.tile, first + i).n;
    rows[i] = beyond ? nullptr : from + n * work.plan.row;
  }
}

inline void round_row(const float *from, int64_t d, uint16_t *to) {
  narrow(from, d, reinterpret_cast<Bfloat16 *>(to));
}

bool forward(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *block) {
  Work work = {plan, part, tile_at(plan, part.tile), {}, {}, {}, 0, 0};
  if (!begin(arrays.offsets, block, &work)) return false;
  const TileRegisters registers;
  const Scratch &s = work.s;
  const int64_t d = plan.head_dim, width = work.width.d, stride = work.width.stride;
  const int64_t columns = work.width.columns, places = padded(plan.places);
  find_rows(work, arrays.keys.k, arrays.keys.extra_k);
  pack_columns(s.rows, columns, d, width, s.key_columns);
  find_rows(work, arrays.keys.v, arrays.keys.extra_v);
  pack_pairs(s.rows, columns, d, width, s.pair_rows);
  float *line = s.line[0][0], *probability = s.query.probability;
  fill(line, stride, 0.0f);
  for (int64_t first = 0; first < work.tile.count; first += kRows) {
    const uint16_t *rows[kRows];
    find_queries(work, arrays.q, first, kRows, rows);
    pack_left(rows, d, width, s.left);
    multiply_columns(s.left, s.key_columns, columns, width, stride, s.scores);
    const int64_t last = first + kRows < work.tile.count ? first + kRows : work.tile.count;
    for (int64_t i = first; i < last; ++i) {
      const Query query = query_at(plan, work.tile, i);
      Taps *taps = &work.s.query.taps;
      place_query(plan, arrays.offsets, part, query, taps);
      find_in_box(plan, work.box, taps);
      const float *scores = s.scores + (i - first) * stride;
      interpolate_query(plan, s.query, scores, s.query.score_grid, probability);
      for (int64_t e = 0; e < plan.extra; ++e) probability[places + e] = scores[work.voxels + e];
      arrays.lse[(part.b * plan.voxels + query.n) * plan.heads + part.head] =
          softmax(plan, probability);
      spread_query(plan, s.query, probability, line);
      for (int64_t e = 0; e < plan.extra; ++e) line[work.voxels + e] = probability[places + e];
      round_line(line, columns, s.weights + (i - first) * stride);
      fill(line, columns, 0.0f);
    }
    multiply_rows(s.weights, stride, s.pair_rows, columns, width, s.sum);
    for (int64_t i = first; i < last; ++i) {
      auto *out = static_cast<uint16_t *>(arrays.out) + work.first;
      round_row(s.sum + (i - first) * width, d, out + query_at(plan, work.tile, i).n * plan.row);
    }
  }
  return true;
}

// ---- backward ---------------------------------------------------------------------------------

// A and dA of the queries from `first` on, as pairs; dA also as a left operand.
void weigh_queries(const BackwardArrays &arrays, int64_t first, int64_t last,
                   const uint16_t *const *grad_out, const uint16_t *const *out, Work *work) {
  const Plan &plan = work->plan;
  const Scratch &s = work->s;
  const int64_t stride = work->width.stride, places = padded(plan.places);
  float *p = s.query.probability + places, *slope = s.query.slope + places;
  for (int64_t i = first; i < last; ++i) {
    const Query query = query_at(plan, work->tile, i);
    place_query(plan, arrays.offsets, work->part, query, &work->s.query.taps);
    find_in_box(plan, work->box, &work->s.query.taps);
    const int64_t at = (work->part.b * plan.voxels + query.n) * plan.heads + work->part.head;
    const float lse = arrays.lse[at];
    const float mean = dot(grad_out[i - first], out[i - first], plan.head_dim);  // of dP under P
    const float *scores = s.scores + (i - first) * stride;
    const float *values = s.values + (i - first) * stride;
    float *const *line = s.line[i % 2];
    weigh_query(plan, lse, mean, s.query, scores, values, line[0], line[1],
                offsets_at(plan, arrays, i));
    for (int64_t e = 0; e < plan.extra; ++e) {
      p[e] = scores[work->voxels + e];
      slope[e] = values[work->voxels + e];
    }
    if (plan.extra > 0) slopes_of(plan, plan.extra, lse, mean, p, slope);
    for (int64_t e = 0; e < plan.extra; ++e) {
      line[0][work->voxels + e] = p[e];
      line[1][work->voxels + e] = slope[e];
    }
    round_line(line[1], work->width.columns, s.weights + (i - first) * stride);
    if (i % 2 == 0 && i + 1 < last) continue;
    for (int which = 0; which < 2; ++which) {
      float *const both[2] = {s.line[0][which], s.line[1][which]};
      take_pair(both, work->width.columns, s.pairs[which] + i / 2 * stride);
    }
  }
}

// dk += dA' q and dv += A' dout, of the whole tile.
void add_products(const BackwardArrays &arrays, const Work &work) {
  const Plan &plan = work.plan;
  const Scratch &s = work.s;
  const int64_t d = plan.head_dim, width = work.width.d, stride = work.width.stride;
  const int64_t steps = (work.tile.count + kDepth - 1) / kDepth;
  for (int64_t pair = (work.tile.count + 1) / 2; pair < steps * kPairs; ++pair) {
    for (uint32_t *pairs : s.pairs) {
      for (int64_t c = 0; c < work.width.columns; ++c) pairs[pair * stride + c] = 0;
    }
  }
  const void *const queries[] = {arrays.grad_out, arrays.q};
  float *const volumes[] = {arrays.grad.v, arrays.grad.k};
  float *const extras[] = {arrays.grad.extra_v, arrays.grad.extra_k};
  for (int which = 0; which < 2; ++which) {
    const uint16_t *rows[kTileQueries];
    find_queries(work, queries[which], 0, kTileQueries, rows);
    pack_turned(rows, steps, d, width, s.turned[which]);
    for (int64_t column = 0; column < work.width.columns; column += kRows) {
      float *to[kRows];
      for (int64_t c = column; c < column + kRows; ++c) {
        const int64_t e = c - work.voxels;
        to[c - column] = e < 0            ? volumes[which] + s.voxel[c] * d
                         : e < plan.extra ? extras[which] + e * d
                                          : nullptr;
      }
      for (int64_t at = 0; at < width; at += kDepth) {
        multiply_queries(s.turned[which] + at / kRows * steps * (kBytes / 2), steps,
                         s.pairs[which] + column, stride, s.sum);
        for (int64_t half = 0; half < 2 && at + half * kRows < d; ++half) {
          add_columns(s.sum + half * kRows * kRows, d - at - half * kRows, to);
          for (float *&row : to) row += row == nullptr ? 0 : kRows;
        }
      }
    }
  }
}

bool backward(const Plan &plan, const BackwardArrays &arrays, const Part &part, void *block) {
  Work work = {plan, part, tile_at(plan, part.tile), {}, {}, {}, 0, 0};
  if (!begin(arrays.offsets, block, &work)) return false;
  const TileRegisters registers;
  const Scratch &s = work.s;
  const int64_t d = plan.head_dim, width = work.width.d, stride = work.width.stride;
  const int64_t columns = work.width.columns;
  find_rows(work, arrays.keys.v, arrays.keys.extra_v);
  pack_columns(s.rows, columns, d, width, s.value_columns);
  find_rows(work, arrays.keys.k, arrays.keys.extra_k);
  pack_columns(s.rows, columns, d, width, s.key_columns);
  pack_pairs(s.rows, columns, d, width, s.pair_rows);
  for (auto &of_query : s.line) {
    for (float *line : of_query) fill(line, stride, 0.0f);
  }
  for (int64_t first = 0; first < work.tile.count; first += kRows) {
    const uint16_t *q[kRows], *grad_out[kRows], *out[kRows];
    find_queries(work, arrays.q, first, kRows, q);
    find_queries(work, arrays.grad_out, first, kRows, grad_out);
    find_queries(work, arrays.out, first, kRows, out);
    pack_left(q, d, width, s.left);
    pack_left(grad_out, d, width, s.left_too);
    multiply_columns(s.left, s.key_columns, columns, width, stride, s.scores);
    multiply_columns(s.left_too, s.value_columns, columns, width, stride, s.values);
    const int64_t last = first + kRows < work.tile.count ? first + kRows : work.tile.count;
    weigh_queries(arrays, first, last, grad_out, out, &work);
    multiply_rows(s.weights, stride, s.pair_rows, columns, width, s.sum);
    for (int64_t i = first; i < last; ++i) {
      auto *to = static_cast<uint16_t *>(arrays.grad_q) + work.first;
      round_row(s.sum + (i - first) * width, d, to + query_at(plan, work.tile, i).n * plan.row);
    }
  }
  add_products(arrays, work);
  return true;
}

}  // namespace

namespace x86_64_v4_amx {
extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {scratch_bytes, forward, backward};
}  // namespace x86_64_v4_amx

}  // namespace megaslide
