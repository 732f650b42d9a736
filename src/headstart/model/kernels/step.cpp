// The parts of a step besides products and attention: embedding lookup, the loop over layers, checks of the results.
//
// The whole stack of layers is one call: there is no Python between two parallel regions, so the threads of one region
// are still awake when the next begins.
#include "attention.h"
#include "greatest.h"
#include "look_up.h"

// of linear.cpp, attention.cpp and recurrent.cpp
EXPORT void headstart_chain(const void *links, int num_links, void *const *buffers, const bf16 *cosine,
                            const bf16 *sine, char *scratch, long count, int threads);
EXPORT void headstart_attention(const AttentionCall *call);
EXPORT void headstart_short_convolution(const void *layer, const void *chunks, long num_chunks);
EXPORT void headstart_matrices(const void *layer, const void *chunks, long num_chunks);
EXPORT void headstart_gate(const void *gate);

namespace {

constexpr long MANY_ROWS = 64, MANY_LOGITS = 1 << 17;  // below these, one thread finishes before a second one wakes

enum Kind { PRODUCTS, ATTENTION, SHORT_CONVOLUTION, MATRICES, GATE };  // mirrored by stack.py

struct Part {  // mirrored by stack.py
    const void *call;  // the links of a chain of products, or the argument of the kernel
    long number;       // of links; of an attention that of its layer
    long kind;
};

struct Stack {  // mirrored by stack.py
    const Part *parts;  // [num_parts]
    void *const *buffers;
    bf16 *stream;                          // [count, hidden]: one of the buffers
    const bf16 *embedding;                 // [vocab, hidden], or null
    const Linear *packed;                  // the same as a packed weight, or null
    const bf16 *cosines, *sines;           // [positions, angles]
    bf16 *cosine, *sine;                   // [count, angles], filled here if there are token_ids
    const int64_t *token_ids, *positions;  // [count]; or null: the stream is filled
    char *scratch;
    const void *chunks;  // [num_chunks]: requests' parts of the rows and their states, for recurrent layers
    long count, hidden, vocab, angles, num_positions, num_chunks;
    const void *head;       // the links of the output head, if it follows, else null
    void *logits;           // [count, vocabulary]
    const int32_t *indptr;  // [num_rows + 1]: the runs of rows of which `finite` [num_rows] is set, with a head
    uint8_t *finite;
    long num_head_links, num_rows;
    long layer_bytes;  // from the pages of an attention's call, which are those of layer 0, to those of the next layer
    float scale;       // of embeddings
    int num_parts, threads;
};

struct Decode {  // mirrored by step_inputs.py: a chunk of one token
    const int32_t *token, *table;
    int64_t start, write_from, num_blocks;
};

struct Bounds {  // mirrored by step_inputs.py
    int64_t num_blocks, block_size, vocab, max_positions;
};

void look_up(const Stack &stack) {
    long row_bytes = stack.hidden * sizeof(bf16), angle_bytes = stack.angles * sizeof(bf16);
#pragma omp parallel for num_threads(stack.threads) if (stack.count >= MANY_ROWS)
    for (long row = 0; row < stack.count; row++) {
        bf16 *to = stack.stream + row * stack.hidden;
        long token = (long)stack.token_ids[row];
        if (stack.packed) look_up_row(*stack.packed, token, to);
        else memcpy(to, stack.embedding + token * stack.hidden, row_bytes);
        for (long i = 0; stack.scale != 1.0f && i < stack.hidden; i++) to[i] = to_bf16(to_float(to[i]) * stack.scale);
        memcpy(stack.cosine + row * stack.angles, stack.cosines + stack.positions[row] * stack.angles, angle_bytes);
        memcpy(stack.sine + row * stack.angles, stack.sines + stack.positions[row] * stack.angles, angle_bytes);
    }
}

void run(const Stack &stack, const Part &part) {
    switch (part.kind) {
        case PRODUCTS:
            return headstart_chain(part.call, (int)part.number, stack.buffers, stack.cosine, stack.sine, stack.scratch,
                                   stack.count, stack.threads);
        case ATTENTION: {
            AttentionCall call = *(const AttentionCall *)part.call;
            call.key_pages = (char *)call.key_pages + part.number * stack.layer_bytes;
            call.value_pages = (char *)call.value_pages + part.number * stack.layer_bytes;
            return headstart_attention(&call);
        }
        case SHORT_CONVOLUTION: return headstart_short_convolution(part.call, stack.chunks, stack.num_chunks);
        case MATRICES: return headstart_matrices(part.call, stack.chunks, stack.num_chunks);
        case GATE: return headstart_gate(part.call);
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

// Packs chunks of one token that is written. `wide` [3, count]: tokens, positions, slots; `narrow`: starts [count],
// qo_indptr and kv_indptr [count + 1], [count] pairs of token and slot, and the blocks up to each position. Returns 0 if
// a chunk is out of bounds.
EXPORT int headstart_pack_decodes(const Decode *chunks, long count, const Bounds *bounds, int64_t *wide,
                                  int32_t *narrow) {
    int32_t *starts = narrow, *qo_indptr = starts + count, *kv_indptr = qo_indptr + count + 1;
    int32_t *writes = kv_indptr + count + 1, *blocks = writes + 2 * count;
    qo_indptr[0] = kv_indptr[0] = 0;
    for (long i = 0; i < count; i++) {
        const Decode &chunk = chunks[i];
        int64_t page = chunk.start / bounds->block_size;
        if (*chunk.token < 0 || *chunk.token >= bounds->vocab || page >= chunk.num_blocks) return 0;
        if (chunk.start < 0 || chunk.start >= bounds->max_positions || chunk.start < chunk.write_from) return 0;
        for (int64_t b = 0; b <= page; b++) {
            if (chunk.table[b] < 1 || chunk.table[b] >= bounds->num_blocks) return 0;
            *blocks++ = chunk.table[b];
        }
        wide[i] = *chunk.token, wide[count + i] = starts[i] = (int32_t)chunk.start;
        wide[2 * count + i] = chunk.table[page] * bounds->block_size + chunk.start % bounds->block_size;
        writes[2 * i] = (int32_t)i, writes[2 * i + 1] = (int32_t)wide[2 * count + i];
        qo_indptr[i + 1] = (int32_t)(i + 1), kv_indptr[i + 1] = (int32_t)(blocks - writes - 2 * count);
    }
    return 1;
}

// Sets `finite` for each of `num_chunks` runs of rows [indptr[i], indptr[i + 1]): whether all its numbers are finite.
EXPORT void headstart_finite(const bf16 *rows, long width, const int32_t *indptr, long num_chunks, uint8_t *finite) {
    for (long chunk = 0; chunk < num_chunks; chunk++) {
        bool bad = false;
        for (long row = indptr[chunk]; row < indptr[chunk + 1] && !bad; row++)
            bad = poisoned(rows + row * width, width);
        finite[chunk] = !bad;
    }
}

// Looks up tokens and angles, if there are any, and runs all parts and the head, if there is one; leaves the residual
// stream in its buffer. Returns 0, without any change, if a token or a position is outside its table.
EXPORT int headstart_stack(const Stack *stack) {
    for (long row = 0; stack->token_ids && row < stack->count; row++) {
        if (stack->token_ids[row] < 0 || stack->token_ids[row] >= stack->vocab) return 0;
        if (stack->positions[row] < 0 || stack->positions[row] >= stack->num_positions) return 0;
    }
    if (stack->token_ids) look_up(*stack);
    for (int i = 0; i < stack->num_parts; i++) run(*stack, stack->parts[i]);
    if (stack->head) {
        void *const ends[] = {stack->stream, stack->logits};
        headstart_chain(stack->head, (int)stack->num_head_links, ends, nullptr, nullptr, stack->scratch, stack->count,
                        stack->threads);
        headstart_finite(stack->stream, stack->hidden, stack->indptr, stack->num_rows, stack->finite);
    }
    return 1;
}

// Finds the greatest number of each of `count` rows of `size`, bf16 or fp32, and its first index; NaN if a row has one.
EXPORT void headstart_greatest(const void *rows, int is_bf16, long count, long size, int64_t *ids, float *values,
                               int threads) {
    if (is_bf16)
        greatest_of((const int16_t *)rows, count, size, ids, values, threads);
    else
        greatest_of((const int32_t *)rows, count, size, ids, values, threads);
}
