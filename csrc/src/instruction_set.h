// Which build of the kernels this process runs.
//
// A file of kernels is compiled once per instruction set, with MEGASLIDE_ISA naming the namespace
// that its one exported object lives in (CMakeLists.txt, megaslide_add_kernels). Such a file keeps
// everything else in an anonymous namespace and calls no inline function of the standard library:
// the linker merges equal inline functions, and could keep the build that this processor lacks.
#pragma once

namespace megaslide {

// In ascending order: each has all that those before it have.
enum class InstructionSet { baseline, x86_64_v3, x86_64_v4, x86_64_v4_bf16, x86_64_v4_amx };

InstructionSet instruction_set();

}  // namespace megaslide
