// Huffman-coded BF16, decoded with tables of several symbols: the entropy-coded peer of fixed-length formats.
//
// Layout: see reference.py. Every chunk is a bit stream of its own, so a thread works on several chunks at a time
// and hides the latency of one lookup behind the others. A lookup of WINDOW bits gives one to MOST exponents;
// no code is longer than the window, so there is no slow path. Exponents go to a small buffer, which is merged
// with the sign and mantissa bytes by vector instructions.
//
// Untrusted input: lengths and starts are checked, every refill stays inside the stream, and any bits decode to
// some exponents, so corrupt data gives an error or wrong numbers, never an access out of bounds.

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int WINDOW = 11;       // bits of a lookup and of the longest code
constexpr int MOST = 6;          // exponents of one table entry
constexpr int64_t CHUNK = 4096;  // weights of a chunk
constexpr int STREAMS = 4;       // chunks that one thread decodes at a time
constexpr int LOOKUPS = 5;       // lookups between refills: 5 * 11 of the 56 bits that a refill guarantees
constexpr int64_t SLACK = 16;    // zero bytes after the last chunk: a refill runs up to 7 bytes ahead and reads 8

enum Status { OK = 0, BAD_CODE = 1, BAD_STARTS = 2, BAD_STREAM = 3 };

static_assert(LOOKUPS * WINDOW <= 56, "a refill must last for all lookups");
static_assert(STREAMS == 4, "decode_some names its streams, so that they stay in registers");

int64_t chunks_of(int64_t n) { return (n + CHUNK - 1) / CHUNK; }

// Canonical codes, first bit lowest; false unless they are complete or a single code of one bit.
bool make_codes(const uint8_t* lengths, uint16_t* codes) {
    int count[WINDOW + 1] = {0}, used = 0, single = 0;
    for (int s = 0; s < 256; ++s) {
        if (lengths[s] > WINDOW) return false;
        if (lengths[s]) ++used, single = s;
        ++count[lengths[s]];
    }
    uint32_t next[WINDOW + 2] = {0}, kraft = 0;
    for (int length = 1; length <= WINDOW; ++length) {
        next[length + 1] = (next[length] + count[length]) << 1;
        kraft += static_cast<uint32_t>(count[length]) << (WINDOW - length);
    }
    if (kraft != 1u << WINDOW && !(used == 1 && lengths[single] == 1)) return false;
    for (int s = 0; s < 256; ++s) {
        uint32_t code = lengths[s] ? next[lengths[s]]++ : 0, reversed = 0;
        for (int bit = 0; bit < lengths[s]; ++bit) reversed |= (code >> bit & 1) << (lengths[s] - 1 - bit);
        codes[s] = static_cast<uint16_t>(reversed);
    }
    return true;
}

// table[bits] = bits used | count << 8 | exponents << 16, of as many exponents as lie whole in the window.
bool make_table(const uint8_t* lengths, uint64_t* table) {
    uint16_t codes[256];
    if (!make_codes(lengths, codes)) return false;
    uint8_t first[1 << WINDOW];  // the exponent that these bits begin with
    int any = 0;
    while (!lengths[any]) ++any;
    std::memset(first, any, sizeof first);  // a single code leaves half of the bits without a meaning
    for (int s = 0; s < 256; ++s) {
        if (!lengths[s]) continue;
        for (int bits = codes[s]; bits < 1 << WINDOW; bits += 1 << lengths[s]) first[bits] = static_cast<uint8_t>(s);
    }
    for (uint32_t bits = 0; bits < 1u << WINDOW; ++bits) {
        uint64_t exponents = 0;
        int used = 0, count = 0;
        while (count < MOST) {
            const uint8_t s = first[bits >> used];
            if (used + lengths[s] > WINDOW) break;
            exponents |= static_cast<uint64_t>(s) << (8 * count++);
            used += lengths[s];
        }
        table[bits] = static_cast<uint64_t>(used) | static_cast<uint64_t>(count) << 8 | exponents << 16;
    }
    return true;
}

bool good_starts(const int64_t* starts, int64_t chunks, int64_t stream_bytes) {
    if (starts[0] != 0 || starts[chunks] + SLACK != stream_bytes) return false;
    for (int64_t c = 0; c < chunks; ++c)
        if (starts[c + 1] < starts[c]) return false;
    return true;
}

struct Stream {
    const uint8_t* next;  // first byte not yet in `bits`
    const uint8_t* last;  // where a refill may start at the latest
    uint64_t bits;
    uint64_t left;  // valid bits, in the low byte; what lies above is noise
    uint8_t* out;
    uint8_t* end;
};

