// What the driver (deformable_attention.cpp) and the kernels share.
//
// B batch, N = T*H*W voxels, K taps, E extra keys; axes are ordered (t, h, w). A "row" is the
// head_dim elements of one voxel (or extra key) and head; in q and out, those of neighbours are
// `row` elements apart. Queries are visited tile by tile, small boxes of the volume, so that those
// that follow each other read mostly the same rows.
#pragma once

#include <cstdint>

#include "megaslide.h"

namespace megaslide {

// Arrays over taps are padded to a multiple of this, so that loops over them need no remainder.
constexpr int64_t kPad = 16;

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

constexpr int64_t kTileQueries = 64;  // at most
constexpr int64_t kBlockTiles[2] = {4, 2};  // of a block, along h and w

// Everything that is the same for all queries.
struct Plan {
  int64_t batch, voxels, heads, head_dim, groups, extra;
  int64_t row;       // elements between the rows of neighbouring voxels: heads * head_dim
  int64_t channels;  // numbers per offset group
  int64_t size[3], window[3];
  int64_t taps;      // K
  int64_t grid[3];   // voxels per axis that a rigid grid of taps reads (rigid.h)
  int64_t places;    // of arrays over taps: K, or [kt, grid h, grid w] with places without a tap
  int64_t capacity;  // most voxels one query may read, counted with repetition
  int64_t tile[3];   // queries per axis of a tile that the border does not cut
  int64_t tiles[3];  // tiles per axis
  int32_t kind, dtype;
  float scale;
  const float *holds_tap;   // [padded places] 1, or 0 where there is none
  // Of taps in the order in which kernels hold them where they are not a rigid grid (sampling.h).
  const int32_t *number;    // [K] number of a tap in the window
  const float *index[3];    // [padded K] index of a tap in the window; padding repeats the last
  const float *centred[3];  // the same, from the window's centre
  const int32_t *iota;      // [padded E] 0, 1, 2, ...
  const int32_t *beyond;    // [padded grid] voxels of a rigid grid, counted from its first
};

// What belongs to one batch element and head, [voxels, head_dim] and [extra, head_dim]: rows that
// follow each other, for those of several heads, a power of two apart, would share few cache sets.
template <typename T>
struct HeadRows {
  T *k, *v, *extra_k, *extra_v, *end;
};

struct ForwardArrays {
  const void *q;
  const float *offsets;
  HeadRows<const void> keys;
  void *out;
  float *lse;
};

struct BackwardArrays {
  const void *q;
  const float *offsets;
  HeadRows<const void> keys;
  const void *out;
  const float *lse;
  const void *grad_out;
  void *grad_q;
  HeadRows<float> grad;  // queries add to these
  float *grad_offsets;   // of one tile's queries, [queries, channels]; null where it is not wanted
};

// The queries of one tile, one batch element and head.
struct Part {
  int64_t b, head, tile;
};

struct Tile {
  int64_t origin[3], extent[3];
  int64_t count;  // queries
};

namespace {  // one of its own in every build, see instruction_set.h

// Splits `number`, which counts through an axis of `tiles` in blocks of `block`, the last perhaps
// shorter, with `inner` numbers for each tile. Sets the block's first tile and its length; returns
// the number within the block.
inline int64_t enter_block(int64_t number, int64_t block, int64_t tiles, int64_t inner,
                           int64_t *first, int64_t *length) {
  *first = number / (block * inner) * block;
  *length = tiles - *first < block ? tiles - *first : block;
  return number - *first * inner;
}

// Tiles come in blocks along h and w, through all of t: in large frames, too, neighbours follow
// each other while the rows that they share are still in the processor's second cache.
inline Tile tile_at(const Plan &plan, int64_t number) {
  const int64_t *tiles = plan.tiles;
  int64_t first[3] = {}, length[3] = {};
  int64_t i = enter_block(number, kBlockTiles[0], tiles[1], tiles[0] * tiles[2], &first[1],
                          &length[1]);
  i = enter_block(i, kBlockTiles[1], tiles[2], tiles[0] * length[1], &first[2], &length[2]);
  const int64_t at[3] = {i / (length[1] * length[2]), first[1] + i / length[2] % length[1],
                         first[2] + i % length[2]};
  Tile tile = {};
  tile.count = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t origin = at[axis] * plan.tile[axis], left = plan.size[axis] - origin;
    tile.origin[axis] = origin;
    tile.extent[axis] = left < plan.tile[axis] ? left : plan.tile[axis];
    tile.count *= tile.extent[axis];
  }
  return tile;
}

struct Query {
  int64_t n, voxel[3];
};

inline Query query_at(const Plan &plan, const Tile &tile, int64_t i) {
  const int64_t *extent = tile.extent;
  const int64_t at[3] = {i / (extent[1] * extent[2]), i / extent[2] % extent[1], i % extent[2]};
  Query query = {};
  for (int axis = 0; axis < 3; ++axis) {
    query.voxel[axis] = tile.origin[axis] + at[axis];
    query.n = query.n * plan.size[axis] + query.voxel[axis];
  }
  return query;
}

}  // namespace

// Kernels answer false, having done nothing, for a tile that they do not suit.
struct AttentionKernels {
  int64_t (*scratch_bytes)(const Plan &plan);  // per thread
  bool (*forward)(const Plan &plan, const ForwardArrays &arrays, const Part &part, void *scratch);
  bool (*backward)(const Plan &plan, const BackwardArrays &arrays, const Part &part,
                   void *scratch);
};

namespace baseline {
extern const AttentionKernels attention_kernels;
}
namespace x86_64_v3 {
extern const AttentionKernels attention_kernels;
}
namespace x86_64_v4 {
extern const AttentionKernels attention_kernels;
}
namespace x86_64_v4_bf16 {
extern const AttentionKernels attention_kernels;
}
namespace x86_64_v4_amx {
extern const AttentionKernels attention_kernels;  // bf16 alone, and not every tile
}

}  // namespace megaslide
