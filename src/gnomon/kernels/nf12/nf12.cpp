// NF12 on a CPU: y = x W^T decoded in registers, bulk decoding, gathered rows.
#include "planes.hpp"

namespace gnomon {

#include "../include/scalar.hpp"
namespace scalar {
#include "../include/dot.inc"
struct Decoder {
  static GNOMON_INLINE V at(const uint8_t* sm, const uint32_t* ex, int base) {
    V v;
    for (int g = 0; g < STEP / GROUP; g++) decode_group(sm + g * GROUP, ex[g], nullptr, 0, base, v.bits + g * GROUP);
    return v;
  }
  static GNOMON_INLINE V patched(const uint8_t* sm, const uint32_t* ex, const uint16_t* esc, uint32_t last, int base) {
    V v;
    for (int g = 0; g < STEP / GROUP; g++) decode_group(sm + g * GROUP, ex[g], esc, last, base, v.bits + g * GROUP);
    return v;
  }
  static GNOMON_INLINE bool flags(const uint32_t* ex) {  // false: some word is 0
    bool all = true;
    for (int g = 0; g < BLOCK / GROUP; g++) all &= ex[g] != 0;
    return all;
  }
  static GNOMON_INLINE bool least(bool a, bool b) { return a & b; }
  static GNOMON_INLINE bool zero(bool all) { return !all; }
};
#include "nf12.inc"
#include "decode.inc"
}  // namespace scalar

#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
#include "../include/avx2.hpp"
namespace avx2 {
#include "../include/dot.inc"
struct Decoder {
  // Each exponent word serves one half of the register. Column pair j of a group, a 32-bit lane, wants the
  // nibbles at bits 4j and 16 + 4j in its two exponent fields at bits 7 and 23: fetch the bytes that hold
  // them, shift left by 7 or by 3, mask.
  static GNOMON_INLINE V at(const uint8_t* sm, const uint32_t* ex, int base) {
    const __m256i twice = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7,  //
                                           8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    const __m256i fetch = _mm256_setr_epi8(0, -1, 2, -1, 0, -1, 2, -1, 1, -1, 3, -1, 1, -1, 3, -1,  //
                                           4, -1, 6, -1, 4, -1, 6, -1, 5, -1, 7, -1, 5, -1, 7, -1);
    const __m256i scale = _mm256_setr_epi16(128, 128, 8, 8, 128, 128, 8, 8, 128, 128, 8, 8, 128, 128, 8, 8);
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sm)));
    const __m256i words = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(ex)));
    const __m256i signs = _mm256_and_si256(_mm256_shuffle_epi8(bytes, twice), _mm256_set1_epi16(short(0x807F)));
    const __m256i nibbles = _mm256_and_si256(_mm256_mullo_epi16(_mm256_shuffle_epi8(words, fetch), scale),
                                             _mm256_set1_epi16(0x0780));
    return _mm256_add_epi16(_mm256_or_si256(signs, nibbles), _mm256_set1_epi16(short(base << 7)));
  }
  static GNOMON_INLINE V patched(const uint8_t* sm, const uint32_t* ex, const uint16_t* esc, uint32_t last, int base) {
    // A group without an exception fetches row 0, and the blend drops it.
    const __m128i first = row(ex[0], sm, esc, last), second = row(ex[1], sm + GROUP, esc, last);
    const __m256i spread = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i words = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(ex)));
    const __m256i flags = _mm256_cmpeq_epi32(_mm256_permutevar8x32_epi32(words, spread), _mm256_setzero_si256());
    return _mm256_blendv_epi8(at(sm, ex, base), _mm256_set_m128i(second, first), flags);
  }
  static GNOMON_INLINE __m128i row(uint32_t word, const uint8_t* sm, const uint16_t* esc, uint32_t last) {
    uint32_t index;
    std::memcpy(&index, sm, 4);
    index = std::min(index, last) & (0u - uint32_t(word == 0));  // by mask: no branch to mispredict
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(esc + size_t(index) * GROUP));
  }
  static GNOMON_INLINE __m256i flags(const uint32_t* ex) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ex));
  }
  static GNOMON_INLINE __m256i least(__m256i a, __m256i b) { return _mm256_min_epu32(a, b); }
  static GNOMON_INLINE bool zero(__m256i words) {
    const __m256i zero = _mm256_cmpeq_epi32(words, _mm256_setzero_si256());
    return !_mm256_testz_si256(zero, zero);
  }
};
#include "nf12.inc"
#include "decode.inc"
}  // namespace avx2
GNOMON_TARGET_END

