// 3D-DSA, forward and backward, against its definition in double (attention_oracle.h).
#include "attention_oracle.h"

namespace {

using check::Array;
using oracle::Shape;

template <typename T>
struct Arrays {
  Array<T> q, k, v, extra_k, extra_v, grad_out;
  Array<float> offsets;
};

template <typename T>
Array<T> drawn(int64_t count);
template <>
Array<float> drawn<float>(int64_t count) {
  return check::normal(count);
}
template <>
Array<uint16_t> drawn<uint16_t>(int64_t count) {
  return check::cut_to_bf16(check::normal(count));
}

// Multiples of 2^-6, whose products with half-integers are exact; `range` in voxels.
Array<float> drawn_offsets(const Shape &s, int kind, double range, bool whole) {
  Array<float> x = check::normal(s.offsets(kind), static_cast<float>(range));
  for (int64_t i = 0; i < x.count(); ++i) {
    const bool matrix = kind == MEGASLIDE_OFFSETS_AFFINE && i % 12 >= 3;
    const float kept = matrix ? x[i] / 8 : x[i];
    x[i] = whole && !matrix ? std::round(kept) : std::round(kept * 64) / 64;
  }
  return x;
}

template <typename T>
Arrays<T> drawn_arrays(const Shape &s, int kind, double range, bool whole) {
  return {drawn<T>(s.numbers()), drawn<T>(s.numbers()), drawn<T>(s.numbers()),
          drawn<T>(s.extra_numbers()), drawn<T>(s.extra_numbers()), drawn<T>(s.numbers()),
          drawn_offsets(s, kind, range, whole)};
}

template <typename T>
oracle::Numbers wide(const Array<T> &x) {
  oracle::Numbers numbers;
  for (int64_t i = 0; i < x.count(); ++i) numbers.push_back(check::widened(x[i]));
  return numbers;
}

template <typename T>
struct Found {
  Array<T> out, q, k, v, extra_k, extra_v;
  Array<float> lse, offsets;

