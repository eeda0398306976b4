// One pass over a block of queries behind a long cache: softmax attention over the block's own keys and, of the cache,
// all keys or one set for each key head; and the mean softmax weight of every cached key, from which sets are chosen.
//
// All queries of a block in all heads of a group are rows against one tile of keys, so a key is read once for all of
// them, whether it comes from the cache by its stride or was gathered by its index. Tiles, scores and the running
// softmax are those of sparse_decode.cpp.
#include <cmath>
#include <vector>

#include "decode.hpp"

namespace gnomon {
namespace {

struct BlockShape {
  int64_t batch, q_heads, heads, block, length, d;
  const int64_t* idx;  // (batch, heads, chosen), or null: all
  int64_t chosen;      // keys of the cache that are read
  float scale;
};

// Chunks that a head's keys are cut into, whatever the number of threads; the block's own keys join the last.
inline int64_t chunks_of(int64_t keys) { return std::max<int64_t>(1, (keys + CHUNK - 1) / CHUNK); }

}  // namespace

namespace scalar_sets {
#include "tile.inc"
#include "softmax.inc"
#include "block_decode.inc"
}  // namespace scalar_sets

#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
namespace avx2_sets {
#include "tile.inc"
#include "softmax.inc"
#include "block_decode.inc"
}  // namespace avx2_sets
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512_sets {
#include "tile.inc"
#include "softmax.inc"
#include "block_decode.inc"
}  // namespace avx512_sets
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
namespace avx512_bf16_sets {
#include "tile.inc"
#include "tile_bf16.inc"
#include "softmax.inc"
#include "block_decode.inc"
}  // namespace avx512_bf16_sets
GNOMON_TARGET_END
#endif
}  // namespace gnomon

// q and out (batch, q_heads, block, d) dense; k and v (batch, heads, length, d), own_k and own_v (batch, heads, block, d)
// by `strides`, in elements: batch, head, row of each in this order. All of kind `dtype`. idx (batch, heads, chosen)
// below `length`, or null for all. lse (batch, q_heads, block) takes the logarithms of the sums of exponentials, or is
// null. Returns 0, or 1 for an instruction set that this build doesn't have.
extern "C" int gnomon_block_decode(int isa, int threads, const void* q, const void* k, const void* v, const void* own_k,
                                   const void* own_v, int dtype, int64_t batch, int64_t q_heads, int64_t heads,
                                   int64_t block, int64_t length, int64_t d, const int64_t* strides, const int64_t* idx,
                                   int64_t chosen, float scale, void* out, float* lse) {
  const gnomon::Cache cache{k, v, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5]};
  const gnomon::Cache own{own_k, own_v, strides[6], strides[7], strides[8], strides[9], strides[10], strides[11]};
  const gnomon::BlockShape shape{batch, q_heads, heads, block, length, d, idx, idx ? chosen : length, scale};
#define GNOMON_RUN(NS)                                                                               \
  if (dtype == gnomon::BF16) gnomon::NS::block_decode<uint16_t>(cache, own, shape, q, out, lse, threads); \
  else gnomon::NS::block_decode<float>(cache, own, shape, q, out, lse, threads);                     \
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

// out (batch, heads, length): sum over the queries and heads of a group of weights (batch, block) times exp(score - lse).
extern "C" int gnomon_block_importance(int isa, int threads, const void* q, const void* k, int dtype, int64_t batch,
                                       int64_t q_heads, int64_t heads, int64_t block, int64_t length, int64_t d,
                                       const int64_t* strides, const float* lse, const float* weights, float scale,
                                       float* out) {
  const gnomon::Cache cache{k, nullptr, strides[0], strides[1], strides[2], 0, 0, 0};
  const gnomon::BlockShape shape{batch, q_heads, heads, block, length, d, nullptr, length, scale};
#define GNOMON_RUN(NS)                                                                                \
  if (dtype == gnomon::BF16) gnomon::NS::importance<uint16_t>(cache, shape, q, lse, weights, out, threads); \
  else gnomon::NS::importance<float>(cache, shape, q, lse, weights, out, threads);                    \
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