// Shared by both AVX-512 paths: each of four exponent words to four lanes, rotated so that lane j has the
// nibbles of its two columns in their exponent fields.
#define GNOMON_DECODER_512(DUPLICATE)                                                                              \
  struct Decoder {                                                                                                 \
    static GNOMON_INLINE __m512i spread(const uint32_t* ex) {                                                      \
      const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);                     \
      const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(ex));                                  \
      return _mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(four));                                        \
    }                                                                                                              \
    static GNOMON_INLINE V at(const uint8_t* sm, const uint32_t* ex, int base) {                                   \
      const __m512i turn = _mm512_setr_epi32(7, 3, 31, 27, 7, 3, 31, 27, 7, 3, 31, 27, 7, 3, 31, 27);              \
      const __m512i nibbles = _mm512_and_si512(_mm512_rolv_epi32(spread(ex), turn), _mm512_set1_epi16(0x0780));    \
      const __m512i both = DUPLICATE(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sm)));                    \
      /* 0xEA: (a & b) | c */                                                                                      \
      const __m512i bits = _mm512_ternarylogic_epi32(both, _mm512_set1_epi16(short(0x807F)), nibbles, 0xEA);       \
      return _mm512_add_epi16(bits, _mm512_set1_epi16(short(base << 7)));                                          \
    }                                                                                                              \
    static GNOMON_INLINE V patched(const uint8_t* sm, const uint32_t* ex, const uint16_t* esc, uint32_t last,      \
                                   int base) {                                                                     \
      V rows = _mm512_castsi128_si512(row(ex[0], sm, esc, last));                                                  \
      rows = _mm512_inserti32x4(rows, row(ex[1], sm + GROUP, esc, last), 1);                                       \
      rows = _mm512_inserti32x4(rows, row(ex[2], sm + 2 * GROUP, esc, last), 2);                                   \
      rows = _mm512_inserti32x4(rows, row(ex[3], sm + 3 * GROUP, esc, last), 3);                                   \
      const __m512i words = spread(ex);                                                                            \
      return _mm512_mask_mov_epi32(at(sm, ex, base), _mm512_testn_epi32_mask(words, words), rows);                 \
    }                                                                                                              \
    static GNOMON_INLINE __m128i row(uint32_t word, const uint8_t* sm, const uint16_t* esc, uint32_t last) {       \
      uint32_t index;                                                                                              \
      std::memcpy(&index, sm, 4);                                                                                  \
      index = std::min(index, last) & (0u - uint32_t(word == 0));                                                               \
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(esc + size_t(index) * GROUP));                       \
    }                                                                                                              \
    static GNOMON_INLINE __m256i flags(const uint32_t* ex) {                                                       \
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ex));                                             \
    }                                                                                                              \
    static GNOMON_INLINE __m256i least(__m256i a, __m256i b) { return _mm256_min_epu32(a, b); }                    \
    static GNOMON_INLINE bool zero(__m256i words) { return _mm256_testn_epi32_mask(words, words) != 0; }           \
  }

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
#include "../include/avx512.hpp"
namespace avx512 {
#include "../include/dot.inc"
GNOMON_INLINE __m512i twice(__m256i bytes) {
  const __m512i wide = _mm512_cvtepu8_epi16(bytes);
  return _mm512_or_si512(wide, _mm512_slli_epi16(wide, 8));
}
GNOMON_DECODER_512(twice);
#include "nf12.inc"
#include "decode.inc"
}  // namespace avx512
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
#include "../include/avx512_bf16.hpp"
namespace avx512_bf16 {
#include "../include/dot.inc"
GNOMON_INLINE __m512i twice(__m256i bytes) {
  alignas(64) static constexpr uint8_t INDEX[64] = {
      0,  0,  1,  1,  2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,  8,  8,  9,  9,  10, 10,
      11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21,
      22, 22, 23, 23, 24, 24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 30, 31, 31};
  return _mm512_permutexvar_epi8(_mm512_load_si512(INDEX), _mm512_castsi256_si512(bytes));
}
GNOMON_DECODER_512(twice);
#include "nf12.inc"
#include "decode.inc"
}  // namespace avx512_bf16
GNOMON_TARGET_END
#endif

}  // namespace gnomon

