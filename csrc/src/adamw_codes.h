// 8-bit moments: the C++ side of megaslide.ops.adamw's codes.py, which defines and explains them.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace megaslide {
namespace {

constexpr int kStepBits = 19;   // 16 codes per octave

struct Code {
  uint32_t most;  // largest code of a magnitude
  bool has_sign;  // in the bit above it

  constexpr uint32_t offset_bits() const { return 0x3f800000u - (most << kStepBits); }
  constexpr float offset() const { return __builtin_bit_cast(float, offset_bits()); }
  constexpr float span() const { return 1.0f - offset(); }
};

constexpr Code kExpAvgCode{127, true};
constexpr Code kRootCode{255, false};

template <Code kCode>
MEGASLIDE_INLINE Floats decoded(const uint8_t *from, float scale) {
  constexpr float kUnit = 1.0f / kCode.span();
  const Bits codes = widened(from);
  const Bits magnitudes = kCode.has_sign ? codes & kCode.most : codes;
  const Bits bits = (magnitudes << kStepBits) + kCode.offset_bits();
  const Floats magnitude = ((Floats)bits - kCode.offset()) * (scale * kUnit);
  if constexpr (!kCode.has_sign) return magnitude;
  return (Floats)((Bits)magnitude | ((codes << 24) & 0x80000000u));
}

// Factor that takes the magnitudes of a block to [0, span].
template <Code kCode>
MEGASLIDE_INLINE float inverse_of(float scale) {
  return scale >= 0x1p-100f && scale <= __FLT_MAX__ ? kCode.span() / scale : 0.0f;
}

MEGASLIDE_INLINE Bits magnitude_bits(Floats x) { return (Bits)x & 0x7fffffffu; }

MEGASLIDE_INLINE Bits larger(Bits a, Bits b) { return a > b ? a : b; }

// `noise` is random, in [0, 2^kStepBits). Codes of a block that is not finite are of no meaning.
template <Code kCode>
MEGASLIDE_INLINE void encode(uint8_t *to, Floats x, float inverse, Bits noise) {
  const Floats magnitude = kCode.has_sign ? (Floats)magnitude_bits(x) : x;
  const Floats shifted = magnitude * inverse + kCode.offset();
  const Bits above = (Bits)shifted - kCode.offset_bits() + noise;
  Bits codes = above >> kStepBits;
  codes = codes < kCode.most ? codes : Bits{} + kCode.most;
  if constexpr (kCode.has_sign) {
    codes |= ((Bits)x >> 24) & 0x80u;
  } else {
    codes = larger(codes, x > 0.0f ? Bits{} + 1u : Bits{});
  }
  store_narrow(to, codes);
}

// ---- random bits ------------------------------------------------------------------------------

constexpr uint32_t kSeedStep = 0x9e3779b9u;  // between the seeds of neighbours

inline uint32_t noise_key_of(uint32_t step) {
  uint32_t x = step;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

MEGASLIDE_INLINE Bits seeds_of(uint32_t element, uint32_t key) {
  constexpr uint32_t kFrom0[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (load<kLanes>(kFrom0) + element) * kSeedStep + key;
}

// 32 random bits from each seed.
MEGASLIDE_INLINE Bits noise_of(Bits seeds) {
  const Bits x = (seeds ^ (seeds >> 16)) * 0xc2b2ae35u;
  return x ^ (x >> 15);
}

// As bits, so that a NaN is the largest of all.
MEGASLIDE_INLINE float largest_of(Bits bits) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(float, _mm512_reduce_max_epu32((__m512i)bits));
#else
  uint32_t most = bits[0];
  for (int i = 1; i < kLanes; ++i) most = bits[i] > most ? bits[i] : most;
  return __builtin_bit_cast(float, most);
#endif
}

}  // namespace
}  // namespace megaslide
