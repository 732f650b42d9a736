// Block hashes: a chain of SHA-256 over the hash before and the token ids of a block (core/cache/hashing.py).
//
// A library of its own: it needs no OpenMP and no torch, so that routers can use it too. It is for processors with the
// SHA extensions of x86, on which a block of 16 tokens takes two compressions of about 60 ns; on others Python's own
// SHA-256 (OpenSSL) is as fast.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

constexpr size_t HASH_BYTES = 32, CHUNK_BYTES = 64;
constexpr int ROUNDS = 64;

// Fractional parts of the cube and square roots of the first primes (FIPS 180-4, 4.2.2 and 5.3.3).
alignas(16) constexpr uint32_t K[ROUNDS] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr uint32_t FIRST[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

void store_big_endian(uint64_t value, int num_bytes, uint8_t* at) {
    for (int i = 0; i < num_bytes; i++) at[i] = uint8_t(value >> 8 * (num_bytes - 1 - i));
}

#if defined(__x86_64__)
// Adds `num` chunks of 64 bytes to the state.
__attribute__((target("sha,sse4.1,ssse3"))) void compress(uint32_t* state, const uint8_t* data, size_t num) {
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    // The instructions take the state as two registers: A B E F and C D G H, from the highest word down.
    const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xB1);
    const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
    for (; num > 0; num--, data += CHUNK_BYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];  // the next 16 words of the schedule, as a ring
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
#pragma GCC unroll 16
        for (int i = 0; i < ROUNDS / 4; i++) {
            const __m128i words = _mm_add_epi32(w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(K) + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0E));
            const __m128i last = w[(i + 3) % 4];
            const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]),
                                              _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
            w[i % 4] = _mm_sha256msg2_epu32(sum, last);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1;
}
#else
void compress(uint32_t*, const uint8_t*, size_t) {}
bool has_sha() { return false; }
#endif

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns whether this processor has the SHA extensions. Ask once: on a virtual machine it may take 100 us.
EXPORT int headstart_has_sha() { return has_sha(); }

// Writes the hashes of `num` blocks of `stride` bytes each to `hashes`, 32 bytes each: of the hash before it (`parent`
// for the first) and the bytes of the block. Returns 0 if there is no memory.
EXPORT int headstart_block_hashes(const uint8_t* parent, const uint8_t* blocks, long stride, long num,
                                  uint8_t* hashes) {
    const size_t length = HASH_BYTES + size_t(stride), chunks = (length + 9 + CHUNK_BYTES - 1) / CHUNK_BYTES;
    auto* message = static_cast<uint8_t*>(std::calloc(chunks, CHUNK_BYTES));
    if (message == nullptr) return 0;
    message[length] = 0x80;
    store_big_endian(8 * uint64_t(length), 8, message + chunks * CHUNK_BYTES - 8);
    for (long i = 0; i < num; i++) {
        std::memcpy(message, parent, HASH_BYTES);
        std::memcpy(message + HASH_BYTES, blocks + i * stride, size_t(stride));
        uint32_t state[8];
        std::memcpy(state, FIRST, sizeof state);
        compress(state, message, chunks);
        for (int word = 0; word < 8; word++) store_big_endian(state[word], 4, hashes + i * HASH_BYTES + 4 * word);
        parent = hashes + i * HASH_BYTES;
    }
    std::free(message);
    return 1;
}
