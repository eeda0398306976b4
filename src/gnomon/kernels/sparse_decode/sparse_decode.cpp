// One step of decoding over long caches: attention that reads all keys once, keeps the best position of each bucket
// (j mod B) and gathers only those values; and dense attention by the same loop over keys, to compare with.
//
// Keys are scored a tile of 16 at a time against all query heads of their key head, so a key is read once. The tile is
// turned first: then a score is a lane, and neighbouring positions lie in neighbouring buckets, so that the running
// maximum of the buckets is a compare and two blends, without sorting and without sums across lanes.
#include <vector>

#include "decode.hpp"

// Nothing of the standard library's templates is used inside the instruction sets' regions but what is inlined for
// certain: their other functions are shared with code for plain processors.
namespace gnomon {
namespace {

struct Shape {
  int64_t batch, q_heads, k_heads, v_heads, length, d;
  const uint8_t* visible;  // (batch, length), 0 where a key doesn't count, or null
  float scale;
};

// Which keys of a tile count, as bits.
GNOMON_INLINE uint32_t seen(const Shape& s, int64_t b, int64_t j, int64_t count) {
  if (!s.visible) return (1u << count) - 1;
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; i++) bits |= uint32_t(s.visible[b * s.length + j + i] != 0) << i;
  return bits;
}

// What a thread works on: keys [from, to) of one key head of one row of the batch.
struct Task {
  int64_t b, head, from, to;
};

// Cut into chunks of at least `least` keys until every thread has work; borders at multiples of TILE.
inline std::vector<Task> tasks_of(const Shape& s, int64_t heads, int threads, int64_t least, int64_t chunk = 0) {
  std::vector<Task> tasks;
  const int64_t rows = s.batch * heads;
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t h = 0; h < heads; h++) {
      int64_t size = chunk;
      if (!size) {
        const int64_t pieces = std::max<int64_t>(1, std::min<int64_t>((threads + rows - 1) / rows, s.length / least));
        size = ((s.length + pieces - 1) / pieces + TILE - 1) / TILE * TILE;
      }
      for (int64_t from = 0; from < s.length; from += size)
        tasks.push_back({b, h, from, std::min(s.length, from + size)});
    }
  return tasks;
}

// Buckets of the winners that are kept: in the buckets' order where none is left out, else the best first and, of equal
// ones, the lower position. Sums follow this order, so they don't depend on how winners were found.
inline int64_t winners(const float* best, const int32_t* at, int64_t buckets, int64_t kept, int32_t* order) {
  int64_t n = 0;
  for (int64_t i = 0; i < buckets; i++)
    if (at[i] >= 0) order[n++] = int32_t(i);
  if (buckets <= kept) return n;
  const auto better = [&](int32_t a, int32_t b) { return best[a] > best[b] || (best[a] == best[b] && at[a] < at[b]); };
  if (n > kept) std::nth_element(order, order + kept, order + n, better), n = kept;
  std::sort(order, order + n, better);
  return n;
}

}  // namespace

namespace scalar_sets {
#include "tile.inc"
#include "softmax.inc"
#include "sparse_decode.inc"
}  // namespace scalar_sets

#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
namespace avx2_sets {
#include "tile.inc"
#include "softmax.inc"
#include "sparse_decode.inc"
}  // namespace avx2_sets
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512_sets {
#include "tile.inc"
#include "softmax.inc"
#include "sparse_decode.inc"
}  // namespace avx512_sets
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
namespace avx512_bf16_sets {
#include "tile.inc"
#include "tile_bf16.inc"
#include "softmax.inc"
#include "sparse_decode.inc"
}  // namespace avx512_bf16_sets
GNOMON_TARGET_END
#endif
}  // namespace gnomon

// q and out (batch, q_heads, d) dense; k (batch, k_heads, length, d) and v (batch, v_heads, length, d) by `strides`, in
// elements: batch, head, row of k, then of v. All of kind `dtype`. `buckets` at least `kept`; chosen (batch, q_heads,
// kept) takes the kept positions, -1 where there are fewer (an empty bucket's, where none is left out), or is null.
// Returns 0, or 1 for an instruction set that this build doesn't have.
extern "C" int gnomon_sparse_decode(int isa, int threads, const void* q, const void* k, const void* v, int dtype,
                                    int64_t batch, int64_t q_heads, int64_t k_heads, int64_t v_heads, int64_t length,
                                    int64_t d, const int64_t* strides, const uint8_t* visible, int64_t kept,
                                    int64_t buckets, float scale, void* out, int32_t* chosen) {
  const gnomon::Cache cache{k, v, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5]};
  const gnomon::Shape shape{batch, q_heads, k_heads, v_heads, length, d, visible, scale};
#define GNOMON_RUN(NS)                                                                                      \
  if (dtype == gnomon::BF16) gnomon::NS::sparse<uint16_t>(cache, shape, q, kept, buckets, out, chosen, threads); \
  else gnomon::NS::sparse<float>(cache, shape, q, kept, buckets, out, chosen, threads);                     \
  return 0
  switch (isa) {
    case gnomon::SCALAR: GNOMON_RUN(scalar_sets);
#ifdef GNOMON_X86
    case gnomon::AVX2: GNOMON_RUN(avx2_sets);
    case gnomon::AVX512: GNOMON_RUN(avx512_sets);
    case gnomon::AVX512_BF16: GNOMON_RUN(avx512_bf16_sets);
#endif
    default: return 1;
  }
#undef GNOMON_RUN
}

// The same without choosing: all of k_heads = v_heads positions.
extern "C" int gnomon_dense_decode(int isa, int threads, const void* q, const void* k, const void* v, int dtype,
                                   int64_t batch, int64_t q_heads, int64_t heads, int64_t length, int64_t d,
                                   const int64_t* strides, const uint8_t* visible, float scale, void* out) {
  const gnomon::Cache cache{k, v, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5]};
  const gnomon::Shape shape{batch, q_heads, heads, heads, length, d, visible, scale};
#define GNOMON_RUN(NS)                                                              \
  if (dtype == gnomon::BF16) gnomon::NS::dense<uint16_t>(cache, shape, q, out, threads); \
  else gnomon::NS::dense<float>(cache, shape, q, out, threads);                     \
  return 0
  switch (isa) {
    case gnomon::SCALAR: GNOMON_RUN(scalar_sets);
#ifdef GNOMON_X86
    case gnomon::AVX2: GNOMON_RUN(avx2_sets);
    case gnomon::AVX512: GNOMON_RUN(avx512_sets);
    case gnomon::AVX512_BF16: GNOMON_RUN(avx512_bf16_sets);
#endif
    default: return 1;
  }
#undef GNOMON_RUN
}
