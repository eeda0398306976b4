// What the C++ kernels share: bfloat16 bits, splitting rows over threads, choosing an instruction set.
//
// The library has a plain C ABI and knows neither Python nor torch. Instruction sets are chosen per
// function and at run time, never by a global -m flag, so that one build runs on every machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GNOMON_X86 1
#ifndef GNOMON_SIMDE  // a test runs the AVX-512 code on machines that lack it, on emulated intrinsics
#include <immintrin.h>
#endif
#endif

#define GNOMON_INLINE inline __attribute__((always_inline))
#define GNOMON_PRAGMA(text) _Pragma(#text)
#if defined(GNOMON_SIMDE)
#define GNOMON_TARGET(isa)
#define GNOMON_TARGET_END
#elif defined(__clang__)
#define GNOMON_TARGET(isa) GNOMON_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define GNOMON_TARGET_END GNOMON_PRAGMA(clang attribute pop)
#else
#define GNOMON_TARGET(isa) GNOMON_PRAGMA(GCC push_options) GNOMON_PRAGMA(GCC target(isa))
#define GNOMON_TARGET_END GNOMON_PRAGMA(GCC pop_options)
#endif

namespace gnomon {

// Instruction sets, slowest first. The numbers are part of the ABI: kernels/native.py names them alike.
enum Isa : int { SCALAR = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3 };

// Kinds of numbers in x and in results.
enum Dtype : int { BF16 = 0, FP32 = 1 };

GNOMON_INLINE float widen(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Round to nearest, ties to even; NaN stays a (quiet) NaN. As torch does it.
GNOMON_INLINE uint16_t narrow(float value) {
  if (value != value) return 0x7FC0;
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return uint16_t((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

GNOMON_INLINE void put(void* out, int64_t at, float value, int dtype) {
  if (dtype == BF16) static_cast<uint16_t*>(out)[at] = narrow(value);
  else static_cast<float*>(out)[at] = value;
}

GNOMON_INLINE float take(const void* x, int64_t at, int dtype) {
  return dtype == BF16 ? widen(static_cast<const uint16_t*>(x)[at]) : static_cast<const float*>(x)[at];
}

// Without branches, so that compilers turn loops over it into vector code. 2^n times the Taylor series of e^r,
// |r| <= ln(2) / 2: relative error under 1e-7.
GNOMON_INLINE float exponential(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to a whole number
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// x as the sets need it that widen the even column of a pair by a shift and the odd one by a mask: of each STEP
// columns the even ones, then the odd ones; zeros up to the stride.
template <int64_t STEP>
GNOMON_INLINE void even_then_odd(const void* x, int64_t from, int64_t columns, int dtype, float* to, int64_t stride) {
  const int64_t whole = columns / STEP * STEP;
  for (int64_t k = 0; k < whole; k += STEP)
    for (int64_t i = 0; i < STEP / 2; i++) {
      to[k + i] = take(x, from + k + 2 * i, dtype);
      to[k + STEP / 2 + i] = take(x, from + k + 2 * i + 1, dtype);
    }
  std::fill(to + whole, to + stride, 0.0f);
  for (int64_t k = whole; k < columns; k++)
    to[whole + (k - whole) % 2 * (STEP / 2) + (k - whole) / 2] = take(x, from + k, dtype);
}

// Memory for one call, aligned to cache lines: registers of x must not straddle two of them.
struct Scratch {
  void* at;
  explicit Scratch(size_t bytes) : at(::operator new(std::max<size_t>(bytes, 1), std::align_val_t(64))) {}
  ~Scratch() { ::operator delete(at, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

// Calls body(first, last) once per thread with a fixed share of [0, count), cut at multiples of `unit`.
// A share depends on count, unit and threads alone, and no sum crosses a cut: results don't depend on it.
template <class Body>
void split(int64_t count, int64_t unit, int threads, const Body& body) {
  const int64_t units = (count + unit - 1) / unit;
  const int team = int(std::max<int64_t>(1, std::min<int64_t>(threads, units)));
  if (team == 1) return body(int64_t(0), count);
#pragma omp parallel for num_threads(team) schedule(static, 1)
  for (int id = 0; id < team; id++) {
    const int64_t first = units * id / team * unit;
    const int64_t last = std::min(count, units * (id + 1) / team * unit);
    body(first, last);
  }
}

}  // namespace gnomon
