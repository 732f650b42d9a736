// Integer weights of 16 outputs and a pair of inputs as int16, or of two pairs as bytes, unpacked from planes of bits; see
// groups.h for the planes.
#pragma once

#include "dot.h"

namespace {

template <bool, class A, class>
struct Either {
    typedef A Type;
};
template <class A, class B>
struct Either<false, A, B> {
    typedef B Type;
};

#if defined(__AVX512F__)

constexpr int WORDS_ROWS = 12;  // most rows whose sums of a group stay in registers, as of BYTES_ROWS
// Most rows whose sums over groups stay in registers too, and how many loops over four pairs are unrolled: with VNNI
// all, since a loop moves all sums at its end; without, GCC postpones the additions and runs out of registers.
#if defined(__AVX512VNNI__)
constexpr int WORDS_CARRIED = 8, WORDS_UNROLLED = 4, BYTES_ROWS = 8;
#else
constexpr int WORDS_CARRIED = 6, WORDS_UNROLLED = 1, BYTES_ROWS = 12;
#endif
constexpr int words_columns(int) { return 2; }

struct Words {
    __m512i value;
    static Words load(const char *at) { return {_mm512_loadu_si512(at)}; }
    static Words load_bytes(const char *at) {
        return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at))};
    }
    template <int N>
    Words right() const {
        return {N ? _mm512_srli_epi16(value, N) : value};
    }
    template <int N>
    Words left() const {
        return {_mm512_slli_epi16(value, N)};
    }
    Words right_by(int n) const { return {_mm512_srl_epi16(value, _mm_cvtsi32_si128(n))}; }
    Words masked(int mask) const { return {_mm512_and_si512(value, _mm512_set1_epi16((short)mask))}; }
    // This, or the bits of `mask` in `other`.
    Words with(Words other, int mask) const {
        return {_mm512_ternarylogic_epi32(value, other.value, _mm512_set1_epi16((short)mask), 0xf8)};
    }
};

inline void add_products(Ints &sum, Words weights, const uint32_t *pair) {
    Int8::add(sum, weights.value, pair);
}

// Sums of 16 outputs in two int16 each, over two bytes each of the four that a call multiplies: unsigned ones of weights
// times signed ones of a row. `fitting`: how many loops over four pairs fit, each of which adds two products of two bytes,
// of weights of so many bits times up to 127.
struct Shorts {
    static constexpr int fitting(int bits) { return bits == 4 ? 4 : bits == 5 ? 2 : 1; }
    __m512i value;
    void begin(Words weights, const uint32_t *four) { value = products(weights, four); }
    void add(Words weights, const uint32_t *four) { value = _mm512_add_epi16(value, products(weights, four)); }
    Ints total() const { return {_mm512_madd_epi16(value, _mm512_set1_epi16(1))}; }
    static __m512i products(Words weights, const uint32_t *four) {
        return _mm512_maddubs_epi16(weights.value, _mm512_set1_epi32((int)*four));
    }
};

#if defined(__AVX512VNNI__)
struct Fours {  // the same in int32 from the first product on, by one instruction
    static constexpr int fitting(int) { return 4; }
    Ints sum;
    void begin(Words weights, const uint32_t *four) {
        sum.begin(nullptr);
        add(weights, four);
    }
    void add(Words weights, const uint32_t *four) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum.value) : "v"(weights.value), "v"(_mm512_set1_epi32((int)*four)));
    }
    Ints total() const { return sum; }
};
template <int R>  // those of one or two rows wait for each other
using ByteSums = typename Either<(R > 2), Fours, Shorts>::Type;
#else
template <int>
using ByteSums = Shorts;
#endif

inline Floats from_halves(const char *at) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at))}; }
inline Floats from_bytes(const char *at) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)))};
}
inline Floats from_signed_bytes(const char *at) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)))};
}
inline Floats multiplied(Floats a, Floats b) { return {_mm512_mul_ps(a.value, b.value)}; }

#else

constexpr int WORDS_ROWS = 5, BYTES_ROWS = 5, WORDS_CARRIED = 5, WORDS_UNROLLED = 1;
constexpr int words_columns(int rows) { return rows > 2 ? 1 : 2; }

