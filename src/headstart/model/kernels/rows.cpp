// Queries and keys between their projection and attention: each head RMS-normalised (Qwen3), then turned to its position.
#include "rows.h"

namespace {

struct Heads {  // mirrored by load.py; a row is [heads, head_dim]: queries, then keys, then values
    const bf16 *query_norm, *key_norm;  // [head_dim], or null
    float query_eps, key_eps;
    long heads, queries, keys, head_dim, rotary_dim;
};

void normalise(bf16 *head, const bf16 *weight, long size, float eps) {
    float factor = inverse_rms(head, size, eps);
#pragma omp simd
    for (long i = 0; i < size; i++) head[i] = to_bf16(to_float(head[i]) * factor * to_float(weight[i]));
}

// Turns the pairs (i, i + half) of a head; products are rounded before the sum, as in Rotary.turn.
void turn(bf16 *head, const bf16 *cosine, const bf16 *sine, long half) {
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float first = to_float(head[i]), second = to_float(head[half + i]);
        float c = to_float(cosine[i]), s = to_float(sine[i]);
        head[i] = to_bf16(to_float(to_bf16(first * c)) - second * s);
        head[half + i] = to_bf16(to_float(to_bf16(second * c)) + first * s);
    }
}

constexpr long MANY_ROWS = 16;  // fewer are not worth waking a thread

}  // namespace

// Changes `rows` [count, heads, head_dim] in place. cosine and sine [count, 2, rotary_dim / 2] repeat themselves, and
// the first half of a row's sine is negated: its second half is read.
EXPORT void headstart_rotate(const Heads *heads, bf16 *rows, const bf16 *cosine, const bf16 *sine, long count,
                             int threads) {
    long half = heads->rotary_dim / 2;
#pragma omp parallel for num_threads(threads) if (count >= MANY_ROWS)
    for (long row = 0; row < count; row++) {
        for (long h = 0; h < heads->queries + heads->keys; h++) {
            bf16 *head = rows + (row * heads->heads + h) * heads->head_dim;
            bool query = h < heads->queries;
            const bf16 *norm = query ? heads->query_norm : heads->key_norm;
            if (norm) normalise(head, norm, heads->head_dim, query ? heads->query_eps : heads->key_eps);
            turn(head, cosine + row * 2 * half, sine + row * 2 * half + half, half);
        }
    }
}
