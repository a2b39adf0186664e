// Vectors of fp32 as wide as the instruction set has them, in the compiler's portable notation.
//
// Only for files that are compiled once per instruction set (instruction_set.h).
#pragma once

#include <cstdint>

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

MEGASLIDE_INLINE Floats broadcast(float x) { return Floats{} + x; }

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

MEGASLIDE_INLINE Bits widened(const uint16_t *from) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return (Bits)_mm512_cvtepu16_epi32(narrow);
#else
  return __builtin_convertvector(load<kLanes>(from), Bits);
#endif
}

// With the sign in the new bits.
MEGASLIDE_INLINE Bits widened(const int16_t *from) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return (Bits)_mm512_cvtepi16_epi32(narrow);
#else
  return (Bits)__builtin_convertvector(load<kLanes>(from), Vec<kLanes, int32_t>);
#endif
}

// The lower bits of each lane.
MEGASLIDE_INLINE void store_narrow(uint8_t *to, Bits x) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(to, 0xffff, (__m512i)x);
#else
  store<kLanes>(to, __builtin_convertvector(x, Vec<kLanes, uint8_t>));
#endif
}

MEGASLIDE_INLINE void store_narrow(uint16_t *to, Bits x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                      _mm512_cvtepi32_epi16((__m512i)x));
#else
  store<kLanes>(to, __builtin_convertvector(x, Vec<kLanes, uint16_t>));
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
