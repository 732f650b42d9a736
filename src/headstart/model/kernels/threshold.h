// Threshold search: the largest t such that the weights >= t reach a given count or a given sum, without a sort.
//
// Weights are floats in [0, 1], whose bit patterns have the same order as the floats: t is found by bisection of its
// bits. Each probe is one pass over the list; as soon as few enough weights lie between the bounds, they are copied out
// and the others are not read again. Weights equal to t are always on the same side, so ties do not depend on an order.
#pragma once

#include "lanes.h"

namespace {

constexpr long BLOCK = 256;      // weights per stored sum and maximum
constexpr long SHORT_LIST = 48;  // maximum number of weights that are sorted
constexpr float BELOW_GUESS = 0.8f, ABOVE_GUESS = 1.25f;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline long padded(long size, long unit) { return (size + unit - 1) / unit * unit; }

struct List {  // `size` is a multiple of LANES; padding is 0
    const float *values;
    long size;
};

struct Amount {
    double sum;
    long count;
};

// Returns the sum and the number of the weights >= least. Sums of BLOCK weights are in fp32, their total in fp64.
inline Amount amount_from(List list, float least) {
    Amount amount = {0, 0};
    vec bound = all(least);
    for (long begin = 0; begin < list.size; begin += BLOCK) {
        long end = begin + BLOCK < list.size ? begin + BLOCK : list.size, i = begin;
        vec even = all(0), odd = all(0);
        for (; i + LANES < end; i += 2 * LANES) {
            vec first = load(list.values + i), second = load(list.values + i + LANES);
            even = add(even, kept(first, bound)), odd = add(odd, kept(second, bound));
            amount.count += count_at_least(first, bound) + count_at_least(second, bound);
        }
        if (i < end) {
            vec last = load(list.values + i);
            even = add(even, kept(last, bound));
            amount.count += count_at_least(last, bound);
        }
        amount.sum += sum_of(add(even, odd));
    }
    return amount;
}

// Copies the weights in [least, end) to `out`, padded with zeros; `out` may be the list itself. Returns their number.
inline long copy_between(List list, float least, float end, float *out) {
    long count = 0;
    vec low = all(least), high = all(end);
    for (long i = 0; i < list.size; i += LANES) count += append_between(out + count, load(list.values + i), low, high);
    store(out + count, all(0));
    return count;
}

inline void sort_descending(float *values, long count) {
    for (long i = 1; i < count; i++) {
        float value = values[i];
        long at = i;
        for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1];
        values[at] = value;
    }
}

enum Measure { BY_COUNT, BY_SUM };

template <Measure MEASURE>
inline double measured(Amount amount) {
    return MEASURE == BY_COUNT ? (double)amount.count : amount.sum;
}

// Returns the largest t in (0, 1] such that the weights >= t reach `needed`; `low` (above 0) if those >= low do not.
// `buffer` has space for the list and LANES more, and may be the list itself. `guess` (0: none) is an estimate of t.
template <Measure MEASURE>
float threshold(List list, double needed, float low, float *buffer, float guess = 0) {
    uint32_t from = bits_of(low), to = bits_of(1.0f) + 1;  // t lies in [from, to)
    Amount upper = {0, 0};       // of the weights of the list >= to
    double outside = 0;          // count or sum of the weights above `to` that were removed from the list
    long inside = list.size;     // upper bound on the weights of the list in [from, to)
    uint32_t probe = to - 1;     // one weight is often enough
    long lower_count = list.size;
    if (uint32_t below = bits_of(guess * BELOW_GUESS); below > from) probe = below;
    while (to > from + 1 && inside > SHORT_LIST) {
        Amount amount = amount_from(list, float_of(probe));
        if (outside + measured<MEASURE>(amount) >= needed)
            from = probe, lower_count = amount.count;
        else
            to = probe, upper = amount;
        inside = lower_count - upper.count;
        if (inside <= list.size / 4) {
            inside = copy_between(list, float_of(from), float_of(to), buffer);
            outside += measured<MEASURE>(upper);
            list = {buffer, padded(inside, LANES)};
            lower_count = inside, upper = {0, 0};
        }
        probe = from + (to - from) / 2;
        if (guess > 0) {
            uint32_t above = bits_of(guess * ABOVE_GUESS);
            if (above > from && above < to) probe = above;
            guess = 0;
        }
    }
    if (to <= from + 1) return float_of(from);
    long count = copy_between(list, float_of(from), float_of(to), buffer);
    sort_descending(buffer, count);
    double reached = outside + measured<MEASURE>(upper);
    for (long i = 0; i < count; i++) {
        reached += MEASURE == BY_COUNT ? 1 : (double)buffer[i];
        if (reached >= needed) return buffer[i];
    }
    return float_of(from);
}

}  // namespace
