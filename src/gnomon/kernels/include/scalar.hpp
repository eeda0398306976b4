// Primitives of dot.inc without vector instructions: runs everywhere. Sixteen columns at a time, which
// compilers turn into whatever the base instruction set of the machine has.
namespace scalar {

using X = float;
constexpr int64_t STEP = 16;

struct V {
  uint16_t bits[STEP];
};

struct Acc {
  float sum[STEP] = {};
  template <int S>
  GNOMON_INLINE void add(const V& w, const X* x) {
    for (int i = 0; i < STEP; i++) sum[i] += gnomon::widen(w.bits[i]) * x[i];
  }
  GNOMON_INLINE float total() const {
    float all = 0;
    for (int i = 0; i < STEP; i++) all += sum[i];
    return all;
  }
};

GNOMON_INLINE V load(const uint16_t* from) {
  V v;
  std::memcpy(v.bits, from, sizeof v.bits);
  return v;
}

GNOMON_INLINE void store(uint16_t* to, const V& v) { std::memcpy(to, v.bits, sizeof v.bits); }

GNOMON_INLINE void stream(uint16_t* to, const V& v) { store(to, v); }

GNOMON_INLINE void fence() {}

GNOMON_INLINE void widen(float* to, const V& v) {
  for (int i = 0; i < STEP; i++) to[i] = gnomon::widen(v.bits[i]);
}

inline void prepare(const void* x, int64_t from, int64_t columns, int dtype, X* to, int64_t stride) {
  for (int64_t k = 0; k < columns; k++) to[k] = take(x, from + k, dtype);
  std::fill(to + columns, to + stride, X(0));
}

}  // namespace scalar