using gnomon::Planes;

// The planes of a matrix; `columns` is the padded count, a multiple of 8.
#define GNOMON_PLANES                                                                                          \
  const uint8_t *sm, const uint32_t *ex, const uint16_t *esc, int64_t rows, int64_t columns, int64_t escapes, \
      int base

// x (batch, width) and out (batch, rows) of kind `dtype` (0 bfloat16, 1 float32), width <= columns.
// Returns 0, or 1 for an instruction set that this build or dtype doesn't have.
extern "C" int gnomon_nf12_linear(int isa, int threads, const void* x, int64_t batch, int64_t width, int dtype,
                                  GNOMON_PLANES, void* out) {
  const Planes planes{sm, ex, esc, rows, columns, escapes, base};
  switch (isa) {
    case gnomon::SCALAR: gnomon::scalar::nf12_linear(planes, x, batch, width, dtype, out, threads); return 0;
#ifdef GNOMON_X86
    case gnomon::AVX2: gnomon::avx2::nf12_linear(planes, x, batch, width, dtype, out, threads); return 0;
    case gnomon::AVX512: gnomon::avx512::nf12_linear(planes, x, batch, width, dtype, out, threads); return 0;
    case gnomon::AVX512_BF16:
      if (dtype != gnomon::BF16) return 1;
      gnomon::avx512_bf16::nf12_linear(planes, x, batch, width, dtype, out, threads);
      return 0;
#endif
    default: return 1;
  }
}

// out (count, width) of kind `dtype`: all rows in order (index null, count = rows) or those of `index`, each
// below `rows`.
extern "C" int gnomon_nf12_decode(int isa, int threads, GNOMON_PLANES, const int64_t* index, int64_t count,
                                  int64_t width, void* out, int dtype) {
  const Planes planes{sm, ex, esc, rows, columns, escapes, base};
  switch (isa) {
    case gnomon::SCALAR: gnomon::scalar::nf12_decode(planes, index, count, width, out, dtype, threads); return 0;
#ifdef GNOMON_X86
    case gnomon::AVX2: gnomon::avx2::nf12_decode(planes, index, count, width, out, dtype, threads); return 0;
    case gnomon::AVX512: gnomon::avx512::nf12_decode(planes, index, count, width, out, dtype, threads); return 0;
    case gnomon::AVX512_BF16:
      gnomon::avx512_bf16::nf12_decode(planes, index, count, width, out, dtype, threads);
      return 0;
#endif
    default: return 1;
  }
}

// The hot loop of bulk decoding by itself, for counting its instructions: `count` blocks of 64 weights.
#define GNOMON_LOOP(ISA)                                                                                      \
  extern "C" void gnomon_nf12_loop_##ISA(const uint8_t* sm, const uint32_t* ex, const uint16_t* esc,          \
                                         uint32_t last, int base, int64_t count, uint16_t* out) {             \
    gnomon::ISA::decode_blocks<false>(gnomon::ISA::Coded<gnomon::ISA::RARE>::Source{sm, ex, esc, last, base}, \
                                      count, out);                                                            \
  }

GNOMON_LOOP(scalar)
#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
GNOMON_LOOP(avx2)
GNOMON_TARGET_END
GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
GNOMON_LOOP(avx512)
GNOMON_TARGET_END
GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
GNOMON_LOOP(avx512_bf16)
GNOMON_TARGET_END
#endif
