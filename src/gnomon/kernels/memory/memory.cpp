// How fast this machine reads and copies memory: the limits that kernels are measured against.
#include "../include/common.hpp"

namespace gnomon {

constexpr int STREAMS = 4;       // of a thread, read side by side as the matrix kernels do
constexpr int64_t LINE = 64;     // bytes of a cache line
constexpr int64_t AHEAD = 2048;  // bytes to prefetch ahead

// Exclusive-or of all whole lines of a range, so that no load can be left out.
static uint64_t read_range(const char* from, int64_t bytes) {
  const int64_t part = bytes / STREAMS / LINE * LINE;
  uint64_t sum[LINE / 8] = {};
  for (int64_t at = 0; at < part; at += LINE)
    for (int s = 0; s < STREAMS; s++) {
      const char* line = from + s * part + at;
      __builtin_prefetch(line + AHEAD);
      uint64_t words[LINE / 8];
      std::memcpy(words, line, LINE);
      for (int i = 0; i < LINE / 8; i++) sum[i] ^= words[i];
    }
  uint64_t all = 0;
  for (uint64_t word : sum) all ^= word;
  return all;
}

}  // namespace gnomon

extern "C" uint64_t gnomon_read(int threads, const char* from, int64_t bytes) {
  const int64_t share = (bytes + threads - 1) / threads;
  uint64_t all = 0;
  gnomon::split(threads, 1, threads, [&](int64_t first, int64_t last) {
    for (int64_t id = first; id < last; id++) {
      const uint64_t sum = gnomon::read_range(from + id * share, std::min(share, bytes - id * share));
      __atomic_fetch_xor(&all, sum, __ATOMIC_RELAXED);
    }
  });
  return all;
}

extern "C" void gnomon_copy(int threads, char* to, const char* from, int64_t bytes) {
  gnomon::split(bytes, gnomon::LINE, threads,
                [&](int64_t first, int64_t last) { std::memcpy(to + first, from + first, size_t(last - first)); });
}
