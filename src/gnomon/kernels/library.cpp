// What the library says about itself; kernels/native.py asks before it calls anything else.
#include "include/common.hpp"

#ifndef GNOMON_SOURCES
#define GNOMON_SOURCES "unknown"
#endif

// Digest of the sources it was built from, so that a library older than its sources is noticed.
extern "C" const char* gnomon_sources() { return GNOMON_SOURCES; }

// Whether it can use more than one thread.
extern "C" int gnomon_parallel() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// Whether this machine runs an instruction set (gnomon::Isa).
extern "C" int gnomon_supports(int isa) {
  if (isa == gnomon::SCALAR) return 1;
#if defined(GNOMON_SIMDE)
  return isa >= gnomon::SCALAR && isa <= gnomon::AVX512_BF16;
#elif defined(GNOMON_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case gnomon::AVX2: return avx2;
    case gnomon::AVX512: return avx512;
    case gnomon::AVX512_BF16:
      return avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
    default: return 0;
  }
#else
  return 0;
#endif
}
