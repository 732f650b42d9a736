// Log-probabilities: the greatest logits of a row, and the log-probability of a logit.
#pragma once

#include "logits.h"

namespace {

constexpr float LEAST_LOGPROB = -9999;  // JSON has no -inf

inline float logprob_of(float x, float best, double log_total) {
    double logprob = (double)x - best - log_total;
    return logprob > LEAST_LOGPROB ? (float)logprob : LEAST_LOGPROB;
}

struct Heap {  // the best logits of a row so far: a binary heap with the lowest of them on top
    int64_t *ids;
    float *values;
    long count;
    bool worse(long a, long b) const {
        return values[a] < values[b] || (values[a] == values[b] && ids[a] > ids[b]);
    }
    void swap(long a, long b) {
        int64_t id = ids[a];
        float value = values[a];
        ids[a] = ids[b], values[a] = values[b], ids[b] = id, values[b] = value;
    }
    void rise(long at) {
        for (; at > 0 && worse(at, (at - 1) / 2); at = (at - 1) / 2) swap(at, (at - 1) / 2);
    }
    void sink(long at) {
        for (long child; (child = 2 * at + 1) < count; at = child) {
            if (child + 1 < count && worse(child + 1, child)) child++;
            if (!worse(child, at)) return;
            swap(child, at);
        }
    }
};

// Finds the `num` greatest logits, greatest first; equal ones by ascending id.
template <class Logit>
void best_of(const Logit *x, long size, long num, int64_t *ids, float *values) {
    if (num == 0) return;
    Heap heap = {ids, values, 0};
    for (long begin = 0; begin < size; begin += PIECE) {
        long end = begin + PIECE < size ? begin + PIECE : size;
        if (heap.count == num && block_greatest(x + begin, end - begin) <= values[0]) continue;
        for (long i = begin; i < end; i++) {
            float value = one_float(x[i]);
            if (heap.count < num) {
                ids[heap.count] = i, values[heap.count] = value;
                heap.rise(heap.count++);
            } else if (value > values[0]) {
                ids[0] = i, values[0] = value;
                heap.sink(0);
            }
        }
    }
    while (heap.count > 1) {  // the lowest goes to the end
        heap.swap(0, --heap.count);
        heap.sink(0);
    }
}

}  // namespace
