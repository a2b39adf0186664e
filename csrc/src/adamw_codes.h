// 8-bit moments: the C++ side of megaslide.ops.adamw's codes.py, which defines and explains them.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace megaslide {
namespace {

constexpr int kStepBits = 19;            // 16 codes per octave
constexpr uint32_t kTopBits = 0x3ff80000u;  // of 1.9375, the largest number of a block

struct Code {
  uint32_t most;  // largest code of a magnitude: 127 where a sign is in the bit above it, or 255

  constexpr bool has_sign() const { return most == 127; }
  // A multiple of (most + 1) << kStepBits, so that a code is the lower bits of what is cut.
  constexpr uint32_t offset_bits() const { return kTopBits - (most << kStepBits); }
  constexpr float offset() const { return __builtin_bit_cast(float, offset_bits()); }
  constexpr float span() const { return __builtin_bit_cast(float, kTopBits) - offset(); }
};

constexpr Code kExpAvgCode{127};
constexpr Code kRootCode{255};
static_assert(kExpAvgCode.offset() == 0x1p-7f && kRootCode.offset() == 0x1p-15f);

template <Code kCode>
MEGASLIDE_INLINE Floats decoded(const uint8_t *from, float scale) {
  constexpr float kUnit = 1.0f / kCode.span();
  const Bits codes = widened(from);
  const Bits bits = ((codes << kStepBits) & (kCode.most << kStepBits)) | kCode.offset_bits();
  const Floats magnitude = ((Floats)bits - kCode.offset()) * (scale * kUnit);
  if constexpr (!kCode.has_sign()) return magnitude;
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
  constexpr uint32_t kMost = kTopBits >> kStepBits;
  const Floats magnitude = kCode.has_sign() ? (Floats)magnitude_bits(x) : x;
  const Floats shifted = fused(magnitude, broadcast(inverse), broadcast(kCode.offset()));
  const Bits cut = ((Bits)shifted + noise) >> kStepBits;
  Bits codes = cut < kMost ? cut : Bits{} + kMost;  // rounding may have passed the largest number
  if constexpr (kCode.has_sign()) {
    codes = (codes & kCode.most) | (((Bits)x >> 24) & 0x80u);
  } else {
    constexpr uint32_t kZero = kCode.offset_bits() >> kStepBits;
    codes = larger(codes, x > 0.0f ? Bits{} + (kZero + 1) : Bits{});
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
  return (seeds ^ (seeds >> 16)) * 0xc2b2ae35u;
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
