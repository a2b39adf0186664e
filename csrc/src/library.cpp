// What every kernel shares: version, status texts, choice of the instruction set.
#include <atomic>
#include <cstring>

#include "instruction_set.h"
#include "megaslide.h"

#if defined(MEGASLIDE_AMX_KERNELS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace megaslide {
namespace {

constexpr const char *kNames[] = {"baseline", "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16",
                                  "x86-64-v4-amx"};

#if defined(MEGASLIDE_EMULATED_TILES)
bool has_tiles() { return true; }
#elif defined(MEGASLIDE_AMX_KERNELS)
// Linux hands out the state of the tile registers on request only.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool has_tiles() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr uint32_t kBf16 = 1u << 22, kTile = 1u << 24;
  return (d & kBf16) != 0 && (d & kTile) != 0 && may_use_tiles();
}
#endif

bool supported(InstructionSet set) {
#if defined(MEGASLIDE_X86_KERNELS)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  const bool bf16 = v4 && __builtin_cpu_supports("avx512bf16");
#if defined(MEGASLIDE_AMX_KERNELS)
  if (set == InstructionSet::x86_64_v4_amx) return bf16 && has_tiles();
#endif
  if (set == InstructionSet::x86_64_v4_bf16) return bf16;
  if (set == InstructionSet::x86_64_v4) return v4;
  if (set == InstructionSet::x86_64_v3) return v3;
#endif
  return set == InstructionSet::baseline;
}

InstructionSet best() {
  for (const InstructionSet set : {InstructionSet::x86_64_v4_amx, InstructionSet::x86_64_v4_bf16,
                                   InstructionSet::x86_64_v4, InstructionSet::x86_64_v3}) {
    if (supported(set)) return set;
  }
  return InstructionSet::baseline;
}

std::atomic<InstructionSet> &chosen() {
  static std::atomic<InstructionSet> value{best()};
  return value;
}

}  // namespace

InstructionSet instruction_set() { return chosen().load(std::memory_order_relaxed); }

}  // namespace megaslide

extern "C" {

int32_t megaslide_abi_version(void) { return MEGASLIDE_ABI_VERSION; }

const char *megaslide_status_string(int32_t status) {
  switch (status) {
    case MEGASLIDE_OK:
      return "ok";
    case MEGASLIDE_INVALID_ARGUMENT:
      return "invalid argument";
    case MEGASLIDE_OUT_OF_MEMORY:
      return "out of memory";
    case MEGASLIDE_UNSUPPORTED:
      return "not supported by this processor or build";
    default:
      return "unknown status";
  }
}

const char *megaslide_instruction_set(void) {
  return megaslide::kNames[static_cast<int>(megaslide::instruction_set())];
}

int32_t megaslide_use_instruction_set(const char *name) {
  for (int i = 0; name != nullptr && i < 5; ++i) {
    const auto set = static_cast<megaslide::InstructionSet>(i);
    if (std::strcmp(name, megaslide::kNames[i]) == 0 && megaslide::supported(set)) {
      megaslide::chosen().store(set);
      return MEGASLIDE_OK;
    }
  }
  return MEGASLIDE_UNSUPPORTED;
}

}  // extern "C"
