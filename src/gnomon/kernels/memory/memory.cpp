// How fast this machine reads and copies memory: the limits that kernels are measured against.
#include "../include/common.hpp"

namespace gnomon {

constexpr int STREAMS = 4;       // of a thread, read side by side as the matrix kernels do
constexpr int64_t LINE = 64;     // bytes of a cache line
constexpr int64_t AHEAD = 2048;  // bytes to prefetch ahead of several streams
constexpr int64_t AHEAD_OF_ONE = 512;

using Words = uint64_t __attribute__((vector_size(16)));  // named, or compilers read eight bytes at a time

// Exclusive-or over a range, so that no load can be left out.
static uint64_t read_range(const char* from, int64_t bytes) {
  const int64_t part = std::max<int64_t>(bytes, 0) / STREAMS / LINE * LINE;
  Words sum[LINE / sizeof(Words)] = {};
  for (int64_t at = 0; at < part; at += LINE)
    for (int s = 0; s < STREAMS; s++) {
      const char* line = from + s * part + at;
      __builtin_prefetch(line + AHEAD);
      for (size_t i = 0; i < LINE / sizeof(Words); i++) {
        Words word;
        std::memcpy(&word, line + i * sizeof word, sizeof word);
        sum[i] ^= word;
      }
    }
  uint64_t all = 0;
  for (const Words& words : sum) all ^= words[0] ^ words[1];
  for (int64_t at = part * STREAMS; at < bytes; at++) all ^= uint8_t(from[at]);
  return all;
}

// Whole lines go past the caches: a store into a cache would have to read its line first. One stream, as
// processors have few buffers to combine such stores in.
static void copy_range(char* to, const char* from, int64_t bytes) {
#ifdef GNOMON_X86
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(to) % LINE);
  std::memcpy(to, from, size_t(head));
  to += head, from += head, bytes -= head;
  const int64_t lines = bytes / LINE * LINE;
  for (int64_t at = 0; at < lines; at += LINE) {
    __builtin_prefetch(from + at + AHEAD_OF_ONE);
    for (int64_t i = at; i < at + LINE; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  _mm_sfence();
  to += lines, from += lines, bytes -= lines;
#endif
  std::memcpy(to, from, size_t(bytes));
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
                [&](int64_t first, int64_t last) { gnomon::copy_range(to + first, from + first, last - first); });
}
