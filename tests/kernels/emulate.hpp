// AVX-512 in portable C++ for machines that lack it: SIMDe's functions under Intel's names, and the few that
// SIMDe 0.7 doesn't have. Given to the compiler with -include, so that the kernels' own code is what runs.
#pragma once
#define GNOMON_SIMDE 1
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>

static inline float _mm512_reduce_add_ps(simde__m512 v) {
  float lane[16], all = 0;
  std::memcpy(lane, &v, sizeof lane);
  for (float value : lane) all += value;
  return all;
}

static inline void _mm512_stream_si512(simde__m512i* to, simde__m512i v) { std::memcpy(to, &v, sizeof v); }

static inline simde__m512 _mm512_mask3_fmadd_ps(simde__m512 a, simde__m512 b, simde__m512 c, uint16_t mask) {
  return simde_mm512_mask_mov_ps(c, mask, simde_mm512_fmadd_ps(a, b, c));
}

template <class From, class To, int N, class Out, class In>
static inline Out widened(In v) {
  From narrow[N];
  To wide[N];
  std::memcpy(narrow, &v, sizeof narrow);
  for (int i = 0; i < N; i++) wide[i] = narrow[i];
  Out result;
  std::memcpy(&result, wide, sizeof wide);
  return result;
}

static inline simde__m512i _mm512_cvtepu16_epi32(simde__m256i v) {
  return widened<uint16_t, uint32_t, 16, simde__m512i>(v);
}

static inline simde__m512i _mm512_cvtepu8_epi16(simde__m256i v) {
  return widened<uint8_t, uint16_t, 32, simde__m512i>(v);
}

template <int N, class In>
static inline uint32_t testn(In a, In b) {
  uint32_t left[N], right[N], mask = 0;
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < N; i++) mask |= uint32_t((left[i] & right[i]) == 0) << i;
  return mask;
}

static inline uint16_t _mm512_testn_epi32_mask(simde__m512i a, simde__m512i b) { return uint16_t(testn<16>(a, b)); }

static inline uint8_t _mm256_testn_epi32_mask(simde__m256i a, simde__m256i b) { return uint8_t(testn<8>(a, b)); }
