// FlashMGLU on a CPU: out = sum_i r_i g(x (M_i * W)) * (x ((1 - M_i) * W)) for a few rows of x, from one read of W and
// of its masks; and the plain GLU g(x W_g) * (x W_v) by the same loop, to compare with. Sums in float32.
//
// Per row of W the loop adds up t = x.w and, for each mask, s_i = the part of that sum where the mask is 1; the value is
// t - s_i. With a mask of ones the two are the same operations in the same order, so their difference is exactly 0.
#include "../include/common.hpp"

namespace gnomon {
// In the order of reference.ACTIVATIONS.
enum Act : int { SILU, GELU, GELU_TANH, RELU, SIGMOID, IDENTITY };

#include "../include/scalar.hpp"
namespace scalar {
constexpr int MOST_ABREAST = 0;  // masks up to which two rows of the weight go at once
constexpr int GROUP = 4;         // masks that go over a row at once, as registers allow

template <int N, int B>
struct MaskedSums {
  float sum[N + 1][B][STEP] = {};
  template <int S, class Row>
  GNOMON_INLINE void add(const Row& row, const X* x, int64_t stride) {
    const V w = load(row.weight + S * STEP);
    for (int b = 0; b < B; b++) {
      float v[STEP];
      for (int i = 0; i < STEP; i++) v[i] = gnomon::widen(w.bits[i]) * x[b * stride + S * STEP + i];
      for (int i = 0; i < STEP; i++) sum[0][b][i] += v[i];
      for (int k = 0; k < N; k++) {
        uint16_t bits;
        std::memcpy(&bits, row.mask + k * row.plane + S * STEP / 8, 2);
        for (int i = 0; i < STEP; i++) sum[k + 1][b][i] += bits >> i & 1 ? v[i] : 0.0f;
      }
    }
  }
  GNOMON_INLINE float total(int k, int b) const {
    float all = 0;
    for (int i = 0; i < STEP; i++) all += sum[k][b][i];
    return all;
  }
};

#include "pair.inc"
#include "formats.inc"
#include "mglu.inc"
}  // namespace scalar

#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
#include "../include/avx2.hpp"
namespace avx2 {
constexpr int MOST_ABREAST = 2;
constexpr int GROUP = 4;

// AVX2 has no mask registers. A broadcast of 32 mask bits is shifted, each lane by its own count, so that the lane's bit
// is its sign, which is what a blend looks at: per eight weights and mask shift, blend, add; no tables, and the load
// serves four such. Columns are eight even then eight odd ones, so are the counts.
template <int N, int B>
struct MaskedSums {
  static constexpr int SETS = N <= 2 ? 2 : 1;  // of sums, taken in turn, as registers allow
  __m256 sum[N + 1][B][SETS];
  template <int S, class Row>
  GNOMON_INLINE void add(const Row& row, const X* x, int64_t stride) {
    constexpr int HALF = S % 2 * 16;
    const __m256i to_sign[2] = {
        _mm256_setr_epi32(31 - HALF, 29 - HALF, 27 - HALF, 25 - HALF, 23 - HALF, 21 - HALF, 19 - HALF, 17 - HALF),
        _mm256_setr_epi32(30 - HALF, 28 - HALF, 26 - HALF, 24 - HALF, 22 - HALF, 20 - HALF, 18 - HALF, 16 - HALF)};
    const V bits = load(row.weight + S * STEP);
    const __m256 w[2] = {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
                         _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xFFFF0000))))};
    __m256 v[B][2];
    for (int b = 0; b < B; b++)
      for (int odd = 0; odd < 2; odd++) {
        v[b][odd] = _mm256_mul_ps(w[odd], _mm256_loadu_ps(x + b * stride + S * STEP + 8 * odd));
        __m256& t = sum[0][b][odd % SETS];
        t = _mm256_add_ps(t, v[b][odd]);
      }
    for (int k = 0; k < N; k++) {
      int word;
      std::memcpy(&word, row.mask + k * row.plane + S / 2 * 4, 4);
      const __m256i mask = _mm256_set1_epi32(word);
      for (int odd = 0; odd < 2; odd++) {
        const __m256 sign = _mm256_castsi256_ps(_mm256_sllv_epi32(mask, to_sign[odd]));
        for (int b = 0; b < B; b++) {
          __m256& s = sum[k + 1][b][odd % SETS];
          s = _mm256_add_ps(s, _mm256_blendv_ps(_mm256_setzero_ps(), v[b][odd], sign));
        }
      }
    }
  }
  GNOMON_INLINE float total(int k, int b) const {
    const __m256 all = SETS == 2 ? _mm256_add_ps(sum[k][b][0], sum[k][b][SETS - 1]) : sum[k][b][0];
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
};

