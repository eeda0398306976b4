// y = x W^T for a few rows of x and a bfloat16 W: the kernel NF12 is compared with, and by itself the
// fast linear layer of batch-1 generation on a CPU. Sums in float32.
#include "../include/common.hpp"

namespace gnomon {
#include "../include/scalar.hpp"
namespace scalar {
#include "../include/dot.inc"
#include "bf16.inc"
}  // namespace scalar

#ifdef GNOMON_X86
GNOMON_TARGET("avx2,fma")
#include "../include/avx2.hpp"
namespace avx2 {
#include "../include/dot.inc"
#include "bf16.inc"
}  // namespace avx2
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
#include "../include/avx512.hpp"
namespace avx512 {
#include "../include/dot.inc"
#include "bf16.inc"
}  // namespace avx512
GNOMON_TARGET_END

GNOMON_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
#include "../include/avx512_bf16.hpp"
namespace avx512_bf16 {
#include "../include/dot.inc"
#include "bf16.inc"
}  // namespace avx512_bf16
GNOMON_TARGET_END
#endif

template <class Matrix>
static Matrix plain(const void* weight, int64_t rows, int64_t columns, int64_t stride) {
  return {static_cast<const uint16_t*>(weight), rows, columns, stride};
}
}  // namespace gnomon

// x (batch, columns) and out (batch, rows) of kind `dtype` (0 bfloat16, 1 float32), rows of weight `stride`
// elements apart. Returns 0, or 1 for an instruction set that this build or dtype doesn't have.
extern "C" int gnomon_bf16_linear(int isa, int threads, const void* x, int64_t batch, int64_t columns, int dtype,
                                  const void* weight, int64_t rows, int64_t stride, void* out) {
  using namespace gnomon;
  switch (isa) {
    case SCALAR:
      scalar::linear(plain<scalar::Plain>(weight, rows, columns, stride), x, batch, columns, dtype, out, threads);
      return 0;
#ifdef GNOMON_X86
    case AVX2:
      avx2::linear(plain<avx2::Plain>(weight, rows, columns, stride), x, batch, columns, dtype, out, threads);
      return 0;
    case AVX512:
      avx512::linear(plain<avx512::Plain>(weight, rows, columns, stride), x, batch, columns, dtype, out, threads);
      return 0;
    case AVX512_BF16:
      if (dtype != BF16) return 1;
      avx512_bf16::linear(plain<avx512_bf16::Plain>(weight, rows, columns, stride), x, batch, columns, dtype, out,
                          threads);
      return 0;
#endif
    default:
      return 1;
  }
}
