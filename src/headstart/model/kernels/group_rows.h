// Rows as products with weights in blocks read them: groups of 32 inputs, whose numbers are integers with one scale.
//
// Of 16 bits: the scale is a power of two, and numbers of at least 2^-7 of the largest one of the group keep all bits of
// a bf16; smaller ones are rounded to steps of at most 2^-14 of it. Of 8 bits: all are rounded to steps of 1/127 of the
// largest one, as in llama.cpp's Q8_0.
#pragma once

#include "elements.h"

namespace {

constexpr int GROUP_INPUTS = 32, GROUP_PAIRS = 16;

struct GroupOfWords {
    uint32_t pairs[GROUP_PAIRS];  // two int16 each
    int32_t sums[2];              // of the first and the second 16 inputs
    float scale, scaled_sum;      // value = int16 * scale; scaled_sum = scale * (sums[0] + sums[1])
};

struct GroupOfBytes {
    uint32_t fours[GROUP_INPUTS / 4];  // four int8 each; four 2b + j holds the pairs 4b + j and 4b + j + 2, see words.h
    int32_t sums[2];
    float scale, scaled_sum;
};

// Returns the next number of a row, or 0 beyond its end.
inline float element_or_zero(const Linear &linear, const bf16 *x, float factor, long i) {
    return i < linear.in_features ? element(x, (const bf16 *)linear.norm, factor, i) : 0.0f;
}

// Returns the float with this biased exponent, 1 to 254.
inline float power_of_two(uint32_t exponent) {
    uint32_t bits = exponent << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

struct Scaling {  // integer = value * inverse, rounded; value = integer * scale
    float inverse, scale;
};

// Returns the scaling of a group whose largest absolute value is `largest`; zeros if that is too small for a quotient.
inline Scaling scaling_of(float largest, const GroupOfWords &) {
    uint32_t exponent;
    memcpy(&exponent, &largest, 4);
    exponent >>= 23;
    if (exponent <= 14) return {0.0f, 0.0f};
    return {power_of_two(268 - exponent), power_of_two(exponent - 14)};
}

inline Scaling scaling_of(float largest, const GroupOfBytes &) {
    if (largest < 1e-35f) return {0.0f, 0.0f};
    return {127.0f / largest, largest / 127.0f};
}

inline void store_group(const int16_t *whole, GroupOfWords &to) { memcpy(to.pairs, whole, sizeof to.pairs); }

inline void store_group(const int16_t *whole, GroupOfBytes &to) {
    // Each half has two fours of the pairs 0 and 2, 1 and 3 of its first four pairs, then those of its last four.
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i *from = (const __m128i *)whole;
    for (int half = 0; half < 2; half++) {
        __m128i bytes = _mm_packs_epi16(_mm_loadu_si128(from + 2 * half), _mm_loadu_si128(from + 2 * half + 1));
        _mm_storeu_si128((__m128i *)to.fours + half, _mm_shuffle_epi8(bytes, order));
    }
}

// Calls store(g, integers, their sums, scale) for each group of a row, rounded as in Group. A group with a number that is not
// finite gets the scale NaN, so all outputs become NaN.
template <class Group, class Store>
void round_groups(const Linear &linear, const bf16 *x, long groups, Store store) {
    float factor = row_factor(linear, x), values[GROUP_INPUTS];
    const bf16 *norm = (const bf16 *)linear.norm;
    for (long g = 0; g < groups; g++) {
        long at = g * GROUP_INPUTS, left = linear.in_features - at;
        if (left < GROUP_INPUTS) {
            for (int i = 0; i < GROUP_INPUTS; i++) values[i] = element_or_zero(linear, x, factor, at + i);
        } else {
#pragma omp simd
            for (int i = 0; i < GROUP_INPUTS; i++) values[i] = element(x + at, norm ? norm + at : norm, factor, i);
        }
        float largest = 0, poison = 0;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
        for (int i = 0; i < GROUP_INPUTS; i++) {
            largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
            poison += values[i] * 0.0f;
        }
        Scaling scaling = poison != 0 ? Scaling{0.0f, NAN} : scaling_of(largest, Group());
        int16_t whole[GROUP_INPUTS];
#pragma omp simd
        for (int i = 0; i < GROUP_INPUTS; i++)
            whole[i] = (int16_t)(int)rintf((scaling.inverse ? values[i] : 0.0f) * scaling.inverse);
        int sums[2] = {0, 0};
        for (int part = 0; part < 2; part++) {
            int sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < GROUP_INPUTS / 2; i++) sum += whole[part * GROUP_INPUTS / 2 + i];
            sums[part] = sum;
        }
        store(g, whole, sums, scaling.scale);
    }
}

template <class Group>
void prepare_groups(const Linear &linear, const bf16 *x, Group *to, long groups) {
    round_groups<Group>(linear, x, groups, [&](long g, const int16_t *whole, const int *sums, float scale) {
        store_group(whole, to[g]);
        to[g].sums[0] = sums[0], to[g].sums[1] = sums[1];
        to[g].scale = scale, to[g].scaled_sum = scale * (float)(sums[0] + sums[1]);
    });
}

}  // namespace