#include "pair.inc"
#include "formats.inc"
#include "mglu.inc"
}  // namespace avx2
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
#include "../include/avx512.hpp"
namespace avx512 {
constexpr int MOST_ABREAST = 8;
constexpr int GROUP = 8;

// 16 weights at a time in their natural order, whose mask is a mask register loaded from the plane as it is.
template <int N, int B>
struct MaskedSums {
  static constexpr int SETS = N <= 4 ? 2 : 1;
  __m512 sum[N + 1][B][SETS];
  template <int S, class Row>
  GNOMON_INLINE void add(const Row& row, const X* x, int64_t stride) {
    for (int half = 0; half < 2; half++) {
      const int64_t at = S * STEP + 16 * half;
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.weight + at));
      const __m512 w = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      __m512 xs[B];
      for (int b = 0; b < B; b++) {
        xs[b] = _mm512_loadu_ps(x + b * stride + at);
        __m512& t = sum[0][b][half % SETS];
        t = _mm512_fmadd_ps(w, xs[b], t);
      }
      for (int k = 0; k < N; k++) {
        uint16_t mask;
        std::memcpy(&mask, row.mask + k * row.plane + at / 8, 2);
        for (int b = 0; b < B; b++) {
          __m512& s = sum[k + 1][b][half % SETS];
          s = _mm512_mask3_fmadd_ps(w, xs[b], s, mask);
        }
      }
    }
  }
  GNOMON_INLINE float total(int k, int b) const {
    return _mm512_reduce_add_ps(SETS == 2 ? _mm512_add_ps(sum[k][b][0], sum[k][b][SETS - 1]) : sum[k][b][0]);
  }
};

template <int B>
struct PairSums {
  __m512 sum[2][B][2];
  template <int S, class Row>
  GNOMON_INLINE void add(const Row& row, const X* x, int64_t stride) {
    for (int half = 0; half < 2; half++) {
      const int64_t at = S * STEP + 16 * half;
      for (int k = 0; k < 2; k++) {
        const uint16_t* from = (k ? row.value : row.gate) + at;
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m512 w = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        for (int b = 0; b < B; b++)
          sum[k][b][half] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + b * stride + at), sum[k][b][half]);
      }
    }
  }
  GNOMON_INLINE float total(int k, int b) const {
    return _mm512_reduce_add_ps(_mm512_add_ps(sum[k][b][0], sum[k][b][1]));
  }
};

inline void prepare_x(const void* x, int64_t from, int64_t columns, int dtype, X* to, int64_t stride) {
  for (int64_t k = 0; k < columns; k++) to[k] = take(x, from + k, dtype);
  std::fill(to + columns, to + stride, X(0));
}
#include "formats.inc"
#include "mglu.inc"
}  // namespace avx512
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
#include "../include/avx512_bf16.hpp"
namespace avx512_bf16 {
constexpr int MOST_ABREAST = 8;
constexpr int GROUP = 8;

// 32 weights at a time stay bfloat16: those that a mask leaves out become 0, and one vdpbf16ps multiplies and adds.
template <int N, int B>
struct MaskedSums {
  static constexpr int SETS = N <= 4 ? 2 : 1;
  __m512 sum[N + 1][B][SETS];
  template <int S, class Row>
  GNOMON_INLINE void add(const Row& row, const X* x, int64_t stride) {
    const V w = load(row.weight + S * STEP);
    __m512bh xs[B];
    for (int b = 0; b < B; b++) {
      xs[b] = (__m512bh)_mm512_loadu_si512(x + b * stride + S * STEP);
      __m512& t = sum[0][b][S % SETS];
      t = _mm512_dpbf16_ps(t, (__m512bh)w, xs[b]);
    }
    for (int k = 0; k < N; k++) {
      uint32_t mask;
      std::memcpy(&mask, row.mask + k * row.plane + S * STEP / 8, 4);
      const __m512bh kept = (__m512bh)_mm512_maskz_mov_epi16(mask, w);
      for (int b = 0; b < B; b++) {
        __m512& s = sum[k + 1][b][S % SETS];
        s = _mm512_dpbf16_ps(s, kept, xs[b]);
      }
    }
  }
  GNOMON_INLINE float total(int k, int b) const {
    return _mm512_reduce_add_ps(SETS == 2 ? _mm512_add_ps(sum[k][b][0], sum[k][b][SETS - 1]) : sum[k][b][0]);
  }
};

#include "pair.inc"
#include "formats.inc"
#include "mglu.inc"
}  // namespace avx512_bf16
GNOMON_TARGET_END
#endif
}  // namespace gnomon

using gnomon::BF16;

#define GNOMON_EACH_ISA(RUN)                              \
  switch (isa) {                                          \
    case gnomon::SCALAR: RUN(scalar); return 0;           \
      GNOMON_EACH_X86(RUN)                                \
    default: return 1;                                    \
  }
