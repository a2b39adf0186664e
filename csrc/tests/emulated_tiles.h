// The matrix tiles of AMX in plain C++, so that their kernel runs, and is held by sanitizers, on
// processors without them. As the processor does, products of a pair are added to fp32 sums one by
// one along the depth; unlike it, this keeps subnormal numbers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace megaslide {
namespace emulated {

constexpr int kTiles = 8, kTileRows = 16, kRowBytes = 64;
inline thread_local uint8_t tiles[kTiles][kTileRows][kRowBytes];

inline void load(int tile, const void *from, int64_t stride) {
  for (int row = 0; row < kTileRows; ++row) {
    std::memcpy(tiles[tile][row], static_cast<const char *>(from) + row * stride, kRowBytes);
  }
}

inline void store(int tile, void *to, int64_t stride) {
  for (int row = 0; row < kTileRows; ++row) {
    std::memcpy(static_cast<char *>(to) + row * stride, tiles[tile][row], kRowBytes);
  }
}

inline float bf16_at(const uint8_t *row, int index) {
  uint16_t half;
  std::memcpy(&half, row + 2 * index, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// sum[m][n] += left[m][2k] right[k][2n] + left[m][2k+1] right[k][2n+1], over k.
inline void multiply(int sum, int left, int right) {
  for (int m = 0; m < kTileRows; ++m) {
    float line[kTileRows];
    std::memcpy(line, tiles[sum][m], sizeof line);
    for (int k = 0; k < kTileRows; ++k) {
      for (int n = 0; n < kTileRows; ++n) {
        line[n] += bf16_at(tiles[left][m], 2 * k) * bf16_at(tiles[right][k], 2 * n);
        line[n] += bf16_at(tiles[left][m], 2 * k + 1) * bf16_at(tiles[right][k], 2 * n + 1);
      }
    }
    std::memcpy(tiles[sum][m], line, sizeof line);
  }
}

}  // namespace emulated
}  // namespace megaslide

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) megaslide::emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) megaslide::emulated::store(tile, to, stride)
#define _tile_zero(tile) std::memset(megaslide::emulated::tiles[tile], 0, 1024)
#define _tile_dpbf16ps(sum, left, right) megaslide::emulated::multiply(sum, left, right)