inline __attribute__((always_inline)) void refill(Stream& s) {
    uint64_t word;
    std::memcpy(&word, s.next, 8);
    const uint64_t left = s.left & 0xFF;
    s.bits |= word << left;
    s.next += (63 - left) >> 3;
    s.left = left | 56;
}

inline __attribute__((always_inline)) void lookup(Stream& s, const uint64_t* table) {
    const uint64_t entry = table[s.bits & ((1 << WINDOW) - 1)];
    const uint64_t exponents = entry >> 16;
    std::memcpy(s.out, &exponents, 8);
    s.bits >>= entry & 63;
    s.left -= entry;
    s.out += entry >> 8 & 0xFF;
}

inline __attribute__((always_inline)) bool running(const Stream& s) {
    return s.out + LOOKUPS * MOST <= s.end && s.next <= s.last;
}

// One stream to its end. The buffer takes a last entry whole; what is past the end is not looked at.
inline __attribute__((always_inline)) bool finish(Stream& s, const uint64_t* table) {
    while (s.out < s.end) {
        if (s.next > s.last) return false;
        refill(s);
        for (int i = 0; i < LOOKUPS && s.out < s.end; ++i) lookup(s, table);
    }
    return true;
}

inline __attribute__((always_inline)) void merge_tail(const uint8_t* e, const uint8_t* sm, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        out[i] = static_cast<uint16_t>((sm[i] & 0x80) << 8 | e[i] << 7 | (sm[i] & 0x7F));
}

struct Portable {
    static void merge(const uint8_t* e, const uint8_t* sm, uint16_t* out, int64_t n) { merge_tail(e, sm, out, n); }
};

#if defined(__x86_64__)
struct Avx2 {
    __attribute__((target("avx2"))) static void merge(const uint8_t* e, const uint8_t* sm, uint16_t* out, int64_t n) {
        const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
        int64_t i = 0;
        for (; i + 32 <= n; i += 32) {
            __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sm + i));
            __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(e + i));
            s = _mm256_permute4x64_epi64(s, 0xD8);  // unpacking works within halves
            x = _mm256_permute4x64_epi64(x, 0xD8);
            // bit 0 of the exponent ends the low byte, the other seven follow the sign in the high byte
            const __m256i low = _mm256_or_si256(_mm256_andnot_si256(top, s),
                                                _mm256_and_si256(top, _mm256_slli_epi16(x, 7)));
            const __m256i high = _mm256_or_si256(_mm256_and_si256(top, s),
                                                 _mm256_andnot_si256(top, _mm256_srli_epi16(x, 1)));
            __m256i* to = reinterpret_cast<__m256i*>(out + i);
            _mm256_storeu_si256(to, _mm256_unpacklo_epi8(low, high));
            _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi8(low, high));
        }
        merge_tail(e + i, sm + i, out + i, n - i);
    }
};
#endif

struct Job {
    const uint8_t* sm;
    int64_t n;
    const int64_t* starts;
    const uint8_t* stream;
    uint16_t* out;
    const uint64_t* table;
};

// Chunks [first, first + STREAMS) that exist. The streams run together until the shortest ends.
template <class Kind>
inline __attribute__((always_inline)) bool decode_some(const Job& job, int64_t first) {
    alignas(64) uint8_t buffer[STREAMS][CHUNK + 8];  // the last entry is written whole
    const int64_t chunks = chunks_of(job.n);
    const int here = static_cast<int>(chunks - first < STREAMS ? chunks - first : STREAMS);
    const auto size = [&](int64_t c) { return c == chunks - 1 ? job.n - c * CHUNK : CHUNK; };
    const uint8_t* last = job.stream + job.starts[chunks] + SLACK - 8;
    Stream s[STREAMS];
    for (int i = 0; i < here; ++i)
        s[i] = {job.stream + job.starts[first + i], last, 0, 0, buffer[i], buffer[i] + size(first + i)};
    if (here == STREAMS) {
        Stream a = s[0], b = s[1], c = s[2], d = s[3];
        while (running(a) && running(b) && running(c) && running(d)) {
            refill(a), refill(b), refill(c), refill(d);
            for (int i = 0; i < LOOKUPS; ++i) {
                lookup(a, job.table), lookup(b, job.table), lookup(c, job.table), lookup(d, job.table);
            }
        }
        s[0] = a, s[1] = b, s[2] = c, s[3] = d;
    }
    for (int i = 0; i < here; ++i) {
        if (!finish(s[i], job.table)) return false;
        const int64_t at = (first + i) * CHUNK;
        Kind::merge(buffer[i], job.sm + at, job.out + at, size(first + i));
    }
    return true;
}