#ifdef GNOMON_X86
#define GNOMON_EACH_X86(RUN)                              \
    case gnomon::AVX2: RUN(avx2); return 0;               \
    case gnomon::AVX512: RUN(avx512); return 0;           \
    case gnomon::AVX512_BF16:                             \
      if (dtype != BF16) return 1;                        \
      RUN(avx512_bf16);                                   \
      return 0;
#else
#define GNOMON_EACH_X86(RUN)
#endif

// x (batch, columns) and out (batch, rows) of kind `dtype` (0 bfloat16, 1 float32); rows of the bfloat16 weight `stride`
// elements apart; planes (masks, rows, ceil(columns / 8)), 1 to 16 of them, `plane` bytes apart and their rows `row`;
// routes (batch, masks) or null.
// Returns 0, or 1 for an instruction set that this build or dtype doesn't have.
extern "C" int gnomon_mglu(int isa, int threads, const void* x, int64_t batch, int64_t columns, int dtype,
                           const void* weight, int64_t rows, int64_t stride, const void* planes, int masks,
                           int64_t plane, int64_t row, const void* routes, int act, void* out) {
#define GNOMON_RUN(NS)                                                                                              \
  gnomon::NS::run(gnomon::NS::Masks{static_cast<const uint16_t*>(weight), static_cast<const uint8_t*>(planes), rows, \
                                    columns, stride, plane, row, masks},                                             \
                  x, batch, dtype,                                                                                   \
                  gnomon::NS::End{gnomon::NS::finisher(act, false), masks, static_cast<const float*>(routes), out,   \
                                  rows, dtype},                                                                      \
                  threads)
  GNOMON_EACH_ISA(GNOMON_RUN)
#undef GNOMON_RUN
}

// As above, with the two weights of a GLU.
extern "C" int gnomon_glu(int isa, int threads, const void* x, int64_t batch, int64_t columns, int dtype,
                          const void* gate, int64_t gate_stride, const void* value, int64_t value_stride, int64_t rows,
                          int act, void* out) {
#define GNOMON_RUN(NS)                                                                                             \
  gnomon::NS::run(gnomon::NS::Pair{static_cast<const uint16_t*>(gate), static_cast<const uint16_t*>(value), rows,   \
                                   columns, gate_stride, value_stride},                                             \
                  x, batch, dtype, gnomon::NS::End{gnomon::NS::finisher(act, true), 1, nullptr, out, rows, dtype},  \
                  threads)
  GNOMON_EACH_ISA(GNOMON_RUN)
#undef GNOMON_RUN
}

// For products of many rows of x: rows first ... last - 1 of W, then those of each M_i * W, widened into
// out (masks + 1, last - first, columns).
extern "C" void gnomon_mglu_widen(int threads, const void* weight, int64_t columns, int64_t stride,
                                  const void* planes, int masks, int64_t plane, int64_t step, int64_t first,
                                  int64_t last, float* out) {
  const uint16_t* const w = static_cast<const uint16_t*>(weight);
  const uint8_t* const bits = static_cast<const uint8_t*>(planes);
  const int64_t height = last - first;
  gnomon::split(height, 1, threads, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++) {
      float* const whole = out + n * columns;
      for (int64_t k = 0; k < columns; k++) whole[k] = gnomon::widen(w[(first + n) * stride + k]);
      for (int i = 0; i < masks; i++) {
        const uint8_t* const row = bits + i * plane + (first + n) * step;
        float* const part = out + ((i + 1) * height + n) * columns;
        int64_t k = 0;
        for (; k + 8 <= columns; k += 8)
          for (int j = 0; j < 8; j++) part[k + j] = row[k / 8] >> j & 1 ? whole[k + j] : 0.0f;
        for (; k < columns; k++) part[k] = row[k / 8] >> k % 8 & 1 ? whole[k] : 0.0f;
      }
    }
  });
}

// The hot loop by itself, for counting its instructions: `count` blocks of 64 weights.
#define GNOMON_LOOP(NS, N)                                                                                     \
  extern "C" void gnomon_mglu_loop_##NS##_##N(const uint16_t* weight, const uint8_t* planes, int64_t plane,    \
                                              int64_t count, const gnomon::NS::X* x, float* out) {             \
    gnomon::NS::loop<N>(weight, planes, plane, count, x, out);                                                 \
  }
#define GNOMON_LOOPS(NS) GNOMON_LOOP(NS, 1) GNOMON_LOOP(NS, 2) GNOMON_LOOP(NS, 3) GNOMON_LOOP(NS, 4)

GNOMON_LOOPS(scalar)
#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
GNOMON_LOOPS(avx2)
GNOMON_TARGET_END
GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
GNOMON_LOOPS(avx512)
GNOMON_TARGET_END
GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
GNOMON_LOOPS(avx512_bf16)
GNOMON_LOOP(avx512_bf16, 8)
GNOMON_TARGET_END
#endif
