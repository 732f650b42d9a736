// Operations on single rows between two matrix products: normalisation and the rotary embedding. Plain loops, which the
// compiler vectorises for each instruction set; numbers are rounded to bf16 where torch's operators round.
#pragma once
#include "common.h"

// 1 / sqrt(mean(x^2) + eps) of x [size].
template <class Element>
static inline float inverse_rms(const Element *x, long size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < size; i++) sum += to_float(x[i]) * to_float(x[i]);
    return 1.0f / sqrtf(sum / (float)size + eps);
}

// ---- queries and keys between their projection and attention ----------------------------------------------------------

struct Heads {  // mirrored by library.py; a row is [heads, head_dim]: queries, then keys, then values
    const bf16 *query_norm, *key_norm;  // [head_dim], or null
    float query_eps, key_eps;
    long heads, queries, keys, head_dim, rotary_dim;
};

static inline void normalise(bf16 *head, const bf16 *weight, long size, float eps) {
    float factor = inverse_rms(head, size, eps);
#pragma omp simd
    for (long i = 0; i < size; i++) head[i] = to_bf16(to_float(head[i]) * factor * to_float(weight[i]));
}

// Rotates the pairs (i, i + half) of a head; products are rounded before the sum, as in Rotary.apply.
static inline void turn(bf16 *head, const bf16 *cosine, const bf16 *sine, long half) {
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float first = to_float(head[i]), second = to_float(head[half + i]);
        float c = to_float(cosine[i]), s = to_float(sine[i]);
        head[i] = to_bf16(to_float(to_bf16(first * c)) - second * s);
        head[half + i] = to_bf16(to_float(to_bf16(second * c)) + first * s);
    }
}

// Normalises (Qwen3) and rotates the queries and keys of one row of `rows` [count, heads, head_dim] in place. Each row
// of cosine and sine [count, 2, rotary_dim / 2] has two equal halves, except that the first half of sine is negated:
// this function reads the second half of sine.
static inline void turn_heads(const Heads &heads, bf16 *rows, const bf16 *cosine, const bf16 *sine, long row) {
    long half = heads.rotary_dim / 2;
    for (long h = 0; h < heads.queries + heads.keys; h++) {
        bf16 *head = rows + (row * heads.heads + h) * heads.head_dim;
        bool query = h < heads.queries;
        const bf16 *norm = query ? heads.query_norm : heads.key_norm;
        if (norm) normalise(head, norm, heads.head_dim, query ? heads.query_eps : heads.key_eps);
        turn(head, cosine + row * 2 * half, sine + row * 2 * half + half, half);
    }
}
