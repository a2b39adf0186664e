// What the C++ tests share: checks that print file, line and values, and made-up arrays.
//
// Arrays are heap blocks of exactly their size, so that AddressSanitizer sees one element too far.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "megaslide.h"

// Scratch memory of the kernels as bad as an allocator may give it: NaN as a number, -1 as an
// index. Replaces the program's own operators, and so those of the library.
void *operator new(std::size_t size, std::align_val_t align) {
  const auto unit = static_cast<std::size_t>(align);
  const std::size_t whole = (size + unit) / unit * unit;
  void *block = std::aligned_alloc(unit, whole);
  if (block == nullptr) throw std::bad_alloc();
  return std::memset(block, 0xff, whole);
}
void operator delete(void *block, std::align_val_t) noexcept { std::free(block); }

namespace check {

inline int failures = 0;
inline std::string context;  // printed with every failure: which case it is

inline void fail(const char *file, int line, const std::string &what) {
  constexpr int kMost = 20;
  if (++failures <= kMost) {
    std::printf("%s:%d: %s [%s]\n", file, line, what.c_str(), context.c_str());
  }
}

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) check::fail(__FILE__, __LINE__, "not true: " #condition);   \
  } while (false)

#define CHECK_EQUAL(found, expected)                                              \
  check::equal(__FILE__, __LINE__, #found, static_cast<long long>(found),         \
               static_cast<long long>(expected))

inline void equal(const char *file, int line, const char *name, long long found,
                  long long expected) {
  if (found == expected) return;
  fail(file, line, std::string(name) + " is " + std::to_string(found) + ", expected " +
                       std::to_string(expected));
}

// ---- arrays -----------------------------------------------------------------------------------

template <typename T>
class Array {
 public:
  explicit Array(int64_t count) : count_(count), data_(new T[static_cast<size_t>(count)]()) {}
  Array(int64_t count, T value) : Array(count) {
    for (int64_t i = 0; i < count; ++i) data_[i] = value;
  }
  Array copy() const {
    Array other(count_);
    if (count_ > 0) std::memcpy(other.data_.get(), data_.get(), bytes());
    return other;
  }
  T *data() const { return data_.get(); }
  int64_t count() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }
  T &operator[](int64_t i) const { return data_[i]; }
  bool same_bits(const Array &other) const {
    return count_ == other.count_ &&
           (count_ == 0 || std::memcmp(data(), other.data(), bytes()) == 0);
  }

 private:
  int64_t count_;
  std::unique_ptr<T[]> data_;
};

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline std::mt19937 &random_bits() {
  static std::mt19937 bits(1);
  return bits;
}

inline Array<float> normal(int64_t count, float deviation = 1.0f) {
  std::normal_distribution<float> draw(0.0f, deviation);
  Array<float> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = draw(random_bits());
  return x;
}

// ---- bf16 -------------------------------------------------------------------------------------

inline double widened(float x) { return x; }
inline double widened(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x = 0.0f;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Cut, not rounded: inputs only have to be representable.
inline uint16_t cut_to_bf16(float x) { return static_cast<uint16_t>(bits_of(x) >> 16); }

inline Array<uint16_t> cut_to_bf16(const Array<float> &x) {
  Array<uint16_t> narrow(x.count());
  for (int64_t i = 0; i < x.count(); ++i) narrow[i] = cut_to_bf16(x[i]);
  return narrow;
}

// ---- comparisons ------------------------------------------------------------------------------

// Every element within `bound` times the largest expected magnitude.
template <typename T>
void near(const char *file, int line, const std::string &name, const T *found,
          const std::vector<double> &expected, double bound) {
  double largest = 1e-30;
  for (const double x : expected) largest = std::fmax(largest, std::fabs(x));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double x = widened(found[i]);
    if (std::fabs(x - expected[i]) <= bound * largest) continue;
    return fail(file, line, name + "[" + std::to_string(i) + "] is " + std::to_string(x) +
                                ", expected " + std::to_string(expected[i]) + " of at most " +
                                std::to_string(largest));
  }
}

#define CHECK_NEAR(name, found, expected, bound) \
  check::near(__FILE__, __LINE__, name, found, expected, bound)

// ---- instruction sets -------------------------------------------------------------------------

// Calls run() with every instruction set that this machine and build have.
template <typename Run>
void on_every_instruction_set(const Run &run) {
  const std::string before = megaslide_instruction_set(), outer = context;
  for (const char *name :
       {"baseline", "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx"}) {
    if (megaslide_use_instruction_set(name) != MEGASLIDE_OK) continue;
    context = outer + " " + name;
    run();
  }
  context = outer;
  CHECK_EQUAL(megaslide_use_instruction_set(before.c_str()), MEGASLIDE_OK);
}

inline int finish(const char *name) {
  std::printf("%s: %d failures (best instruction set: %s)\n", name, failures,
              megaslide_instruction_set());
  return failures == 0 ? 0 : 1;
}

}  // namespace check