  bool same_bits(const Found &o) const {
    return out.same_bits(o.out) && lse.same_bits(o.lse) && q.same_bits(o.q) && k.same_bits(o.k) &&
           v.same_bits(o.v) && offsets.same_bits(o.offsets) && extra_k.same_bits(o.extra_k) &&
           extra_v.same_bits(o.extra_v);
  }
};

megaslide_attention_shape given(const Shape &s, int kind, bool bf16, int32_t threads, float scale) {
  return {s.batch, {s.size[0], s.size[1], s.size[2]}, s.heads, s.head_dim,
          {s.window[0], s.window[1], s.window[2]}, s.groups, s.extra, kind,
          bf16 ? MEGASLIDE_BFLOAT16 : MEGASLIDE_FLOAT32, threads, scale};
}

template <typename T>
Found<T> run(const Shape &s, int kind, const Arrays<T> &x, int32_t threads, float scale) {
  const auto shape = given(s, kind, sizeof(T) == 2, threads, scale);
  const megaslide_attention_inputs in = {x.q.data(), x.k.data(), x.v.data(), x.offsets.data(),
                                         x.extra_k.data(), x.extra_v.data()};
  const auto unset = [](int64_t count) {
    return Array<T>(count, sizeof(T) == 2 ? T(0x7fc0) : T(check::kNaN));
  };
  Found<T> r = {unset(s.numbers()), unset(s.numbers()), unset(s.numbers()), unset(s.numbers()),
                unset(s.extra_numbers()), unset(s.extra_numbers()),
                Array<float>(s.batch * s.voxels() * s.heads, check::kNaN),
                Array<float>(s.offsets(kind), check::kNaN)};
  CHECK_EQUAL(megaslide_attention_forward(&shape, &in, r.out.data(), r.lse.data()), MEGASLIDE_OK);
  const megaslide_attention_gradients grad = {r.q.data(), r.k.data(), r.v.data(), r.offsets.data(),
                                              r.extra_k.data(), r.extra_v.data()};
  CHECK_EQUAL(megaslide_attention_backward(&shape, &in, r.out.data(), r.lse.data(),
                                           x.grad_out.data(), &grad), MEGASLIDE_OK);
  return r;
}

template <typename T>
void check_result(const Found<T> &found, const oracle::Result &expected) {
  // bf16: out is rounded once, and the backward starts from that and may round its weights.
  const double forward = sizeof(T) == 2 ? 0x1p-7 : 1e-5, backward = sizeof(T) == 2 ? 2e-2 : 4e-5;
  CHECK_NEAR("out", found.out.data(), expected.out, forward);
  CHECK_NEAR("lse", found.lse.data(), expected.lse, sizeof(T) == 2 ? 1e-4 : 1e-5);
  CHECK_NEAR("dq", found.q.data(), expected.q, backward);
  CHECK_NEAR("dk", found.k.data(), expected.k, backward);
  CHECK_NEAR("dv", found.v.data(), expected.v, backward);
  CHECK_NEAR("doffsets", found.offsets.data(), expected.offsets, backward);
  CHECK_NEAR("dextra_k", found.extra_k.data(), expected.extra_k, backward);
  CHECK_NEAR("dextra_v", found.extra_v.data(), expected.extra_v, backward);
}

template <typename T>
void test_case(const Shape &s, int kind, double range, bool whole) {
  check::context = s.name() + ", kind " + std::to_string(kind) + ", " +
                   std::to_string(sizeof(T)) + " bytes, range " + std::to_string(range);
  const Arrays<T> x = drawn_arrays<T>(s, kind, range, whole);
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
  const oracle::Result expected =
      oracle::attention(s, kind, {wide(x.q), wide(x.k), wide(x.v), wide(x.offsets),
                                  wide(x.extra_k), wide(x.extra_v), wide(x.grad_out), scale});
  check::on_every_instruction_set([&] {
    const Found<T> one = run(s, kind, x, 1, scale);
    check_result(one, expected);
    CHECK(one.same_bits(run(s, kind, x, 3, scale)));
  });
}

void test_shapes() {
  const Shape shapes[] = {
      {0, {2, 2, 2}, 1, 8, {1, 2, 2}, 1, 0},    {1, {1, 1, 1}, 1, 1, {1, 1, 1}, 1, 0},
      {1, {1, 1, 1}, 2, 4, {1, 1, 1}, 1, 3},    {1, {2, 3, 3}, 1, 5, {2, 3, 3}, 1, 0},
      {1, {3, 5, 7}, 2, 16, {3, 3, 3}, 1, 1},   {1, {3, 5, 7}, 2, 24, {2, 4, 2}, 2, 0},
      {1, {1, 9, 10}, 1, 33, {1, 3, 3}, 1, 17}, {2, {3, 4, 5}, 4, 20, {1, 3, 5}, 2, 5},
      {1, {3, 1, 11}, 1, 64, {3, 1, 5}, 1, 0},  {1, {2, 13, 1}, 1, 128, {1, 7, 1}, 1, 2},
      {1, {4, 9, 11}, 1, 8, {3, 7, 7}, 1, 0},   {1, {1, 1, 40}, 2, 12, {1, 1, 18}, 1, 0},
      {1, {3, 19, 21}, 2, 8, {1, 2, 3}, 1, 0}};
  for (const Shape &s : shapes) {
    for (int kind = MEGASLIDE_OFFSETS_NONE; kind <= MEGASLIDE_OFFSETS_TAP; ++kind) {
      for (const double range : {1.0, 6.0}) {
        if (kind == MEGASLIDE_OFFSETS_NONE && range > 1) continue;
        test_case<float>(s, kind, range, false);
        test_case<uint16_t>(s, kind, range, false);
      }
    }
  }
}

// Where the interpolation has no derivative the definition takes one side, and so must kernels.
void test_whole_offsets_and_far_ones() {
  const Shape s = {1, {3, 6, 7}, 2, 16, {2, 3, 4}, 1, 2};
  for (int kind = MEGASLIDE_OFFSETS_SHIFT; kind <= MEGASLIDE_OFFSETS_TAP; ++kind) {
    test_case<float>(s, kind, 1.0, true);
    test_case<float>(s, kind, 1e6, true);
    test_case<uint16_t>(s, kind, 1e6, true);
  }
}

// No offset, however wrong, may lead outside the arrays; other queries stay what they were.
template <typename T>
void test_wrong_offsets(int kind) {
  const Shape s = {1, {3, 6, 7}, 1, 16, {3, 3, 3}, 1, 0};
  check::context = "wrong offsets, kind " + std::to_string(kind);
  const Arrays<T> x = drawn_arrays<T>(s, kind, 1.0, false);
  const int64_t bad = 60, channels = s.channels(kind), d = s.head_dim;
  const float least = std::numeric_limits<float>::denorm_min(), most = 3e38f;
  for (const float value : {check::kNaN, check::kInfinity, -check::kInfinity, most, -most, least}) {
    check::on_every_instruction_set([&] {
      const Found<T> plain = run(s, kind, x, 1, 0.25f);
      const Arrays<T> wrong = {x.q.copy(), x.k.copy(), x.v.copy(), x.extra_k.copy(),
                               x.extra_v.copy(), x.grad_out.copy(), x.offsets.copy()};
      for (int64_t c = 0; c < channels; ++c) wrong.offsets[bad * channels + c] = value;
      const Found<T> found = run(s, kind, wrong, 1, 0.25f);
      // The tiles of the matrix kernel are shared by queries, and it rounds by what it does.
      const bool exact = sizeof(T) == 4;
      for (int64_t i = 0; exact && i < s.numbers(); ++i) {
        if (i / d != bad) CHECK(found.out[i] == plain.out[i] && found.q[i] == plain.q[i]);
      }
    });
  }
}

// NaN and infinities in q, k and v: nothing is read or written outside, and other heads stay whole.
template <typename T>
void test_not_finite(int kind) {
  const Shape s = {1, {2, 5, 6}, 2, 16, {1, 3, 3}, 1, 2};
  check::context = "not finite, kind " + std::to_string(kind);
  const Arrays<T> x = drawn_arrays<T>(s, kind, 1.0, false);
  const auto narrow = [](float value) {
    return sizeof(T) == 2 ? static_cast<T>(check::cut_to_bf16(value)) : static_cast<T>(value);
  };
  const float values[] = {check::kNaN, check::kInfinity, -check::kInfinity};
  const Array<T> *const arrays[] = {&x.q, &x.k, &x.v, &x.extra_k, &x.extra_v, &x.grad_out};
  for (const float value : values) {
    for (const Array<T> *array : arrays) {
      const T kept = (*array)[0];
      (*array)[0] = narrow(value);  // of the first head
      check::on_every_instruction_set([&] {
        const Found<T> found = run(s, kind, x, 1, 0.25f);
        for (int64_t i = 0; i < s.numbers(); ++i) {
          if (i / s.head_dim % 2 == 0) continue;
          for (const Array<T> *of_head : {&found.out, &found.q, &found.k, &found.v}) {
            CHECK(std::isfinite(check::widened((*of_head)[i])));
          }
        }
      });
      (*array)[0] = kept;
    }
  }
}

void test_refusals() {
  check::context = "refusals";
  const Shape s = {1, {1, 2, 2}, 2, 4, {1, 2, 2}, 1, 1};
  const Arrays<float> x = drawn_arrays<float>(s, MEGASLIDE_OFFSETS_SHIFT, 1.0, false);
  const Found<float> r = run(s, MEGASLIDE_OFFSETS_SHIFT, x, 1, 0.5f);
  const megaslide_attention_inputs in = {x.q.data(), x.k.data(), x.v.data(), x.offsets.data(),
                                         x.extra_k.data(), x.extra_v.data()};
  const megaslide_attention_gradients grad = {r.q.data(), r.k.data(), r.v.data(), nullptr,
                                              r.extra_k.data(), r.extra_v.data()};
  const auto good = given(s, MEGASLIDE_OFFSETS_SHIFT, false, 1, 0.5f);
  const auto expect = [&](int32_t status, const megaslide_attention_shape &shape,
                          const megaslide_attention_inputs &inputs) {
    CHECK_EQUAL(megaslide_attention_forward(&shape, &inputs, r.out.data(), r.lse.data()), status);
    CHECK_EQUAL(megaslide_attention_backward(&shape, &inputs, r.out.data(), r.lse.data(),
                                             x.grad_out.data(), &grad), status);
  };
  expect(MEGASLIDE_OK, good, in);
  const auto refused = [&](const megaslide_attention_shape &shape) {
    expect(MEGASLIDE_INVALID_ARGUMENT, shape, in);
  };
  auto bad = good;
  bad.batch = -1, refused(bad);
  bad = good, bad.size[2] = 0, refused(bad);
  bad = good, bad.size[0] = bad.size[1] = int64_t{1} << 31, refused(bad);
  bad = good, bad.window[1] = 3, refused(bad);
  bad = good, bad.window[1] = 0, refused(bad);
  bad = good, bad.heads = 0, refused(bad);
  bad = good, bad.head_dim = 0, refused(bad);
  bad = good, bad.groups = 3, refused(bad);
  bad = good, bad.extra = -1, refused(bad);
  bad = good, bad.kind = 4, refused(bad);
  bad = good, bad.kind = -1, refused(bad);
  bad = good, bad.dtype = 2, refused(bad);
  bad = good, bad.threads = 0, refused(bad);
  auto missing = in;
  missing.k = nullptr, expect(MEGASLIDE_INVALID_ARGUMENT, good, missing);
  missing = in, missing.offsets = nullptr, expect(MEGASLIDE_INVALID_ARGUMENT, good, missing);
  missing = in, missing.extra_v = nullptr, expect(MEGASLIDE_INVALID_ARGUMENT, good, missing);
  CHECK_EQUAL(megaslide_attention_forward(nullptr, &in, r.out.data(), r.lse.data()),
              MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_attention_forward(&good, &in, nullptr, r.lse.data()),
              MEGASLIDE_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  test_shapes();
  test_whole_offsets_and_far_ones();
  for (int kind = MEGASLIDE_OFFSETS_NONE; kind <= MEGASLIDE_OFFSETS_TAP; ++kind) {
    test_not_finite<float>(kind);
    test_not_finite<uint16_t>(kind);
    if (kind == MEGASLIDE_OFFSETS_NONE) continue;
    test_wrong_offsets<float>(kind);
    test_wrong_offsets<uint16_t>(kind);
  }
  test_refusals();
  return check::finish("attention");
}
