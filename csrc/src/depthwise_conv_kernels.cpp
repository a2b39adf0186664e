// Depthwise convolution for one instruction set: a row of tokens along w at a time.
//
//   out[w] = bias + sum over the 9 rows around, i of 0..2: weight[row, i] * x[row, w + i - 1]
//   dweight[row, i] = sum over w of dout[w] * x[row, w + i - 1];  dbias = sum over w of dout[w]
//
// Lanes are channels. Rows and tokens outside the volume are left out, never multiplied by zero:
// zero times infinity would not be zero. An output adds its products in the order of taps whatever
// tile it is in.
#include <cstdint>

#include "depthwise_conv.h"
#include "vectors.h"

namespace megaslide {
namespace {

constexpr int kTokens = 4;   // outputs along w that are held in registers, so that x is read once
constexpr int kVectors = 2;  // of channels, likewise: independent sums hide the latency
static_assert(kChannels % (kVectors * kLanes) == 0);

// ---- vectors of either type, whole or cut at the last channel ---------------------------------

MEGASLIDE_INLINE Floats read_whole(const float *from) { return load<kLanes>(from); }

MEGASLIDE_INLINE Floats read_whole(const uint16_t *from) {
  return (Floats)(__builtin_convertvector(load<kLanes>(from), Bits) << 16);
}

MEGASLIDE_INLINE void write_whole(float *to, Floats x) { store<kLanes>(to, x); }

// To the nearest bf16, the even one of two.
MEGASLIDE_INLINE void write_whole(uint16_t *to, Floats x) {
  const Bits bits = (Bits)x, nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
  // Rounding up could turn a NaN's bits into those of a number.
  const Bits kept = x == x ? nearest : Bits{} + 0x7fc00000u;
  store<kLanes>(to, __builtin_convertvector(kept >> 16, Vec<kLanes, uint16_t>));
}

struct Whole {
  template <typename T>
  MEGASLIDE_INLINE Floats read(const T *from) const {
    return read_whole(from);
  }
  template <typename T>
  MEGASLIDE_INLINE void write(T *to, Floats x) const {
    write_whole(to, x);
  }
};

struct Cut {
  int64_t count;  // channels of the only vector
  template <typename T>
  MEGASLIDE_INLINE Floats read(const T *from) const {
    T all[kLanes] = {};
    __builtin_memcpy(all, from, count * sizeof(T));
    return read_whole(all);
  }
  template <typename T>
  MEGASLIDE_INLINE void write(T *to, Floats x) const {
    T all[kLanes];
    write_whole(all, x);
    __builtin_memcpy(to, all, count * sizeof(T));
  }
};

// Calls run(vectors, columns, channel) for a tile's channels; `vectors` is a constant's type.
template <int kCount>
struct Constant {
  static constexpr int value = kCount;
};

template <typename Run>
MEGASLIDE_INLINE void for_channels(const Tile &tile, const Run &run) {
  int64_t c = tile.channel, left = tile.channels;
  for (; left >= kVectors * kLanes; c += kVectors * kLanes, left -= kVectors * kLanes) {
    run(Constant<kVectors>{}, Whole{}, c);
  }
  for (; left >= kLanes; c += kLanes, left -= kLanes) run(Constant<1>{}, Whole{}, c);
  if (left > 0) run(Constant<1>{}, Cut{left}, c);
}

// ---- rows -------------------------------------------------------------------------------------

// The rows inside the volume, of the 9 around row (b, t, h).
struct Around {
  int count;
  int64_t row[9];
  int tap[9];  // of the row's first token: 0, 3, ... 24
};

Around around(const megaslide_depthwise_shape &shape, int64_t row) {
  const int64_t T = shape.size[0], H = shape.size[1], t = row / H % T, h = row % H;
  Around found;
  found.count = 0;
  for (int dt = -1; dt <= 1; ++dt) {
    for (int dh = -1; dh <= 1; ++dh) {
      if (t + dt < 0 || t + dt >= T || h + dh < 0 || h + dh >= H) continue;
      found.row[found.count] = row + dt * H + dh;
      found.tap[found.count++] = 9 * (dt + 1) + 3 * (dh + 1);
    }
  }
  return found;
}

// ---- convolution ------------------------------------------------------------------------------

// kCount outputs from token w of `row` on.
template <int kCount, int kWide, typename X, typename Out, typename Columns>
MEGASLIDE_INLINE void convolve_tokens(const ConvArrays &arrays, const Around &near, int64_t row,
                                      int64_t w, int64_t channel, const Columns &columns) {
  const int64_t W = arrays.shape.size[2], D = arrays.shape.channels;
  const bool left = w > 0, right = w + kCount < W;
  Floats sum[kCount][kWide] = {};
  for (int v = 0; arrays.bias && v < kWide; ++v) {
    for (int i = 0; i < kCount; ++i) sum[i][v] = columns.read(arrays.bias + channel + v * kLanes);
  }
  for (int n = 0; n < near.count; ++n) {
    const X *x = static_cast<const X *>(arrays.x) + (near.row[n] * W + w) * D + channel;
    const float *weight = arrays.weight + near.tap[n] * D + channel;
    MEGASLIDE_UNROLL(8)
    for (int v = 0; v < kWide; ++v, x += kLanes, weight += kLanes) {
      const Floats before = columns.read(weight), at = columns.read(weight + D),
                   after = columns.read(weight + 2 * D);
      if (left) sum[0][v] += before * columns.read(x - D);
      MEGASLIDE_UNROLL(8)
      for (int i = 0; i < kCount; ++i) {
        const Floats token = columns.read(x + i * D);
        if (i > 0) sum[i - 1][v] += after * token;
        sum[i][v] += at * token;
        if (i + 1 < kCount) sum[i + 1][v] += before * token;
      }
      if (right) sum[kCount - 1][v] += after * columns.read(x + kCount * D);
    }
  }
  Out *out = static_cast<Out *>(arrays.out) + (row * W + w) * D + channel;
  for (int i = 0; i < kCount; ++i) {
    for (int v = 0; v < kWide; ++v) columns.write(out + i * D + v * kLanes, sum[i][v]);
  }
}

template <typename X, typename Out>
void convolve_tile(const ConvArrays &arrays, const Tile &tile) {
  const int64_t W = arrays.shape.size[2];
  for (int64_t row = tile.first; row < tile.last; ++row) {
    const Around near = around(arrays.shape, row);
    for_channels(tile, [&](auto wide, const auto &columns, int64_t c) {
      constexpr int kWide = decltype(wide)::value;
      int64_t w = 0;
      for (; w + kTokens <= W; w += kTokens) {
        convolve_tokens<kTokens, kWide, X, Out>(arrays, near, row, w, c, columns);
      }
      if (W - w >= 2) {
        convolve_tokens<2, kWide, X, Out>(arrays, near, row, w, c, columns);
        w += 2;
      }
      if (w < W) convolve_tokens<1, kWide, X, Out>(arrays, near, row, w, c, columns);
    });
  }
}

void convolve(const ConvArrays &arrays, const Tile &tile) {
  const auto run = arrays.shape.x_is_bf16
                       ? (arrays.shape.out_is_bf16 ? convolve_tile<uint16_t, uint16_t>
                                                   : convolve_tile<uint16_t, float>)
                       : (arrays.shape.out_is_bf16 ? convolve_tile<float, uint16_t>
                                                   : convolve_tile<float, float>);
  run(arrays, tile);
}

// ---- gradients of weight and bias -------------------------------------------------------------

// Adds one row of dout times one row of x, both from token 0 on, to the sums of that row's 3 taps.
template <int kWide, typename X, typename Grad, typename Columns>
MEGASLIDE_INLINE void sum_products(const X *x, const Grad *grad, int64_t W, int64_t D,
                                   const Columns &columns, float *to) {
  Floats sum[3][kWide] = {}, before[kWide] = {}, at[kWide];
  for (int v = 0; v < kWide; ++v) at[v] = columns.read(x + v * kLanes);
  const auto add = [&](int64_t w, bool left, bool right) __attribute__((always_inline)) {
    MEGASLIDE_UNROLL(8)
    for (int v = 0; v < kWide; ++v) {
      const Floats dout = columns.read(grad + w * D + v * kLanes);
      if (left) sum[0][v] += dout * before[v];
      sum[1][v] += dout * at[v];
      if (!right) continue;
      const Floats after = columns.read(x + (w + 1) * D + v * kLanes);
      sum[2][v] += dout * after;
      before[v] = at[v];
      at[v] = after;
    }
  };
  add(0, false, W > 1);
  for (int64_t w = 1; w < W - 1; ++w) add(w, true, true);
  if (W > 1) add(W - 1, true, false);
  for (int i = 0; i < 3; ++i) {
    for (int v = 0; v < kWide; ++v) {
      float *total = to + i * kChannels + v * kLanes;
      store<kLanes>(total, load<kLanes>(total) + sum[i][v]);
    }
  }
}

template <int kWide, typename Grad, typename Columns>
MEGASLIDE_INLINE void sum_tokens(const Grad *grad, int64_t W, int64_t D, const Columns &columns,
                                 float *to) {
  for (int v = 0; v < kWide; ++v) {
    Floats sum = {};
    for (int64_t w = 0; w < W; ++w) sum += columns.read(grad + w * D + v * kLanes);
    store<kLanes>(to + v * kLanes, load<kLanes>(to + v * kLanes) + sum);
  }
}

template <typename X, typename Grad>
void sum_tile(const SumArrays &arrays, const Tile &tile, float *to) {
  const int64_t W = arrays.shape.size[2], D = arrays.shape.channels;
  const auto *x = static_cast<const X *>(arrays.x);
  const auto *grad_out = static_cast<const Grad *>(arrays.grad_out);
  float sums[kSums * kChannels] = {};
  for (int64_t row = tile.first; row < tile.last; ++row) {
    const Around near = around(arrays.shape, row);
    for_channels(tile, [&](auto wide, const auto &columns, int64_t c) {
      constexpr int kWide = decltype(wide)::value;
      const Grad *grad = grad_out + row * W * D + c;
      float *at = sums + c - tile.channel;
      for (int n = 0; n < near.count; ++n) {
        sum_products<kWide>(x + near.row[n] * W * D + c, grad, W, D, columns,
                            at + near.tap[n] * kChannels);
      }
      sum_tokens<kWide>(grad, W, D, columns, at + (kSums - 1) * kChannels);
    });
  }
  for (int64_t i = 0; i < kSums; ++i) {
    __builtin_memcpy(to + i * D + tile.channel, sums + i * kChannels,
                     tile.channels * sizeof(float));
  }
}

void sum(const SumArrays &arrays, const Tile &tile, float *to) {
  const auto run = arrays.shape.x_is_bf16
                       ? (arrays.shape.out_is_bf16 ? sum_tile<uint16_t, uint16_t>
                                                   : sum_tile<uint16_t, float>)
                       : (arrays.shape.out_is_bf16 ? sum_tile<float, uint16_t>
                                                   : sum_tile<float, float>);
  run(arrays, tile, to);
}

}  // namespace

namespace MEGASLIDE_ISA {
extern const DepthwiseKernels depthwise_kernels;
const DepthwiseKernels depthwise_kernels = {convolve, sum};
}  // namespace MEGASLIDE_ISA

}  // namespace megaslide
