// Primitives of dot.inc for AVX-512 (F, BW, VL): as avx2.hpp, 32 columns a register.
namespace avx512 {

using V = __m512i;
using X = float;
constexpr int64_t STEP = 32;

struct Acc {
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  template <int S>
  GNOMON_INLINE void add(V w, const X* x) {
    const __m512i high = _mm512_set1_epi32(int(0xFFFF0000));
    even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_loadu_ps(x), even);
    odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)), _mm512_loadu_ps(x + 16), odd);
  }
  GNOMON_INLINE float total() const { return _mm512_reduce_add_ps(_mm512_add_ps(even, odd)); }
};

GNOMON_INLINE V load(const uint16_t* from) { return _mm512_loadu_si512(from); }

GNOMON_INLINE void store(uint16_t* to, V v) { _mm512_storeu_si512(to, v); }

GNOMON_INLINE void stream(uint16_t* to, V v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v); }

GNOMON_INLINE void fence() { _mm_sfence(); }  // streamed stores are weakly ordered

GNOMON_INLINE void widen(float* to, V v) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1));
  _mm512_storeu_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
  _mm512_storeu_ps(to + 16, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
}

inline void prepare(const void* x, int64_t from, int64_t columns, int dtype, X* to, int64_t stride) {
  even_then_odd<STEP>(x, from, columns, dtype, to, stride);
}

}  // namespace avx512
