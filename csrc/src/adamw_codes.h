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

// (y - offset) * unit in one operation: offset is a power of two and its product with unit exact,
// but for units so small that all codes are 0 or their squares are.
template <Code kCode>
MEGASLIDE_INLINE Floats decoded(const uint8_t *from, float scale) {
  constexpr float kUnit = 1.0f / kCode.span();
  const Floats unit = broadcast(scale * kUnit), zero = broadcast(-kCode.offset() * (scale * kUnit));
  if constexpr (kCode.has_sign()) {
    const Bits codes = widened(reinterpret_cast<const int8_t *>(from));
    const Bits bits = ((codes << kStepBits) & (kCode.most << kStepBits)) | kCode.offset_bits();
    return with_sign(fused((Floats)bits, unit, zero), codes);
  } else {
    const Bits bits = (widened(from) << kStepBits) | kCode.offset_bits();
    return fused((Floats)bits, unit, zero);
  }
}

// Factor that takes the magnitudes of a block to [0, span].
template <Code kCode>
MEGASLIDE_INLINE float inverse_of(float scale) {
  return scale >= 0x1p-100f && scale <= __FLT_MAX__ ? kCode.span() / scale : 0.0f;
}

MEGASLIDE_INLINE Bits magnitude_bits(Floats x) { return (Bits)x & 0x7fffffffu; }

MEGASLIDE_INLINE Bits larger(Bits a, Bits b) { return a > b ? a : b; }

constexpr int kCoded = 64 / kLanes;  // vectors that are encoded together, into 64 bytes

// Bits of which a code is left, below the sign, when the lower kStepBits are cut. `noise` is
// random, in [0, 2^kStepBits).
template <Code kCode>
MEGASLIDE_INLINE Bits dithered(Floats x, float inverse, Bits noise) {
  Floats offset = broadcast(kCode.offset());
  if constexpr (kCode.has_sign()) offset = with_sign(offset, (Bits)x);
  return (Bits)fused(x, broadcast(inverse), offset) + noise;
}

#if defined(__AVX512F__)
// A root that is not 0 gets a code that is not 0.
__attribute__((noinline, cold)) void lift_smallest(uint8_t *codes, const Floats *root) {
  for (int i = 0; i < kCoded * kLanes; ++i) {
    if (codes[i] == 0 && root[i / kLanes][i % kLanes] > 0.0f) codes[i] = 1;
  }
}

// In 16-bit halves, then in bytes: saturation is the limit for what was rounded past the largest.
template <Code kCode>
MEGASLIDE_INLINE void store_codes(uint8_t *to, const Floats *x, const Bits *bits) {
  constexpr uint16_t kOffset = kCode.offset_bits() >> 16;
  const Halves halves[2] = {upper_halves({bits[0], bits[1]}), upper_halves({bits[2], bits[3]})};
  const auto cut = [](Halves from) {
    if constexpr (kCode.has_sign()) from &= kept(Halves{} + 0x7fff);
    return (__m512i)((from - kept(Halves{} + kOffset)) >> (kStepBits - 16));
  };
  const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  __m512i codes;
  if constexpr (kCode.has_sign()) {
    const __m512i signs = _mm512_packs_epi16((__m512i)halves[0], (__m512i)halves[1]);
    codes = _mm512_packs_epi16(cut(halves[0]), cut(halves[1]));
    codes = _mm512_or_si512(codes, _mm512_and_si512(signs, kept(_mm512_set1_epi8(-128))));
  } else {
    codes = _mm512_packus_epi16(cut(halves[0]), cut(halves[1]));
  }
  const __mmask64 zero = _mm512_testn_epi8_mask(codes, codes);
  store<64>(to, (Vec<64, uint8_t>)_mm512_maskz_permutexvar_epi64(0xff, in_order, codes));
  if (!kCode.has_sign() && __builtin_expect(zero != 0, 0)) lift_smallest(to, x);
}
#else
template <Code kCode>
MEGASLIDE_INLINE void store_codes(uint8_t *to, const Floats *x, const Bits *bits) {
  constexpr uint32_t kMost = kTopBits >> kStepBits;
  for (int i = 0; i < kCoded; ++i) {
    const Bits cut = (bits[i] & 0x7fffffffu) >> kStepBits;
    Bits codes = cut < kMost ? cut : Bits{} + kMost;  // rounding may have passed the largest number
    if constexpr (kCode.has_sign()) {
      codes = (codes & kCode.most) | (bits[i] >> 24 & 0x80u);
    } else {
      constexpr uint32_t kZero = kCode.offset_bits() >> kStepBits;
      codes = larger(codes, x[i] > 0.0f ? Bits{} + (kZero + 1) : Bits{});
    }
    store<kLanes>(to + i * kLanes, __builtin_convertvector(codes, Vec<kLanes, uint8_t>));
  }
}
#endif

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
