// Three products with rows: all the arithmetic whose cost grows with head_dim.
//
// A query's list of rows is cut into chunks, and the products of many queries are done chunk by
// chunk in any order, so that queries which read the same rows can do so one after the other.
//
// W lanes per vector, D the head_dim where it is known at compile time (0: any multiple of W).
// Lists are readable up to a multiple of kPad: the padding names a valid row and weighs it by 0.
#pragma once

#include <cstdint>
#include <utility>

#include "bfloat16.h"
#include "deformable_attention.h"
#include "vectors.h"

namespace megaslide {
namespace {

// ---- sums across lanes, of W vectors at a time ------------------------------------------------

// Where lane l of the folded vector comes from: groups of a, then those of b, each halved.
template <int W, int Group>
constexpr int folded_from(int lane) {
  const int half = Group / 2, group = lane / half, groups = W / Group;
  return (group < groups ? 0 : W) + (group % groups) * Group + lane % half;
}

template <int W, int Group, int... I>
MEGASLIDE_INLINE Vec<W> fold(Vec<W> a, Vec<W> b, std::integer_sequence<int, I...>) {
  return shuffle(a, b, std::integer_sequence<int, folded_from<W, Group>(I)...>{}) +
         shuffle(a, b, std::integer_sequence<int, folded_from<W, Group>(I) + Group / 2 ...>{});
}

// parts[i] summed over its lanes becomes lane i.
template <int W, int Group = W>
MEGASLIDE_INLINE Vec<W> sum_each(const Vec<W> *parts) {
  if constexpr (Group == 1) {
    return parts[0];
  } else {
    Vec<W> folded[Group / 2];
    MEGASLIDE_UNROLL(16)
    for (int i = 0; i < Group / 2; ++i) {
      folded[i] = fold<W, Group>(parts[2 * i], parts[2 * i + 1],
                                 std::make_integer_sequence<int, W>{});
    }
    return sum_each<W, Group / 2>(folded);
  }
}

// Each lane's partner Half lanes away.
template <int W, int Half, int... I>
MEGASLIDE_INLINE Vec<W> partners(Vec<W> x, std::integer_sequence<int, I...>) {
  return shuffle(x, x, std::integer_sequence<int, (I + Half) % W...>{});
}

template <int W, int Half = W / 2>
MEGASLIDE_INLINE float sum_lanes(Vec<W> x) {
  if constexpr (Half == 0) {
    return x[0];
  } else {
    x += partners<W, Half>(x, std::make_integer_sequence<int, W>{});
    return sum_lanes<W, Half / 2>(x);
  }
}

template <int W, int Half = W / 2>
MEGASLIDE_INLINE float largest_lane(Vec<W> x) {
  if constexpr (Half == 0) {
    return x[0];
  } else {
    const Vec<W> other = partners<W, Half>(x, std::make_integer_sequence<int, W>{});
    return largest_lane<W, Half / 2>(other > x ? other : x);
  }
}

// ---- elements ---------------------------------------------------------------------------------

// W elements as fp32.
template <int W>
MEGASLIDE_INLINE Vec<W> load_row(const float *from) {
  return load<W>(from);
}

template <int W>
MEGASLIDE_INLINE Vec<W> load_row(const Bfloat16 *from) {
  if constexpr (W == 1) {
    return widen(*from);
  } else {
    const auto bits = load<W>(reinterpret_cast<const uint16_t *>(from));
    return reinterpret_cast<Vec<W>>(__builtin_convertvector(bits, Vec<W, uint32_t>) << 16);
  }
}

// ---- the products -----------------------------------------------------------------------------

// Up to kPad rows of one query's list.
struct Chunk {
  int32_t query;  // of x and y, [queries, head_dim]
  int32_t at;     // in arrays over all lists, readable for kPad numbers
  int32_t count;
  int32_t index;  // where its numbers of rows begin in those of `Chunks`,
  int32_t first;  // and the row from which they count
};

struct Chunks {
  const Chunk *chunk;
  int64_t count;
  const int32_t *index;

