// The planes of an NF12 matrix as the ABI passes them; see reference.py for their layout.
#pragma once
#include "../include/common.hpp"

namespace gnomon {

struct Planes {
  const uint8_t* sm;
  const uint32_t* ex;
  const uint16_t* esc;
  int64_t rows, columns;  // columns padded to a multiple of 8
  int64_t escapes;
  int base;
};

constexpr int64_t GROUP = 8;

// Row of esc of the exception group whose sm bytes start here; never past the last one.
GNOMON_INLINE const uint16_t* escape(const uint8_t* sm, const uint16_t* esc, uint32_t last) {
  uint32_t index;
  std::memcpy(&index, sm, 4);
  return esc + size_t(std::min(index, last)) * GROUP;
}

// One group, in plain integer arithmetic.
GNOMON_INLINE void decode_group(const uint8_t* sm, uint32_t ex, const uint16_t* esc, uint32_t last, int base,
                                uint16_t* out) {
  if (ex == 0 && esc) {
    std::memcpy(out, escape(sm, esc, last), GROUP * 2);
    return;
  }
  for (int i = 0; i < GROUP; i++) {
    const uint32_t nibble = ex >> (i / 2 * 4 + i % 2 * 16) & 15;
    out[i] = uint16_t((sm[i] & 0x80u) << 8 | (sm[i] & 0x7Fu) | (nibble + uint32_t(base)) << 7);
  }
}

}  // namespace gnomon
