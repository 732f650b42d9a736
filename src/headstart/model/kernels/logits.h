// Access to rows of logits, bf16 or fp32, by one name for both.
#pragma once

#include "greatest.h"
#include "lanes.h"

namespace {

constexpr long PIECE = 256;  // logits whose greatest is found at once

inline vec load_floats(const float *p) { return load(p); }
inline vec load_floats(const bf16 *p) { return widened(load(p)); }
inline float one_float(float x) { return x; }
inline float one_float(bf16 x) { return to_float(x); }
inline float minus_infinity(const float *) { return -INFINITY; }
inline bf16 minus_infinity(const bf16 *) { return 0xff80u; }
inline int64_t first_greatest(const float *row, long size, float *value) {
    return greatest((const int32_t *)row, size, value);
}
inline int64_t first_greatest(const bf16 *row, long size, float *value) {
    return greatest((const int16_t *)row, size, value);
}

// The greatest of `count` logits, none of which is NaN.
template <class Logit>
float block_greatest(const Logit *x, long count) {
    float most = -INFINITY;
    vec found = all(-INFINITY);
    long i = 0;
    for (; i + LANES <= count; i += LANES) found = greater(found, load_floats(x + i));
    for (; i < count; i++) most = one_float(x[i]) > most ? one_float(x[i]) : most;
    float vectors = greatest_of(found);
    return vectors > most ? vectors : most;
}

// Where the greatest of a row stands first; `best` is what it is. For memory that this file wrote as floats.
int64_t first_best(const float *x, long size, float *best) {
    long at = 0;
    *best = -INFINITY;
    for (long begin = 0; begin < size; begin += PIECE) {
        float most = block_greatest(x + begin, begin + PIECE < size ? PIECE : size - begin);
        if (most > *best) *best = most, at = begin;
    }
    while (x[at] != *best) at++;
    return at;
}

}  // namespace
