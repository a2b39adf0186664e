// The depthwise convolution and its sums against their definition in double.
#include "check.h"

namespace {

using check::Array;

struct Shape {
  int64_t batch, size[3], channels;
};

// Numbers of x and out that meet at one tap: calls run(token of out, token of x, tap).
template <typename Run>
void for_taps(const Shape &shape, const Run &run) {
  const int64_t T = shape.size[0], H = shape.size[1], W = shape.size[2];
  for (int64_t n = 0; n < shape.batch * T * H * W; ++n) {
    const int64_t t = n / (H * W) % T, h = n / W % H, w = n % W;
    for (int64_t tap = 0; tap < 27; ++tap) {
      const int64_t dt = tap / 9 - 1, dh = tap / 3 % 3 - 1, dw = tap % 3 - 1;
      if (t + dt < 0 || t + dt >= T || h + dh < 0 || h + dh >= H) continue;
      if (w + dw < 0 || w + dw >= W) continue;
      run(n, n + (dt * H + dh) * W + dw, tap);
    }
  }
}

template <typename X, typename Out>
struct Case {
  Shape shape;
  int64_t tokens;
  Array<X> x;
  Array<Out> grad;
  Array<float> weight, bias;

  megaslide_depthwise_shape given(int32_t threads) const {
    const int64_t *s = shape.size;
    return {shape.batch, {s[0], s[1], s[2]}, shape.channels, sizeof(X) == 2, sizeof(Out) == 2,
            threads};
  }
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

template <typename X, typename Out>
std::vector<double> expected_out(const Case<X, Out> &c, bool biased) {
  const int64_t D = c.shape.channels;
  std::vector<double> out(static_cast<size_t>(c.tokens * D));
  for (int64_t i = 0; biased && i < c.tokens * D; ++i) out[static_cast<size_t>(i)] = c.bias[i % D];
  for_taps(c.shape, [&](int64_t to, int64_t from, int64_t tap) {
    for (int64_t d = 0; d < D; ++d) {
      out[static_cast<size_t>(to * D + d)] +=
          check::widened(c.weight[tap * D + d]) * check::widened(c.x[from * D + d]);
    }
  });
  return out;
}

template <typename X, typename Out>
std::vector<double> expected_sums(const Case<X, Out> &c) {
  const int64_t D = c.shape.channels;
  std::vector<double> sums(static_cast<size_t>(28 * D));
  for_taps(c.shape, [&](int64_t to, int64_t from, int64_t tap) {
    for (int64_t d = 0; d < D; ++d) {
      sums[static_cast<size_t>(tap * D + d)] +=
          check::widened(c.grad[to * D + d]) * check::widened(c.x[from * D + d]);
    }
  });
  for (int64_t i = 0; i < c.tokens * D; ++i) {
    sums[static_cast<size_t>(27 * D + i % D)] += check::widened(c.grad[i]);
  }
  return sums;
}

template <typename X, typename Out>
void test_shape(const Shape &shape) {
  const int64_t tokens = shape.batch * shape.size[0] * shape.size[1] * shape.size[2];
  const int64_t D = shape.channels;
  const Case<X, Out> c = {shape, tokens, drawn<X>(tokens * D), drawn<Out>(tokens * D),
                          check::normal(27 * D), check::normal(D)};
  const auto plain = expected_out(c, false), biased = expected_out(c, true);
  const auto sums = expected_sums(c);
  const double bound = sizeof(Out) == 2 ? 0x1p-8 : 2e-6;  // of one rounding, of fp32 sums
  check::on_every_instruction_set([&] {
    Array<float> first_sums(28 * D);
    for (const int32_t threads : {1, 3}) {
      const auto given = c.given(threads);
      Array<Out> out(tokens * D, Out(0x7fc0));
      Array<float> found(28 * D, check::kNaN);
      CHECK_EQUAL(megaslide_depthwise_conv(&given, c.x.data(), c.weight.data(), c.bias.data(),
                                           out.data()), MEGASLIDE_OK);
      CHECK_NEAR("out with bias", out.data(), biased, bound);
      CHECK_EQUAL(megaslide_depthwise_conv(&given, c.x.data(), c.weight.data(), nullptr,
                                           out.data()), MEGASLIDE_OK);
      CHECK_NEAR("out", out.data(), plain, bound);
      CHECK_EQUAL(megaslide_depthwise_conv_sums(&given, c.x.data(), c.grad.data(), found.data()),
                  MEGASLIDE_OK);
      CHECK_NEAR("sums", found.data(), sums, 1e-5);
      if (threads == 1) first_sums = found.copy();
      CHECK(first_sums.same_bits(found));
    }
  });
}

// A number that is not finite reaches its neighbours' outputs and no other, and no other channel.
void test_not_finite() {
  check::context = "not finite";
  const megaslide_depthwise_shape shape = {1, {3, 7, 9}, 21, 0, 0, 2};
  const int64_t D = 21, bad = (1 * 7 + 3) * 9 + 4;
  const Array<float> x = check::normal(189 * D), weight = check::normal(27 * D);
  x[bad * D + 5] = check::kInfinity;
  check::on_every_instruction_set([&] {
    const Array<float> out(189 * D);
    CHECK_EQUAL(megaslide_depthwise_conv(&shape, x.data(), weight.data(), nullptr, out.data()),
                MEGASLIDE_OK);
    for (int64_t n = 0; n < 189; ++n) {
      const bool near = std::abs(n / 9 % 7 - 3) <= 1 && std::abs(n % 9 - 4) <= 1;
      for (int64_t d = 0; d < D; ++d) CHECK(std::isfinite(out[n * D + d]) != (near && d == 5));
    }
  });
}

void test_refusals() {
  check::context = "refusals";
  const Array<float> x(27), weight(27), out(28);
  const megaslide_depthwise_shape good = {1, {1, 1, 1}, 1, 0, 0, 1};
  const auto refused = [&](megaslide_depthwise_shape shape) {
    CHECK_EQUAL(megaslide_depthwise_conv(&shape, x.data(), weight.data(), nullptr, out.data()),
                MEGASLIDE_INVALID_ARGUMENT);
    CHECK_EQUAL(megaslide_depthwise_conv_sums(&shape, x.data(), x.data(), out.data()),
                MEGASLIDE_INVALID_ARGUMENT);
  };
  auto bad = good;
  bad.batch = -1, refused(bad);
  bad = good, bad.size[1] = 0, refused(bad);
  bad = good, bad.channels = 0, refused(bad);
  bad = good, bad.threads = 0, refused(bad);
  bad = good, bad.size[0] = bad.size[1] = bad.size[2] = int64_t{1} << 31, refused(bad);
  CHECK_EQUAL(megaslide_depthwise_conv(nullptr, x.data(), weight.data(), nullptr, out.data()),
              MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_depthwise_conv(&good, nullptr, weight.data(), nullptr, out.data()),
              MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_depthwise_conv_sums(&good, x.data(), nullptr, out.data()),
              MEGASLIDE_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  const Shape shapes[] = {{0, {2, 2, 2}, 3},  {1, {1, 1, 1}, 1},  {1, {1, 1, 2}, 16},
                          {2, {1, 5, 3}, 33}, {1, {4, 1, 7}, 17}, {2, {3, 4, 5}, 129},
                          {1, {2, 3, 1}, 31}, {1, {3, 11, 13}, 200}};
  for (const Shape &shape : shapes) {
    check::context = "shape " + std::to_string(shape.batch) + " x " +
                     std::to_string(shape.size[0]) + "," + std::to_string(shape.size[1]) + "," +
                     std::to_string(shape.size[2]) + " x " + std::to_string(shape.channels);
    test_shape<float, float>(shape);
    test_shape<float, uint16_t>(shape);
    test_shape<uint16_t, float>(shape);
    test_shape<uint16_t, uint16_t>(shape);
  }
  test_not_finite();
  test_refusals();
  return check::finish("depthwise_conv");
}
