// The parts of a step besides products and attention: embedding lookup, the loop over layers, checks of the results.
//
// The whole stack of layers is one call: there is no Python between two parallel regions, so the threads of one region
// are still awake when the next begins.
#include "attention.h"
#include "greatest.h"
#include "look_up.h"

// of linear.cpp and attention.cpp
EXPORT void headstart_chain(const void *links, int num_links, void *const *buffers, const bf16 *cosine,
                            const bf16 *sine, char *scratch, long count, int threads);
EXPORT void headstart_attention(const AttentionCall *call);

namespace {

constexpr long MANY_ROWS = 64, MANY_LOGITS = 1 << 17;  // below these, one thread finishes before a second one wakes

struct Part {  // mirrored by stack.py: the chain between two attentions
    const void *links;
    long num_links;
};

struct Stack {  // mirrored by stack.py
    const Part *parts;                       // [num_layers + 1]
    const AttentionCall *const *attentions;  // [num_layers], with the pages of layer 0
    void *const *buffers;
    bf16 *stream;                    // [count, hidden]: one of the buffers
    const bf16 *embedding;           // [vocab, hidden], or null
    const Linear *packed;            // the same as a packed weight, or null
    const bf16 *cosines, *sines;     // [positions, angles]
    bf16 *cosine, *sine;             // [count, angles], filled here
    const int64_t *token_ids, *positions;  // [count]
    char *scratch;
    long count, hidden, vocab, angles, num_positions;
    long layer_bytes;  // of the pool: distance from one layer's keys to the next layer's
    int num_layers, threads;
};

void look_up(const Stack &stack) {
    long row_bytes = stack.hidden * sizeof(bf16), angle_bytes = stack.angles * sizeof(bf16);
#pragma omp parallel for num_threads(stack.threads) if (stack.count >= MANY_ROWS)
    for (long row = 0; row < stack.count; row++) {
        bf16 *to = stack.stream + row * stack.hidden;
        long token = (long)stack.token_ids[row];
        if (stack.packed) look_up_row(*stack.packed, token, to);
        else memcpy(to, stack.embedding + token * stack.hidden, row_bytes);
        memcpy(stack.cosine + row * stack.angles, stack.cosines + stack.positions[row] * stack.angles, angle_bytes);
        memcpy(stack.sine + row * stack.angles, stack.sines + stack.positions[row] * stack.angles, angle_bytes);
    }
}

// Returns whether any number of a row is not finite: then 0 times the number is not 0.
bool poisoned(const bf16 *row, long width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < width; i++) sum += to_float(row[i]) * 0.0f;
    return sum != 0;
}

template <class Key>
void greatest_of(const Key *rows, long count, long size, int64_t *ids, float *values, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (count > 1 && count * size >= MANY_LOGITS)
    for (long row = 0; row < count; row++) ids[row] = greatest(rows + row * size, size, values + row);
}

}  // namespace

// ---- exported ---------------------------------------------------------------------------------------------------------

// Looks up tokens and angles and runs all layers; leaves the residual stream in its buffer. Returns 0, without any
// change, if a token or a position is outside its table.
EXPORT int headstart_stack(const Stack *stack) {
    for (long row = 0; row < stack->count; row++) {
        if (stack->token_ids[row] < 0 || stack->token_ids[row] >= stack->vocab) return 0;
        if (stack->positions[row] < 0 || stack->positions[row] >= stack->num_positions) return 0;
    }
    look_up(*stack);
    for (int layer = 0; layer <= stack->num_layers; layer++) {
        const Part &part = stack->parts[layer];
        headstart_chain(part.links, (int)part.num_links, stack->buffers, stack->cosine, stack->sine, stack->scratch,
                        stack->count, stack->threads);
        if (layer == stack->num_layers) break;
        AttentionCall call = *stack->attentions[layer];
        call.key_pages = (char *)call.key_pages + layer * stack->layer_bytes;
        call.value_pages = (char *)call.value_pages + layer * stack->layer_bytes;
        headstart_attention(&call);
    }
    return 1;
}

// Sets `finite` for each of `num_chunks` runs of rows [indptr[i], indptr[i + 1]): whether all its numbers are finite.
EXPORT void headstart_finite(const bf16 *rows, long width, const int32_t *indptr, long num_chunks, uint8_t *finite) {
    for (long chunk = 0; chunk < num_chunks; chunk++) {
        bool bad = false;
        for (long row = indptr[chunk]; row < indptr[chunk + 1] && !bad; row++) bad = poisoned(rows + row * width, width);
        finite[chunk] = !bad;
    }
}

// Finds the greatest number of each of `count` rows of `size`, bf16 or fp32, and its first index; NaN if a row has one.
EXPORT void headstart_greatest(const void *rows, int is_bf16, long count, long size, int64_t *ids, float *values,
                               int threads) {
    if (is_bf16)
        greatest_of((const int16_t *)rows, count, size, ids, values, threads);
    else
        greatest_of((const int32_t *)rows, count, size, ids, values, threads);
}
