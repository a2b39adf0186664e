// One AdamW step of every kind of state against its definition in double.
#include "check.h"

namespace {

using check::Array;

constexpr int64_t kBlock = MEGASLIDE_ADAMW_BLOCK;
constexpr float kUnset = 12345.0f;

enum class Kind { whole, rounded, split };

struct Region {
  Kind kind;
  bool coded, averaged;
  int64_t count;
  Array<float> master, ema, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  Array<uint16_t> weight;
  Array<int16_t> residual;
  Array<uint8_t> exp_avg_code, exp_avg_sq_code;

  Region copy() const {
    return {kind, coded, averaged, count, master.copy(), ema.copy(), exp_avg.copy(),
            exp_avg_sq.copy(), exp_avg_scale.copy(), exp_avg_sq_scale.copy(), weight.copy(),
            residual.copy(), exp_avg_code.copy(), exp_avg_sq_code.copy()};
  }
  megaslide_adamw_state state() const {
    const bool split = kind == Kind::split;
    return {count,
            split ? nullptr : master.data(),
            kind == Kind::whole ? nullptr : weight.data(),
            split ? residual.data() : nullptr,
            coded ? static_cast<void *>(exp_avg_code.data()) : exp_avg.data(),
            coded ? static_cast<void *>(exp_avg_sq_code.data()) : exp_avg_sq.data(),
            coded ? exp_avg_scale.data() : nullptr,
            coded ? exp_avg_sq_scale.data() : nullptr,
            averaged ? ema.data() : nullptr};
  }
  float master_at(int64_t i) const {
    if (kind != Kind::split) return master[i];
    const uint32_t bits = (uint32_t{weight[i]} << 16) + static_cast<uint32_t>(residual[i]);
    float x = 0.0f;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  bool same_bits(const Region &o) const {
    return master.same_bits(o.master) && ema.same_bits(o.ema) && exp_avg.same_bits(o.exp_avg) &&
           exp_avg_sq.same_bits(o.exp_avg_sq) && exp_avg_scale.same_bits(o.exp_avg_scale) &&
           exp_avg_sq_scale.same_bits(o.exp_avg_sq_scale) && weight.same_bits(o.weight) &&
           residual.same_bits(o.residual) && exp_avg_code.same_bits(o.exp_avg_code) &&
           exp_avg_sq_code.same_bits(o.exp_avg_sq_code);
  }
};

// ---- 8-bit moments, by their description ------------------------------------------------------

// A code is a number 2^e (1 + m/16) counted up from `offset`; 1.9375 is the largest.
double decoded(int code, double offset, double scale) {
  const double y = offset * std::pow(2.0, code / 16) * (1 + code % 16 / 16.0);
  return (y - offset) / (1.9375 - offset) * scale;
}

double exp_avg_of(const Region &r, int64_t i) {
  if (!r.coded) return r.exp_avg[i];
  const int code = r.exp_avg_code[i];
  const double magnitude = decoded(code & 127, 0x1p-7, r.exp_avg_scale[i / kBlock]);
  return code & 128 ? -magnitude : magnitude;
}

double root_of(const Region &r, int64_t i) {
  return decoded(r.exp_avg_sq_code[i], 0x1p-15, r.exp_avg_sq_scale[i / kBlock]);
}

double exp_avg_sq_of(const Region &r, int64_t i) {
  return r.coded ? root_of(r, i) * root_of(r, i) : r.exp_avg_sq[i];
}

// How far two neighbouring codes are apart at x.
double code_step(double x, double offset, double scale) {
  const double y = offset + std::fabs(x) / scale * (1.9375 - offset);
  return std::pow(2.0, std::floor(std::log2(y)) - 4) / (1.9375 - offset) * scale;
}

// ---- cases ------------------------------------------------------------------------------------

Region drawn(Kind kind, bool coded, bool averaged, int64_t n) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  Region r = {kind, coded, averaged, n, check::normal(n), check::normal(n),
              check::normal(n, 1e-2f), check::normal(n, 1e-2f), check::normal(blocks),
              check::normal(blocks), Array<uint16_t>(n), Array<int16_t>(n), Array<uint8_t>(n),
              Array<uint8_t>(n)};
  for (int64_t i = 0; i < n; ++i) {
    r.exp_avg_sq[i] = std::fabs(r.exp_avg_sq[i]);
    r.exp_avg_code[i] = static_cast<uint8_t>(check::random_bits()());
    r.exp_avg_sq_code[i] = static_cast<uint8_t>(check::random_bits()());
    const uint32_t bits = check::bits_of(r.master[i]);
    r.weight[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    r.residual[i] = static_cast<int16_t>(bits & 0xffffu);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    r.exp_avg_scale[b] = std::fabs(r.exp_avg_scale[b]) * 1e-2f;
    r.exp_avg_sq_scale[b] = std::fabs(r.exp_avg_sq_scale[b]) * 1e-2f;
  }
  return r;
}

megaslide_adamw_coefficients coefficients(int step) {
  const double lr = 1e-3, beta1 = 0.9, beta2 = 0.999;
  return {0.5f,
          static_cast<float>(1 - lr * 0.01),
          static_cast<float>(1 - beta1),
          static_cast<float>(beta2),
          static_cast<float>(1 - beta2),
          static_cast<float>(std::sqrt(1 - std::pow(beta2, step))),
          1e-8f,
          static_cast<float>(-lr / (1 - std::pow(beta1, step))),
          0.25f,
          static_cast<uint32_t>(step)};
}

struct Expected {
  double master, exp_avg, exp_avg_sq, ema;
};

Expected expected_at(const Region &r, double grad, const megaslide_adamw_coefficients &by,
                     int64_t i) {
  const double g = grad * by.grad_scale;
  const double m = exp_avg_of(r, i) + (g - exp_avg_of(r, i)) * by.exp_avg_weight;
  const double v = exp_avg_sq_of(r, i) * by.beta2 + by.exp_avg_sq_weight * g * g;
  const double master = r.master_at(i) * static_cast<double>(by.decay) +
                        by.step_size * m / (std::sqrt(v) / by.root_correction + by.eps);
  return {master, m, v, r.ema[i] + (master - r.ema[i]) * by.ema_weight};
}

// Within `ulps` units in the last place of a float of the size of x, or of an operand's if larger.
void within(const char *file, int line, const char *name, double found, double expected,
            double ulps, double operand) {
  const double size = std::fmax(std::fabs(expected), operand);
  if (std::fabs(found - expected) <= ulps * std::fmax(size * 0x1p-23, 0x1p-149)) return;
  check::fail(file, line, std::string(name) + " is " + std::to_string(found) + ", expected " +
                              std::to_string(expected) + ", of size " + std::to_string(size));
}

#define CHECK_WITHIN(found, expected, ulps, operand) \
  within(__FILE__, __LINE__, #found, found, expected, ulps, operand)

void check_codes(const Region &after, const std::vector<Expected> &want) {
  for (int64_t first = 0; first < after.count; first += kBlock) {
    const int64_t last = std::min(first + kBlock, after.count), block = first / kBlock;
    double most = 0, most_root = 0;
    for (int64_t i = first; i < last; ++i) {
      const Expected &x = want[static_cast<size_t>(i)];
      most = std::fmax(most, std::fabs(x.exp_avg));
      most_root = std::fmax(most_root, std::sqrt(x.exp_avg_sq));
    }
    CHECK_WITHIN(after.exp_avg_scale[block], most, 8, 0);
    CHECK_WITHIN(after.exp_avg_sq_scale[block], most_root, 8, 0);
    for (int64_t i = first; i < last; ++i) {
      const Expected &x = want[static_cast<size_t>(i)];
      const double root = std::sqrt(x.exp_avg_sq);
      // Cut at random, up or down: never further than to the next code.
      const double m_off = exp_avg_of(after, i) - x.exp_avg, root_off = root_of(after, i) - root;
      CHECK(std::fabs(m_off) <= 1.01 * code_step(x.exp_avg, 0x1p-7, most));
      CHECK(std::fabs(root_off) <= 1.01 * code_step(root, 0x1p-15, most_root));
      CHECK(root == 0 || after.exp_avg_sq_code[i] != 0);
    }
  }
}

template <typename Grad>
void check_step(const Region &before, const Region &after, const Array<Grad> &grad,
                const megaslide_adamw_coefficients &by) {
  std::vector<Expected> want;
  for (int64_t i = 0; i < before.count; ++i) {
    want.push_back(expected_at(before, check::widened(grad[i]), by, i));
    const Expected &x = want.back();
    const double was = before.master_at(i), update = x.master - was;
    // Decoding adds two roundings.
    CHECK_WITHIN(after.master_at(i), x.master, after.coded ? 4 : 2,
                 std::fmax(std::fabs(was), std::fabs(update)));
    if (after.averaged) {
      const double ema = std::fabs(before.ema[i]);
      CHECK_WITHIN(after.ema[i], x.ema, 2, std::fmax(ema, std::fabs(x.master)));
    }
    if (after.kind == Kind::rounded) {
      CHECK_EQUAL(after.weight[i], (check::bits_of(after.master[i]) + 0x8000u) >> 16);
    }
    if (after.coded) continue;
    const double g = check::widened(grad[i]) * by.grad_scale, m = before.exp_avg[i];
    CHECK_WITHIN(after.exp_avg[i], x.exp_avg, 2, std::fmax(std::fabs(m), std::fabs(g)));
    CHECK_WITHIN(after.exp_avg_sq[i], x.exp_avg_sq, 3, 0);
  }
  if (after.coded) check_codes(after, want);
}

template <typename Grad>
Array<Grad> gradient(int64_t n);
template <>
Array<float> gradient<float>(int64_t n) {
  return check::normal(n);
}
template <>
Array<uint16_t> gradient<uint16_t>(int64_t n) {
  return check::cut_to_bf16(check::normal(n));
}

std::string name_of(Kind kind, bool coded, bool averaged, int64_t count, size_t bytes) {
  const char *const kinds[] = {"whole", "rounded", "split"};
  return std::string(kinds[static_cast<int>(kind)]) + (coded ? ", 8-bit" : ", fp32") +
         (averaged ? ", ema" : "") + ", count " + std::to_string(count) + ", gradient of " +
         std::to_string(bytes) + " bytes";
}

// Bits that differ between builds would make runs differ between machines.
template <typename Grad>
void test_step(Kind kind, bool coded, bool averaged, int64_t count) {
  check::context = name_of(kind, coded, averaged, count, sizeof(Grad));
  const Region before = drawn(kind, coded, averaged, count);
  const Array<Grad> grad = gradient<Grad>(count);
  if (count > 2) grad[1] = Grad(0);  // and a denormal product beside it
  if (count > 2 && !coded) before.exp_avg_sq[1] = 1e-40f;
  const auto by = coefficients(3);
  Region first = before.copy();
  bool any = false;
  check::on_every_instruction_set([&] {
    for (const int32_t threads : {1, 3}) {
      Region after = before.copy();
      const auto state = after.state();
      CHECK_EQUAL(megaslide_adamw(&state, grad.data(), sizeof(Grad) == 2, &by, threads),
                  MEGASLIDE_OK);
      if (!any) {
        check_step(before, after, grad, by);
        first = after.copy();
      }
      any = true;
      CHECK(first.same_bits(after));
    }
  });
}

// Views need not be aligned to more than their elements, and what is around them stays.
void test_unaligned() {
  check::context = "unaligned";
  const int64_t n = 300;
  const auto by = coefficients(1);
  check::on_every_instruction_set([&] {
    const Array<float> master(n + 2, kUnset), m(n + 2, kUnset), v(n + 2, kUnset);
    const Array<uint16_t> weight(n + 2, uint16_t{7}), grad(n + 1, uint16_t{0x3f80});
    for (int64_t i = 1; i <= n; ++i) master[i] = 1.0f, m[i] = v[i] = 0.0f;
    megaslide_adamw_state state = {};
    state.count = n;
    state.master = master.data() + 1, state.weight = weight.data() + 1;
    state.exp_avg = m.data() + 1, state.exp_avg_sq = v.data() + 1;
    CHECK_EQUAL(megaslide_adamw(&state, grad.data() + 1, 1, &by, 1), MEGASLIDE_OK);
    for (const int64_t i : {int64_t{0}, n + 1}) {
      CHECK(master[i] == kUnset && m[i] == kUnset && v[i] == kUnset && weight[i] == 7);
    }
    for (int64_t i = 2; i <= n; ++i) CHECK(master[i] == master[1] && master[i] < 1.0f);
  });
}

// A gradient that is not finite spoils its own element, and with 8-bit moments its own block.
void test_not_finite(bool coded) {
  check::context = coded ? "not finite, 8-bit" : "not finite, fp32";
  const int64_t n = 3 * kBlock + 5, bad = kBlock + 9;
  const Region before = drawn(Kind::split, coded, false, n);
  const auto by = coefficients(2);
  for (const float value : {check::kNaN, check::kInfinity, -check::kInfinity}) {
    check::on_every_instruction_set([&] {
      Region after = before.copy();
      const Array<float> grad(n, 0.1f);
      grad[bad] = value;
      const auto state = after.state();
      CHECK_EQUAL(megaslide_adamw(&state, grad.data(), 0, &by, 1), MEGASLIDE_OK);
      CHECK(std::isnan(after.master_at(bad)));
      for (int64_t i = 0; i < n; ++i) CHECK(i == bad || std::isfinite(after.master_at(i)));
      for (int64_t b = 0; coded && b * kBlock < n; ++b) {
        CHECK(std::isfinite(after.exp_avg_scale[b]) != (b == bad / kBlock));
      }
    });
  }
}

void test_refusals() {
  check::context = "refusals";
  const Region r = drawn(Kind::split, false, false, 4);
  const Array<float> grad(4);
  const auto by = coefficients(1);
  const auto status = [&](const megaslide_adamw_state &state, const void *from, int32_t threads) {
    return megaslide_adamw(&state, from, 0, &by, threads);
  };
  const auto good = r.state();
  CHECK_EQUAL(status(good, grad.data(), 0), MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(status(good, nullptr, 1), MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_adamw(nullptr, grad.data(), 0, &by, 1), MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_adamw(&good, grad.data(), 0, nullptr, 1), MEGASLIDE_INVALID_ARGUMENT);
  auto bad = good;
  bad.count = -1;
  CHECK_EQUAL(status(bad, grad.data(), 1), MEGASLIDE_INVALID_ARGUMENT);
  bad = good, bad.residual = nullptr;  // a weight alone is no master
  CHECK_EQUAL(status(bad, grad.data(), 1), MEGASLIDE_INVALID_ARGUMENT);
  bad = good, bad.master = grad.data();  // a master and a residual are two
  CHECK_EQUAL(status(bad, grad.data(), 1), MEGASLIDE_INVALID_ARGUMENT);
  bad = good, bad.exp_avg_scale = grad.data();  // one scale of two
  CHECK_EQUAL(status(bad, grad.data(), 1), MEGASLIDE_INVALID_ARGUMENT);
  bad = {};
  CHECK_EQUAL(status(bad, nullptr, 1), MEGASLIDE_OK);
}

}  // namespace

int main() {
  std::vector<int64_t> counts = {127, 128, 129, 255, 256, 257, 300, 32767, 32769, 70001};
  for (int64_t count = 0; count < 64; ++count) counts.push_back(count);
  for (const Kind kind : {Kind::whole, Kind::rounded, Kind::split}) {
    for (const bool coded : {false, true}) {
      for (const bool averaged : {false, true}) {
        for (const int64_t count : counts) {
          test_step<float>(kind, coded, averaged, count);
          test_step<uint16_t>(kind, coded, averaged, count);
        }
      }
    }
  }
  test_unaligned();
  test_not_finite(false);
  test_not_finite(true);
  test_refusals();
  return check::finish("adamw");
}