struct Words {
    __m256i low, high;
    static Words load(const char *at) {
        return {_mm256_loadu_si256((const __m256i *)at), _mm256_loadu_si256((const __m256i *)at + 1)};
    }
    static Words load_bytes(const char *at) {
        const __m128i *bytes = (const __m128i *)at;
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)), _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
    }
    template <int N>
    Words right() const {
        return {_mm256_srli_epi16(low, N), _mm256_srli_epi16(high, N)};
    }
    template <int N>
    Words left() const {
        return {_mm256_slli_epi16(low, N), _mm256_slli_epi16(high, N)};
    }
    Words right_by(int n) const {
        __m128i count = _mm_cvtsi32_si128(n);
        return {_mm256_srl_epi16(low, count), _mm256_srl_epi16(high, count)};
    }
    Words masked(int mask) const {
        __m256i all = _mm256_set1_epi16((short)mask);
        return {_mm256_and_si256(low, all), _mm256_and_si256(high, all)};
    }
    Words with(Words other, int mask) const {
        Words bits = other.masked(mask);
        return {_mm256_or_si256(low, bits.low), _mm256_or_si256(high, bits.high)};
    }
};

inline void add_products(Ints &sum, Words weights, const uint32_t *pair) {
    __m256i both = _mm256_set1_epi32((int)*pair);
    add_in_place(sum.low, _mm256_madd_epi16(weights.low, both));
    add_in_place(sum.high, _mm256_madd_epi16(weights.high, both));
}

struct Shorts {
    static constexpr int fitting(int bits) { return bits == 4 ? 4 : bits == 5 ? 2 : 1; }
    __m256i low, high;
    void begin(Words weights, const uint32_t *four) {
        __m256i both = _mm256_set1_epi32((int)*four);
        low = _mm256_maddubs_epi16(weights.low, both), high = _mm256_maddubs_epi16(weights.high, both);
    }
    void add(Words weights, const uint32_t *four) {
        __m256i both = _mm256_set1_epi32((int)*four);
        add_shorts_in_place(low, _mm256_maddubs_epi16(weights.low, both));
        add_shorts_in_place(high, _mm256_maddubs_epi16(weights.high, both));
    }
    Ints total() const {
        __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones)};
    }
};
template <int>
using ByteSums = Shorts;

inline Floats from_halves(const char *at) {
    const __m128i *halves = (const __m128i *)at;
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline Floats from_bytes(const char *at) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline Floats from_signed_bytes(const char *at) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline Floats multiplied(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }

#endif

// The planes of four pairs, b of a group: 4b to 4b + 3.
template <int BITS>
struct Planes {
    Words low, high;
    void load(const char *at, int half, int b) {
        constexpr int SIZE = 64;  // bytes of 32 words
        low = Words::load(at + (half * 4 + b) * SIZE);
        if constexpr (BITS == 5) high = Words::load(at + (8 + half) * SIZE).right_by(4 * b);
        if constexpr (BITS == 6) high = Words::load(at + (8 + half * 2 + b / 2) * SIZE).right_by(8 * (b % 2));
    }
    // The weights of pairs J and J + 2 of the four, as bytes: the first inputs of both, then the second ones.
    template <int J>
    Words bytes() const {
        Words fours = low.template right<4 * J>().masked(0x0f0f);
        if constexpr (BITS == 5)
            return fours.with(high.template left<4 - J>(), 0x0010).with(high.template left<10 - J>(), 0x1000);
        if constexpr (BITS == 6)
            return fours.with(high.template left<4 - 2 * J>(), 0x0030).with(high.template left<8 - 2 * J>(), 0x3000);
        return fours;
    }
    // The weights of pair j of the four, as int16. j is a constant after unrolling.
    Words pair(int j) const {
        switch (j) {
            case 0: return at<0>();
            case 1: return at<1>();
            case 2: return at<2>();
            default: return at<3>();
        }
    }
    template <int J>
    Words at() const {
        Words four = J == 3 ? low.template right<12>() : low.template right<4 * J>().masked(15);
        if constexpr (BITS == 5) return four.with(high.template left<4 - J>(), 16);
        if constexpr (BITS == 6) {
            if constexpr (J < 2) return four.with(high.template left<4 - 2 * J>(), 48);
            return four.with(high.template right<2 * J - 4>(), 48);
        }
        return four;
    }
};

template <>
struct Planes<8> {
    const char *first;
    void load(const char *at, int half, int b) { first = at + (half * GROUP_PAIRS_OF_8 + 4 * b) * 32; }
    Words pair(int j) const { return Words::load_bytes(first + j * 32); }
    static constexpr int GROUP_PAIRS_OF_8 = 16;
};

}  // namespace