  MEGASLIDE_INLINE const int32_t *numbers(const Chunk &of) const { return index + of.index; }
};

// out[e] = x[query] . rows[e], for the padded chunks.
template <typename T, int W, int D>
void dots(const Chunks &chunks, const float *x, const T *rows, int64_t d, float *out) {
  const int64_t width = D > 0 ? D : d;
  for (int64_t i = 0; i < chunks.count; ++i) {
    const Chunk chunk = chunks.chunk[i];
    const float *own = x + chunk.query * width;
    const T *const from = rows + chunk.first * width;
    const int32_t *const number = chunks.numbers(chunk);
    for (int64_t e = 0; e < kPad; e += W) {
      Vec<W> parts[W];
      MEGASLIDE_UNROLL(16)
      for (int lane = 0; lane < W; ++lane) {
        const T *row = from + number[e + lane] * width;
        Vec<W> sum = load<W>(own) * load_row<W>(row);
        MEGASLIDE_UNROLL(8)
        for (int64_t c = W; c < width; c += W) sum += load<W>(own + c) * load_row<W>(row + c);
        parts[lane] = sum;
      }
      store<W>(out + chunk.at + e, sum_each<W>(parts));
    }
  }
}

// y[query] += sum of weight[e] * rows[e]; the padding weighs 0.
template <typename T, int W, int D>
void combine(const Chunks &chunks, const float *weight, const T *rows, int64_t d, float *y) {
  constexpr int kBlock = D > 0 ? D / W : 1;  // vectors of y held in registers
  constexpr int kChains = kBlock >= 4 ? 1 : 4 / kBlock;  // independent sums hide the latency
  const int64_t width = D > 0 ? D : d;
  for (int64_t i = 0; i < chunks.count; ++i) {
    const Chunk chunk = chunks.chunk[i];
    const int32_t *const number = chunks.numbers(chunk);
    const float *const by = weight + chunk.at;
    for (int64_t column = 0; column < width; column += kBlock * W) {
      const T *const from = rows + chunk.first * width + column;
      Vec<W> sum[kChains][kBlock] = {};
      for (int64_t e = 0; e < chunk.count; e += kChains) {
        MEGASLIDE_UNROLL(4)
        for (int chain = 0; chain < kChains; ++chain) {
          const T *row = from + number[e + chain] * width;
          MEGASLIDE_UNROLL(32)
          for (int c = 0; c < kBlock; ++c) {
            sum[chain][c] += by[e + chain] * load_row<W>(row + c * W);
          }
        }
      }
      MEGASLIDE_UNROLL(32)
      for (int c = 0; c < kBlock; ++c) {
        for (int chain = 1; chain < kChains; ++chain) sum[0][c] += sum[chain][c];
        float *to = y + chunk.query * width + column + c * W;
        store<W>(to, load<W>(to) + sum[0][c]);
      }
    }
  }
}

// rows[e] += weight[e] * x[query].
template <int W, int D>
void add_outer(const Chunks &chunks, const float *weight, const float *x, int64_t d,
               float *rows) {
  constexpr int kBlock = D > 0 ? D / W : 1;  // vectors of x held in registers
  const int64_t width = D > 0 ? D : d;
  for (int64_t i = 0; i < chunks.count; ++i) {
    const Chunk chunk = chunks.chunk[i];
    const int32_t *const number = chunks.numbers(chunk);
    const float *const by = weight + chunk.at;
    for (int64_t column = 0; column < width; column += kBlock * W) {
      float *const from = rows + chunk.first * width + column;
      Vec<W> kept[kBlock];
      MEGASLIDE_UNROLL(32)
      for (int c = 0; c < kBlock; ++c) {
        kept[c] = load<W>(x + chunk.query * width + column + c * W);
      }
      for (int64_t e = 0; e < chunk.count; ++e) {
        float *row = from + number[e] * width;
        MEGASLIDE_UNROLL(32)
        for (int c = 0; c < kBlock; ++c) {
          store<W>(row + c * W, load<W>(row + c * W) + by[e] * kept[c]);
        }
      }
    }
  }
}

#if defined(__AVX512BF16__)
// Rows of bf16 as they are: two products and their sum per 32-bit lane, in one operation.

constexpr int kNarrow = 2 * kLanes;  // bf16 numbers in a vector

MEGASLIDE_INLINE __m512bh load_narrow(const Bfloat16 *from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

// The nearest bf16 of 32 numbers, in order.
MEGASLIDE_INLINE __m512bh rounded(const float *from) {
  return _mm512_cvtne2ps_pbh(load<kLanes>(from + kLanes), load<kLanes>(from));
}

// dots(); x must be numbers of bf16, whatever their type.
template <int D>
void narrow_dots(const Chunks &chunks, const float *x, const Bfloat16 *rows, int64_t,
                 float *out) {
  for (int64_t i = 0; i < chunks.count; ++i) {
    const Chunk chunk = chunks.chunk[i];
    __m512bh kept[D / kNarrow];
    for (int c = 0; c < D / kNarrow; ++c) kept[c] = rounded(x + chunk.query * D + c * kNarrow);
    const Bfloat16 *const from = rows + int64_t{chunk.first} * D;
    const int32_t *const number = chunks.numbers(chunk);
    Floats parts[kLanes];
    MEGASLIDE_UNROLL(16)
    for (int lane = 0; lane < kLanes; ++lane) {
      const Bfloat16 *row = from + int64_t{number[lane]} * D;
      __m512 sum = _mm512_setzero_ps();
      MEGASLIDE_UNROLL(8)
      for (int c = 0; c < D / kNarrow; ++c) {
        sum = _mm512_dpbf16_ps(sum, kept[c], load_narrow(row + c * kNarrow));
      }
      parts[lane] = sum;
    }
    store<kLanes>(out + chunk.at, sum_each<kLanes>(parts));
  }
}

// Two rows of bf16 weighed by a pair of weights: numbers come in pairs, those of each half of 128
// bits in another sum.
template <int kSums>
MEGASLIDE_INLINE void add_pair_of_rows(__m512bh both, const Bfloat16 *a, const Bfloat16 *b,
                                       __m512 *sum) {
  MEGASLIDE_UNROLL(8)
  for (int c = 0; c < kSums / 2; ++c) {
    const __m512i x = _mm512_loadu_si512(a + c * kNarrow);
    const __m512i z = _mm512_loadu_si512(b + c * kNarrow);
    const __m512i low = _mm512_maskz_unpacklo_epi16(~__mmask32{0}, x, z);
    const __m512i high = _mm512_maskz_unpackhi_epi16(~__mmask32{0}, x, z);
    sum[2 * c] = _mm512_dpbf16_ps(sum[2 * c], reinterpret_cast<__m512bh>(low), both);
    sum[2 * c + 1] = _mm512_dpbf16_ps(sum[2 * c + 1], reinterpret_cast<__m512bh>(high), both);
  }
}

// combine() with weights rounded to bf16, two rows at a time.
template <int D>
void narrow_combine(const Chunks &chunks, const float *weight, const Bfloat16 *rows, int64_t,
                    float *y) {
  constexpr int kSums = D / kLanes;
  const __m512i from = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i next = _mm512_add_epi32(from, _mm512_set1_epi32(8));
  for (int64_t i = 0; i < chunks.count; ++i) {
    const Chunk chunk = chunks.chunk[i];
    const Bfloat16 *const origin = rows + int64_t{chunk.first} * D;
    const int32_t *const number = chunks.numbers(chunk);
    alignas(64) int32_t pairs[kLanes];
    const auto narrowed = _mm512_cvtneps_pbh(load<kLanes>(weight + chunk.at));
    _mm256_store_si256(reinterpret_cast<__m256i *>(pairs), reinterpret_cast<__m256i>(narrowed));
    __m512 sum[kSums];
    for (__m512 &one : sum) one = _mm512_setzero_ps();
    for (int e = 0; e < chunk.count; e += 2) {
      const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pairs[e / 2]));
      add_pair_of_rows<kSums>(both, origin + int64_t{number[e]} * D,
                              origin + int64_t{number[e + 1]} * D, sum);
    }
    float *to = y + chunk.query * D;
    for (int c = 0; c < kSums; c += 2, to += kNarrow) {
      const Floats low = _mm512_permutex2var_ps(sum[c], from, sum[c + 1]);
      const Floats high = _mm512_permutex2var_ps(sum[c], next, sum[c + 1]);
      store<kLanes>(to, load<kLanes>(to) + low);
      store<kLanes>(to + kLanes, load<kLanes>(to + kLanes) + high);
    }
  }
}
#endif

template <typename T>
struct RowProducts {
  void (*dots)(const Chunks &, const float *, const T *, int64_t, float *);
  void (*combine)(const Chunks &, const float *, const T *, int64_t, float *);
  void (*add_outer)(const Chunks &, const float *, const float *, int64_t, float *);
};

template <typename T, int W, int D>
constexpr RowProducts<T> kProducts = {dots<T, W, D>, combine<T, W, D>, add_outer<W, D>};

#if defined(__AVX512BF16__)
template <int D>
constexpr RowProducts<Bfloat16> kProducts<Bfloat16, kLanes, D> = {narrow_dots<D>, narrow_combine<D>,
                                                                  add_outer<kLanes, D>};
template <>
constexpr RowProducts<Bfloat16> kProducts<Bfloat16, kLanes, 16> = {
    dots<Bfloat16, kLanes, 16>, combine<Bfloat16, kLanes, 16>, add_outer<kLanes, 16>};
template <>
constexpr RowProducts<Bfloat16> kProducts<Bfloat16, kLanes, 0> = {
    dots<Bfloat16, kLanes, 0>, combine<Bfloat16, kLanes, 0>, add_outer<kLanes, 0>};
#endif

template <typename T>
const RowProducts<T> &row_products(int64_t head_dim) {
  constexpr int kHalf = kLanes < 8 ? kLanes : 8;
  switch (head_dim) {
    case 16:
      return kProducts<T, kLanes, 16>;
    case 24:
      return kProducts<T, kHalf, 24>;
    case 32:
      return kProducts<T, kLanes, 32>;
    case 64:
      return kProducts<T, kLanes, 64>;
    case 128:
      return kProducts<T, kLanes, 128>;
    default:
      if (head_dim % kLanes == 0) return kProducts<T, kLanes, 0>;
      if (head_dim % kHalf == 0) return kProducts<T, kHalf, 0>;
      return head_dim % 4 == 0 ? kProducts<T, 4, 0> : kProducts<T, 1, 0>;
  }
}

}  // namespace
}  // namespace megaslide
