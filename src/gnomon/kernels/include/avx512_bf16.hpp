// Primitives of dot.inc for AVX-512 with VBMI and BF16: one vdpbf16ps takes 32 columns of w and of x, both
// bfloat16. It flushes subnormals and adds in pairs, for both formats alike. Two sums hide its latency.
namespace avx512_bf16 {

using V = __m512i;
using X = uint16_t;
constexpr int64_t STEP = 32;

struct Acc {
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  template <int S>
  GNOMON_INLINE void add(V w, const X* x) {
    sum[S % 2] = _mm512_dpbf16_ps(sum[S % 2], (__m512bh)w, (__m512bh)_mm512_loadu_si512(x));
  }
  GNOMON_INLINE float total() const { return _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1])); }
};

using avx512::fence, avx512::load, avx512::store, avx512::stream, avx512::widen;

inline void prepare(const void* x, int64_t from, int64_t columns, int, X* to, int64_t stride) {
  std::memcpy(to, static_cast<const uint16_t*>(x) + from, size_t(columns) * 2);
  std::fill(to + columns, to + stride, X(0));
}

}  // namespace avx512_bf16
