// AdamW behind the C interface: checks, and how a region is divided among threads.
//
// Elements are independent (8-bit moments: blocks of them are), so a region is cut into items that
// any thread may take, and results are the same bits for any number of threads.
#include "adamw.h"

#include <algorithm>

#include "instruction_set.h"
#include "megaslide.h"
#include "parallel.h"

namespace megaslide {
namespace {

constexpr int64_t kItem = 32768;  // elements; waking a thread costs about what these do
static_assert(kItem % kBlock == 0);

const AdamWKernels &kernels() {
#if defined(MEGASLIDE_X86_KERNELS)
  if (instruction_set() >= InstructionSet::x86_64_v4) return x86_64_v4::adamw_kernels;
  if (instruction_set() == InstructionSet::x86_64_v3) return x86_64_v3::adamw_kernels;
#endif
  return baseline::adamw_kernels;
}

bool valid(const megaslide_adamw_state &state, const void *grad) {
  if (state.count <= 0) return state.count == 0;
  const bool split = state.weight && state.residual && !state.master;
  const bool whole = state.master && !state.residual;
  const bool scales = !state.exp_avg_scale == !state.exp_avg_sq_scale;
  return (split || whole) && scales && state.exp_avg && state.exp_avg_sq && grad;
}

}  // namespace
}  // namespace megaslide

extern "C" {

int32_t megaslide_adamw(const megaslide_adamw_state *state, const void *grad, int32_t grad_is_bf16,
                        const megaslide_adamw_coefficients *coefficients, int32_t threads) {
  using namespace megaslide;
  if (!state || !coefficients || threads < 1 || !valid(*state, grad)) {
    return MEGASLIDE_INVALID_ARGUMENT;
  }
  const AdamWKernels &kernel = kernels();
  const AdamWArrays arrays{*state, grad, grad_is_bf16 != 0};
  const int64_t worth_waking = std::max<int64_t>(state->count / kItem, 1);
  const int64_t items = (state->count + kItem - 1) / kItem;
  parallel_for(items, static_cast<int>(std::min<int64_t>(threads, worth_waking)),
               [&](int64_t item, int) {
                 const int64_t first = item * kItem;
                 kernel.update(arrays, *coefficients, first,
                               std::min(first + kItem, state->count));
               });
  return MEGASLIDE_OK;
}

}  // extern "C"
