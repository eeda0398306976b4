// What decoding over caches shares: numbers, tiles, strides.
#pragma once

#include <limits>

#include "../include/common.hpp"

namespace gnomon {
namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t TILE = 16;
constexpr int64_t CHUNK = 4096;  // keys that a dense partial sum covers, whatever the number of threads

// Strides are in elements; the last dimension is dense.
struct Cache {
  const void* k;
  const void* v;
  int64_t k_batch, k_head, k_row, v_batch, v_head, v_row;
};

template <class E>
GNOMON_INLINE float wide(E x);
template <>
GNOMON_INLINE float wide<uint16_t>(uint16_t x) { return widen(x); }
template <>
GNOMON_INLINE float wide<float>(float x) { return x; }

GNOMON_INLINE void store(uint16_t* out, float x) { *out = narrow(x); }
GNOMON_INLINE void store(float* out, float x) { *out = x; }

}  // namespace
}  // namespace gnomon
