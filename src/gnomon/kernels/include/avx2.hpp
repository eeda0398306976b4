// Primitives of dot.inc for AVX2 + FMA: 16 columns a register. Of a pair of columns in a 32-bit lane the
// even one is widened by a shift, the odd one by a mask, so x is kept as eight even then eight odd columns.
namespace avx2 {

using V = __m256i;
using X = float;
constexpr int64_t STEP = 16;

struct Acc {  // two pairs of sums, taken in turn, hide the latency of the FMA
  __m256 even[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, odd[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  template <int S>
  GNOMON_INLINE void add(V w, const X* x) {
    const __m256i high = _mm256_set1_epi32(int(0xFFFF0000));
    __m256 &e = even[S % 2], &o = odd[S % 2];
    e = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_loadu_ps(x), e);
    o = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, high)), _mm256_loadu_ps(x + 8), o);
  }
  GNOMON_INLINE float total() const {
    const __m256 sum = _mm256_add_ps(_mm256_add_ps(even[0], odd[0]), _mm256_add_ps(even[1], odd[1]));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
};

GNOMON_INLINE V load(const uint16_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

GNOMON_INLINE void store(uint16_t* to, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }

GNOMON_INLINE void stream(uint16_t* to, V v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v); }

GNOMON_INLINE void fence() { _mm_sfence(); }  // streamed stores are weakly ordered

GNOMON_INLINE void widen(float* to, V v) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(v));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1));
  _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)));
  _mm256_storeu_ps(to + 8, _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
}

inline void prepare(const void* x, int64_t from, int64_t columns, int dtype, X* to, int64_t stride) {
  even_then_odd<STEP>(x, from, columns, dtype, to, stride);
}

}  // namespace avx2
