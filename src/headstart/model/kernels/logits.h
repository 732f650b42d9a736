// Access to rows of logits, with the same function names for bf16 and fp32.
#pragma once

#include "greatest.h"
#include "lanes.h"

namespace {

constexpr long PIECE = 256;  // logits per search for the greatest

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

// Returns the greatest of `count` logits, none of which may be NaN.
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

// Returns the first index of the greatest logit of a row and sets `best` to it. For floats without NaN.
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