bool decode_portable(const Job& job, int64_t first) { return decode_some<Portable>(job, first); }

#if defined(__x86_64__)
__attribute__((target("avx2,bmi2"))) bool decode_avx2(const Job& job, int64_t first) {
    return decode_some<Avx2>(job, first);
}
#endif

}  // namespace

extern "C" {

int64_t gnomon_huffman_chunk() { return CHUNK; }

int gnomon_huffman_window() { return WINDOW; }

// counts[e] = how many of the n weights have exponent e.
void gnomon_huffman_count(const uint16_t* weights, int64_t n, int64_t* counts) {
    int64_t lanes[4][256] = {{0}};  // neighbours are often equal: four tables keep them from waiting for each other
    for (int64_t i = 0; i < n; ++i) ++lanes[i & 3][weights[i] >> 7 & 0xFF];
    for (int e = 0; e < 256; ++e) counts[e] = lanes[0][e] + lanes[1][e] + lanes[2][e] + lanes[3][e];
}

// starts[c] = first byte of chunk c; starts[chunks] + 16 is the size of the stream.
int gnomon_huffman_starts(const uint16_t* weights, int64_t n, const uint8_t* lengths, int64_t* starts, int threads) {
    const int64_t chunks = chunks_of(n);
    bool missing = false;
    starts[0] = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(|| : missing)
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t end = (c + 1) * CHUNK < n ? (c + 1) * CHUNK : n;
        int64_t bits = 0;
        for (int64_t i = c * CHUNK; i < end; ++i) {
            const uint8_t length = lengths[weights[i] >> 7 & 0xFF];
            missing = missing || length == 0;
            bits += length;
        }
        starts[c + 1] = (bits + 7) / 8;
    }
    for (int64_t c = 0; c < chunks; ++c) starts[c + 1] += starts[c];
    return missing ? BAD_CODE : OK;
}

// Writes sm (n bytes) and the stream, whose size and starts are as gnomon_huffman_starts found them.
int gnomon_huffman_encode(const uint16_t* weights, int64_t n, const uint8_t* lengths, const int64_t* starts,
                          uint8_t* sm, uint8_t* stream, int threads) {
    uint16_t codes[256];
    if (n && !make_codes(lengths, codes)) return BAD_CODE;
    const int64_t chunks = chunks_of(n);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t end = (c + 1) * CHUNK < n ? (c + 1) * CHUNK : n;
        uint8_t* to = stream + starts[c];
        uint64_t bits = 0;
        int filled = 0;
        for (int64_t i = c * CHUNK; i < end; ++i) {
            const uint16_t w = weights[i];
            sm[i] = static_cast<uint8_t>((w >> 8 & 0x80) | (w & 0x7F));
            const uint8_t e = w >> 7 & 0xFF;
            bits |= static_cast<uint64_t>(codes[e]) << filled;
            filled += lengths[e];
            if (filled >= 32) {  // whole words only: the bytes after this chunk are another thread's
                const uint32_t word = static_cast<uint32_t>(bits);
                std::memcpy(to, &word, 4);
                to += 4, bits >>= 32, filled -= 32;
            }
        }
        for (; filled > 0; filled -= 8, bits >>= 8) *to++ = static_cast<uint8_t>(bits);
    }
    std::memset(stream + starts[chunks], 0, SLACK);
    return OK;
}

// n weights to `out`, by `threads` threads.
int gnomon_huffman_decode(const uint8_t* sm, int64_t n, const uint8_t* lengths, const int64_t* starts,
                          const uint8_t* stream, int64_t stream_bytes, uint16_t* out, int threads) {
    const int64_t chunks = chunks_of(n);
    if (!good_starts(starts, chunks, stream_bytes)) return BAD_STARTS;
    std::vector<uint64_t> table(1 << WINDOW);
    if (n && !make_table(lengths, table.data())) return BAD_CODE;
    const Job job{sm, n, starts, stream, out, table.data()};
    auto decode = decode_portable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) decode = decode_avx2;
#endif
    bool whole = true;
    const int64_t turns = (chunks + STREAMS - 1) / STREAMS;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : whole)
    for (int64_t turn = 0; turn < turns; ++turn) whole = decode(job, turn * STREAMS) && whole;
    return whole ? OK : BAD_STREAM;
}

}  // extern "C"
