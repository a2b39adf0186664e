// 8-bit moments: the C++ side of megaslide.ops.adamw's codes.py, which defines and explains them.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace megaslide {
namespace {

constexpr int kStepBits = 19;   // 16 codes per octave
constexpr int kNoiseBits = 16;  // per code

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
  const Bits codes = __builtin_convertvector(load<kLanes>(from), Bits);
  const Bits bits = ((codes & kCode.most) << kStepBits) + kCode.offset_bits();
  const Floats magnitude = ((Floats)bits - kCode.offset()) * (scale * kUnit);
  if constexpr (!kCode.has_sign) return magnitude;
  return (Floats)((Bits)magnitude | ((codes & 0x80u) << 24));
}

// Factor that takes the magnitudes of a block to [0, span].
template <Code kCode>
MEGASLIDE_INLINE float inverse_of(float scale) {
  return scale >= 0x1p-100f && scale <= __FLT_MAX__ ? kCode.span() / scale : 0.0f;
}

MEGASLIDE_INLINE Bits magnitude_bits(Floats x) { return (Bits)x & 0x7fffffffu; }

// `noise` has kNoiseBits random bits. Codes of a block that is not finite are of no meaning.
template <Code kCode>
MEGASLIDE_INLINE void encode(uint8_t *to, Floats x, float inverse, Bits noise) {
  const Floats shifted = (Floats)magnitude_bits(x) * inverse + kCode.offset();
  const Bits above = (Bits)shifted - kCode.offset_bits() + (noise << (kStepBits - kNoiseBits));
  Bits codes = above >> kStepBits;
  codes = codes < kCode.most ? codes : Bits{} + kCode.most;
  if constexpr (kCode.has_sign) {
    codes |= ((Bits)x >> 24) & 0x80u;
  } else {
    codes = codes == 0u && x > 0.0f ? Bits{} + 1u : codes;
  }
  store<kLanes>(to, __builtin_convertvector(codes, Vec<kLanes, uint8_t>));
}

MEGASLIDE_INLINE Bits mixed(Bits x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// 2 * kNoiseBits bits for each of the elements from `element` on; `key` is mixed(step).
MEGASLIDE_INLINE Bits noise_of(uint32_t element, Bits key) {
  Bits index;
  for (int i = 0; i < kLanes; ++i) index[i] = element + static_cast<uint32_t>(i);
  return mixed(index + key);
}

MEGASLIDE_INLINE Bits larger(Bits a, Bits b) { return a > b ? a : b; }

// As bits, so that a NaN is the largest of all.
MEGASLIDE_INLINE float largest_of(Bits bits) {
  uint32_t most = bits[0];
  for (int i = 1; i < kLanes; ++i) most = bits[i] > most ? bits[i] : most;
  return __builtin_bit_cast(float, most);
}

}  // namespace
}  // namespace megaslide
