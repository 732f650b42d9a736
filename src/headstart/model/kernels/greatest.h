// The greatest number of a row. Floats are mapped to integers of the same order, which are compared.
#pragma once

#include "common.h"

namespace {

template <class Key>  // an integer as wide as the float
struct Order {
    static constexpr Key SIGN = (Key)(sizeof(Key) == 2 ? 0x8000u : 0x80000000u), REST = (Key)~SIGN;
    static constexpr Key INFINITE = (Key)(sizeof(Key) == 2 ? 0x7f80u : 0x7f800000u);
    // All bits but the sign of negative floats are inverted, so that keys increase with the floats. -0 is just below 0.
    static Key of(Key bits) { return bits ^ (Key)((bits >> (8 * sizeof(Key) - 1)) & REST); }
    static bool is_nan(Key key) { return key > INFINITE || key < (Key)(INFINITE ^ SIGN ^ REST); }
};

template <class Key>
float to_number(Key bits) {
    if constexpr (sizeof(Key) == 2) return to_float((bf16)bits);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Returns the first index of the greatest number of `row` and sets `value` to it; NaN if the row contains a NaN.
template <class Key>
int64_t greatest(const Key *row, long size, float *value) {
    typedef Order<Key> Order;
    constexpr long BLOCK = 1024;
    Key most = Order::SIGN, least = Order::REST;
    long at = 0;
    for (long begin = 0; begin < size; begin += BLOCK) {
        long end = begin + BLOCK < size ? begin + BLOCK : size;
        Key high = Order::SIGN, low = Order::REST;
#pragma omp simd reduction(max : high) reduction(min : low)
        for (long i = begin; i < end; i++) {
            Key key = Order::of(row[i]);
            key = key == (Key)-1 ? (Key)0 : key;  // -0 counts as 0
            high = key > high ? key : high;
            low = key < low ? key : low;
        }
        if (high > most) most = high, at = begin;
        if (low < least) least = low;
    }
    if (Order::is_nan(most) || Order::is_nan(least)) {
        *value = NAN;
        return 0;
    }
    while (Order::of(row[at]) != most && !(most == 0 && Order::of(row[at]) == (Key)-1)) at++;
    *value = to_number(row[at]);
    return at;
}

}  // namespace
