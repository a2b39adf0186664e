// Vectors of fp32 as wide as the instruction set has them, in the compiler's portable notation.
//
// Only for files that are compiled once per instruction set (instruction_set.h).
#pragma once

#include <cstdint>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
// g++ 12 takes the header's own "undefined" operands for uninitialised variables.
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace megaslide {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#define MEGASLIDE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MEGASLIDE_UNROLL(n) MEGASLIDE_PRAGMA(clang loop unroll_count(n))
#else
#define MEGASLIDE_UNROLL(n) MEGASLIDE_PRAGMA(GCC unroll n)
#endif
#define MEGASLIDE_INLINE inline __attribute__((always_inline))

template <typename T, int W>
struct Lanes {
  typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <>
struct Lanes<float, 1> {
  typedef float type;
};
template <int W, typename T = float>
using Vec = typename Lanes<T, W>::type;

template <int W, typename T>
MEGASLIDE_INLINE Vec<W, T> load(const T *from) {
  Vec<W, T> x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

template <int W, typename T>
MEGASLIDE_INLINE void store(T *to, Vec<W, T> x) {
  __builtin_memcpy(to, &x, sizeof x);
}

typedef Vec<kLanes> Floats;
typedef Vec<kLanes, uint32_t> Bits;

MEGASLIDE_INLINE Floats broadcast(float x) { return x - Floats{}; }

// The same number, of which the compiler no longer knows that it is a constant: g++ makes constants
// anew inside loops, from a general register, which costs as much as a permutation.
template <typename V>
MEGASLIDE_INLINE V kept(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

constexpr uint32_t kSignBit = 0x80000000u;

// The bits of `magnitude`, which has no sign, with the sign of x.
MEGASLIDE_INLINE Floats with_sign(Floats magnitude, Bits x) {
#if defined(__AVX512F__)
  constexpr int kOrAnd = 0xf8;
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(kSignBit));
  return (Floats)_mm512_ternarylogic_epi32((__m512i)magnitude, (__m512i)x, sign, kOrAnd);
#else
  return (Floats)((Bits)magnitude | (x & kSignBit));
#endif
}

// Lane l of the result is lane I[l] of a and b, taken as one.
template <typename V, int... I>
MEGASLIDE_INLINE V shuffle(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  typedef decltype(a == b) Indices;  // integers as wide as the lanes
  return __builtin_shuffle(a, b, Indices{I...});
#endif
}

// ---- narrow integers: compilers take the portable form apart lane by lane ----------------------

MEGASLIDE_INLINE Bits widened(const uint8_t *from) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
  return __builtin_convertvector(load<kLanes>(from), Bits);
#endif
}

// With the sign in the new bits.
MEGASLIDE_INLINE Bits widened(const int8_t *from) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
  return (Bits)__builtin_convertvector(load<kLanes>(from), Vec<kLanes, int32_t>);
#endif
}

// ---- 16-bit halves of 32-bit lanes, of two vectors: one permutation for all --------------------

typedef Vec<2 * kLanes, uint16_t> Halves;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

struct Pair {
  Bits first, last;
};

template <int kUpper, int... I>
MEGASLIDE_INLINE Halves halves_at(const Pair &x, std::integer_sequence<int, I...>) {
  return shuffle((Halves)x.first, (Halves)x.last,
                 std::integer_sequence<int, (2 * I + kUpper)...>{});
}

MEGASLIDE_INLINE Halves lower_halves(const Pair &x) {
  return halves_at<0>(x, std::make_integer_sequence<int, 2 * kLanes>{});
}

MEGASLIDE_INLINE Halves upper_halves(const Pair &x) {
  return halves_at<1>(x, std::make_integer_sequence<int, 2 * kLanes>{});
}

template <int... I>
MEGASLIDE_INLINE Pair paired(Halves lower, Halves upper, std::integer_sequence<int, I...>) {
  constexpr int kCount = 2 * kLanes;
  return {(Bits)shuffle(lower, upper, std::integer_sequence<int, (I / 2 + I % 2 * kCount)...>{}),
          (Bits)shuffle(lower, upper,
                        std::integer_sequence<int, (kLanes + I / 2 + I % 2 * kCount)...>{})};
}

MEGASLIDE_INLINE Pair joined(Halves lower, Halves upper) {
  return paired(lower, upper, std::make_integer_sequence<int, 2 * kLanes>{});
}

MEGASLIDE_INLINE bool any_nan(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
#else
  const auto number = (a == a) & (b == b);
  bool all = true;
  for (int i = 0; i < kLanes; ++i) all = all && number[i];
  return !all;
#endif
}

// ---- one rounding per operation ---------------------------------------------------------------

// a * b + c, rounded once, also where the compiler may not contract a product and a sum.
MEGASLIDE_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Rounded to the nearest float.
MEGASLIDE_INLINE Floats square_root(Floats x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX__)
  return _mm256_sqrt_ps(x);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

}  // namespace
}  // namespace megaslide
