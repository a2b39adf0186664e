// Status texts, the choice of the instruction set, and the triad.
#include "check.h"

namespace {

using check::Array;

void test_status_texts_differ() {
  for (int32_t a = MEGASLIDE_OK; a <= MEGASLIDE_UNSUPPORTED; ++a) {
    for (int32_t b = a + 1; b <= MEGASLIDE_UNSUPPORTED + 1; ++b) {
      CHECK(std::strcmp(megaslide_status_string(a), megaslide_status_string(b)) != 0);
    }
  }
  CHECK(std::strcmp(megaslide_status_string(-1), megaslide_status_string(99)) == 0);
}

void test_instruction_sets() {
  const std::string best = megaslide_instruction_set();
  CHECK_EQUAL(megaslide_use_instruction_set("baseline"), MEGASLIDE_OK);
  CHECK(std::strcmp(megaslide_instruction_set(), "baseline") == 0);
  for (const char *name : {"", "x86-64", "avx512"}) {
    CHECK_EQUAL(megaslide_use_instruction_set(name), MEGASLIDE_UNSUPPORTED);
  }
  CHECK_EQUAL(megaslide_use_instruction_set(nullptr), MEGASLIDE_UNSUPPORTED);
  CHECK_EQUAL(megaslide_use_instruction_set(best.c_str()), MEGASLIDE_OK);
  CHECK(best == megaslide_instruction_set());
}

void test_triad(int64_t count, int32_t threads) {
  check::context = "count " + std::to_string(count) + ", threads " + std::to_string(threads);
  const Array<float> b(count, 0.7f), c = check::normal(count);
  for (int64_t i = 0; i < count; ++i) c[i] = std::fabs(c[i]);  // nothing cancels: one bound for all
  for (int64_t skipped = 0; skipped < std::min<int64_t>(count + 1, 5); ++skipped) {
    const Array<float> a(count, check::kNaN);
    const int64_t left = count - skipped;
    CHECK_EQUAL(megaslide_triad(a.data() + skipped, b.data(), c.data() + skipped, 0.75f, left,
                                threads), MEGASLIDE_OK);
    std::vector<double> expected;
    for (int64_t i = 0; i < left; ++i) expected.push_back(b[i] + 0.75 * c[skipped + i]);
    CHECK_NEAR("a", a.data() + skipped, expected, 0x1p-22);
    for (int64_t i = 0; i < skipped; ++i) CHECK(std::isnan(a[i]));
  }
}

void test_triad_refuses() {
  check::context = "triad";
  const Array<float> a(1), b(1);
  CHECK_EQUAL(megaslide_triad(nullptr, nullptr, nullptr, 1, 0, 1), MEGASLIDE_OK);
  CHECK_EQUAL(megaslide_triad(a.data(), b.data(), b.data(), 1, -1, 1), MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_triad(a.data(), b.data(), b.data(), 1, 1, 0), MEGASLIDE_INVALID_ARGUMENT);
  CHECK_EQUAL(megaslide_triad(a.data(), nullptr, b.data(), 1, 1, 1), MEGASLIDE_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  CHECK_EQUAL(megaslide_abi_version(), MEGASLIDE_ABI_VERSION);
  test_status_texts_differ();
  test_instruction_sets();
  for (const int64_t count : {0, 1, 2, 3, 4, 5, 15, 16, 17, 65535, 65536, 65537, 200003}) {
    for (const int32_t threads : {1, 3}) test_triad(count, threads);
  }
  test_triad_refuses();
  return check::finish("library");
}
