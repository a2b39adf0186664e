// Numbers of bf16, and between them and fp32.
#pragma once

#include <cstdint>

namespace megaslide {
namespace {

struct Bfloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bfloat16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }

inline void narrow(const float *from, int64_t count, float *to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// To the nearest, ties to even.
inline void narrow(const float *from, int64_t count, Bfloat16 *to) {
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(uint32_t, from[i]);
    const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    to[i].bits = static_cast<uint16_t>(from[i] == from[i] ? rounded >> 16 : bits >> 16 | 0x40u);
  }
}

}  // namespace
}  // namespace megaslide
