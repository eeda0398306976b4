// Decodes mutated Huffman streams in buffers of exact size: for the address and undefined-behaviour sanitizers.
#include "huffman.cpp"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

template <class T>
static std::unique_ptr<T[]> copy(const T* from, int64_t n) {  // exact size, so that one byte past it is seen
    std::unique_ptr<T[]> to(new T[n]);
    if (n) std::memcpy(to.get(), from, n * sizeof(T));
    return to;
}

int main(int, char** arguments) {
    const int cases = std::atoi(arguments[1]);
    std::mt19937_64 random(0);
    int64_t tally[4] = {0};
    for (int i = 0; i < cases; ++i) {
        const int64_t n = random() % 3 ? random() % 9000 : random() % 40000, chunks = chunks_of(n);
        uint8_t lengths[256] = {0};  // a skewed complete code: 1, 2, ..., 11, 11
        for (int s = 0; s < 12; ++s) lengths[100 + s] = static_cast<uint8_t>(s < 11 ? s + 1 : 11);
        std::unique_ptr<uint16_t[]> weights(new uint16_t[n]);
        for (int64_t k = 0; k < n; ++k) {
            int s = 0;
            while (s < 11 && random() % 2) ++s;
            weights[k] = static_cast<uint16_t>((100 + s) << 7 | (random() & 0x807F));
        }
        std::unique_ptr<int64_t[]> starts(new int64_t[chunks + 1]);
        gnomon_huffman_starts(weights.get(), n, lengths, starts.get(), 1);
        const int64_t bytes = starts[chunks] + SLACK;
        std::unique_ptr<uint8_t[]> sm(new uint8_t[n]), stream(new uint8_t[bytes]);
        gnomon_huffman_encode(weights.get(), n, lengths, starts.get(), sm.get(), stream.get(), 1);
        std::unique_ptr<uint16_t[]> out(new uint16_t[n]);
        int status = gnomon_huffman_decode(sm.get(), n, lengths, starts.get(), stream.get(), bytes, out.get(), 1);
        if (status || (n && std::memcmp(out.get(), weights.get(), 2 * n))) return std::puts("round trip failed"), 1;
        auto bad_stream = copy(stream.get(), bytes);
        auto bad_starts = copy(starts.get(), chunks + 1);
        for (uint64_t k = random() % 64; k > 0; --k) bad_stream[random() % bytes] = static_cast<uint8_t>(random());
        if (random() % 2) bad_starts[random() % (chunks + 1)] = static_cast<int64_t>(random() % (2 * bytes));
        if (random() % 2)  // chunks that begin late, so that they end past the stream
            for (int64_t c = 1; c < chunks; ++c) bad_starts[c] = bad_starts[chunks];
        if (random() % 4 == 0) lengths[random() % 256] = static_cast<uint8_t>(random() % 13);
        if (random() % 4 == 0) std::memset(bad_stream.get(), random() % 2 ? 0xFF : 0, bytes);
        ++tally[gnomon_huffman_decode(sm.get(), n, lengths, bad_starts.get(), bad_stream.get(), bytes, out.get(), 1)];
    }
    for (int64_t count : tally) std::printf("%lld ", static_cast<long long>(count));
}
