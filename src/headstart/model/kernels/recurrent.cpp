// Layers with a recurrent state: gated delta net, Mamba-2, short convolution; and the gate of an attention's output.
//
// A state advances token after token, each of its numbers with one order of operations, so it depends neither on chunks
// nor on batch and threads. Columns of a head's matrix do not depend on each other: a part of them stays in the L1 cache
// while all tokens of a chunk pass. Numbers are rounded to Element where torch's operators round.
#include <stdlib.h>

#include "lanes.h"

namespace {

constexpr long VECS = 4, COLUMNS = VECS * LANES;  // of a matrix that are advanced together
constexpr long CHANNELS = 128;                    // of a convolution that are one piece of work
constexpr long MANY = 1 << 15;                    // updated numbers, below which one thread is as fast
constexpr float EPSILON = 1e-6f;                  // of the norm of queries and keys

struct Save {  // mirrored by recurrence.py: a copy of the state behind the first `at` tokens of a chunk
    long at;
    float *state;
};

struct Chunk {  // mirrored by recurrence.py
    long begin, end;  // the chunk's rows of the step
    float *state;     // of its request, all layers
    const Save *saves;
    long num_saves;  // in ascending order
};

struct Convolution {  // mirrored by recurrence.py
    const float *weight, *bias;  // [taps, channels], the oldest token first; [channels] or null
    long offset;                 // where the layer's part of a state begins: [taps - 1, channels] first
    long taps, channels;
};

struct Matrices {  // mirrored by recurrence.py: a gated delta net, or Mamba-2 if there is a skip
    Convolution convolution;
    void *rows;  // [count, width], changed: queries, keys, values; gate; strength, of a delta net alone; rate
    void *out;   // [count, values]
    const float *rate, *rate_bias;  // [heads]
    const float *skip;              // [heads] or null
    const void *norm;               // [value_dim], of Mamba-2 [values], of the rows' type
    long count, key_heads, heads, key_dim, value_dim;
    float eps;
    int is_bf16, threads;

    long keys() const { return key_heads * key_dim; }
    long values() const { return heads * value_dim; }
    long rates() const { return convolution.channels + values() + (skip ? 0 : heads); }
    long width() const { return rates() + heads; }
    long num_factors() const { return 2 * key_heads + 2 * heads; }
};

struct ShortConvolution {  // mirrored by recurrence.py: C * convolution(B * x)
    Convolution convolution;
    const void *rows;  // [count, 3 channels] of B, C and x
    void *out;         // [count, channels]
    int is_bf16, threads;
};

struct Gate {  // mirrored by recurrence.py: rows times the sigmoid of gates
    void *rows;          // [count, size], changed
    const void *gates;   // [count, size], its rows `stride` numbers apart
    long count, size, stride;
    int is_bf16, threads;
};

struct Memory {  // of some numbers, of any content
    float *at;
    explicit Memory(long count) : at((float *)aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)) {}
    ~Memory() { free(at); }
};

inline long least(long a, long b) { return a < b ? a : b; }

template <class Element>
inline vec as_stored(vec x) {
    return widened(As<Element>::stored(x));
}

// The first `count` of LANES numbers, and zeros behind them.
template <class Element>
inline vec some(const Element *from, long count) {
    if (count >= LANES) return widened(load(from));
    Element lanes[LANES] = {};
    memcpy(lanes, from, count * sizeof(Element));
    return widened(load(lanes));
}

template <class Element>
inline void put(Element *to, vec x, long count) {
    if (count >= LANES) return store(to, As<Element>::stored(x));
    Element lanes[LANES];
    store(lanes, As<Element>::stored(x));
    memcpy(to, lanes, count * sizeof(Element));
}

inline vec sigmoid(vec x) { return quotient(all(1.0f), add(all(1.0f), exponential(sub(all(0.0f), x)))); }

// Convolves channels [first, last) of a chunk. `read(row, channel, count)` gives inputs, `write` takes the sums.
template <class Read, class Write>
inline void convolve(const Convolution &conv, const Chunk &chunk, long first, long last, Read read, Write write) {
    long kept = conv.taps - 1, width = conv.channels;
    float *state = chunk.state + conv.offset;
    const Save *save = chunk.saves, *end = save + chunk.num_saves;
    for (long row = chunk.begin; row < chunk.end; row++) {
        for (long c = first; c < last; c += LANES) {
            long count = last - c;
            vec input = read(row, c, count), sum = conv.bias ? some(conv.bias + c, count) : all(0.0f);
            for (long tap = 0; tap < kept; tap++) {
                float *at = state + tap * width + c;
                sum = fma(some(at, count), some(conv.weight + tap * width + c, count), sum);
                put(at, tap + 1 < kept ? some(at + width, count) : input, count);
            }
            write(row, c, count, fma(input, some(conv.weight + kept * width + c, count), sum));
        }
        for (; save < end && save->at == row + 1 - chunk.begin; save++)
            for (long tap = 0; tap < kept; tap++)
                memcpy(save->state + conv.offset + tap * width + first, state + tap * width + first,
                       (last - first) * sizeof(float));
    }
}

template <class Element>
void short_convolution(const ShortConvolution &layer, const Chunk *chunks, long num_chunks) {
    const Convolution &conv = layer.convolution;
    const Element *rows = (const Element *)layer.rows;
    Element *out = (Element *)layer.out;
    long pieces = (conv.channels + CHANNELS - 1) / CHANNELS, width = conv.channels;
    bool many = (num_chunks ? chunks[num_chunks - 1].end : 0) * width >= MANY;
#pragma omp parallel for collapse(2) num_threads(layer.threads) schedule(dynamic, 1) if (many)
    for (long chunk = 0; chunk < num_chunks; chunk++)
        for (long piece = 0; piece < pieces; piece++)
            convolve(
                conv, chunks[chunk], piece * CHANNELS, least((piece + 1) * CHANNELS, width),
                [=](long row, long c, long count) {
                    const Element *before = rows + row * 3 * width + c;
                    return as_stored<Element>(mul(some(before, count), some(before + 2 * width, count)));
                },
                [=](long row, long c, long count, vec sum) {
                    vec after = some(rows + row * 3 * width + width + c, count);
                    put(out + row * width + c, mul(after, as_stored<Element>(sum)), count);
                });
}

// Returns 1 / |x| for x [size].
template <class Element>
inline float inverse_length(const Element *x, long size) {
    vec sum = all(0.0f);
    for (long i = 0; i < size; i += LANES) {
        vec part = some(x + i, size - i);
        sum = fma(part, part, sum);
    }
    return 1.0f / sqrtf(sum_of(sum) + EPSILON);
}

// Sets a token's factors: of its queries, of its keys, the decay of each head's matrix and the strength of its change.
// Mamba-2 takes queries and keys as they are.
template <class Element>
inline void set_factors(const Matrices &layer, const Element *row, float *factors) {
    float scale = 1.0f / sqrtf((float)layer.key_dim);
    for (long head = 0; head < layer.key_heads; head++) {
        if (layer.skip) {
            factors[head] = factors[layer.key_heads + head] = 1.0f;
            continue;
        }
        const Element *query = row + head * layer.key_dim;
        factors[head] = inverse_length(query, layer.key_dim) * scale;
        factors[layer.key_heads + head] = inverse_length(query + layer.keys(), layer.key_dim);
    }
    const Element *strength = row + layer.convolution.channels + layer.values(), *rate = row + layer.rates();
    float *decay = factors + 2 * layer.key_heads;
    for (long head = 0; head < layer.heads; head++) {
        float x = to_float(rate[head]) + layer.rate_bias[head];
        float softplus = (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x)));
        decay[head] = expf(layer.rate[head] * softplus);
        decay[layer.heads + head] = layer.skip ? softplus : 1.0f / (1.0f + expf(-to_float(strength[head])));
    }
}

template <class Element>
inline void scale_into(float *to, const Element *from, long size, float factor) {
    for (long i = 0; i < size; i += LANES) store(to + i, mul(some(from + i, size - i), all(factor)));
}

// Rows of a part of a matrix in scratch memory: key_dim, and zeros to a whole vector.
inline long padded(long key_dim) { return (key_dim + LANES - 1) / LANES * LANES; }

// Advances columns [column, column + COLUMNS) of a head's matrix over a chunk, and writes the outputs of its tokens.
template <class Element, bool IS_DELTA>
void advance(const Matrices &layer, const float *all_factors, const Chunk &chunk, long head, long column,
             float *scratch) {
    long dim = layer.key_dim, rows = padded(dim), wide = layer.value_dim, count = least(COLUMNS, wide - column);
    long key_head = head / (layer.heads / layer.key_heads);
    const Convolution &conv = layer.convolution;
    long part = conv.offset + (conv.taps - 1) * conv.channels + head * dim * wide + column;
    float *memory = scratch, *query = memory + rows * COLUMNS, *key = query + rows;
    auto copy_to = [&](float *state) {
        for (long i = 0; i < dim; i++) memcpy(state + i * wide, memory + i * COLUMNS, count * sizeof(float));
    };
    memset(memory, 0, rows * COLUMNS * sizeof(float));
    for (long i = 0; i < dim; i++)
        memcpy(memory + i * COLUMNS, chunk.state + part + i * wide, count * sizeof(float));
    const Save *save = chunk.saves, *end = save + chunk.num_saves;
    for (long at = chunk.begin; at < chunk.end; at++) {
        const Element *row = (const Element *)layer.rows + at * layer.width();
        const float *factors = all_factors + at * layer.num_factors(), *decays = factors + 2 * layer.key_heads;
        scale_into(query, row + key_head * dim, dim, factors[key_head]);
        scale_into(key, row + layer.keys() + key_head * dim, dim, factors[layer.key_heads + key_head]);
        vec even[VECS], odd[VECS], seen[VECS], change[VECS];
        vec decay = all(decays[head]), strength = all(decays[layer.heads + head]);
        for (long v = 0; v < VECS; v++) even[v] = odd[v] = all(0.0f);
        for (long i = 0; IS_DELTA && i < rows; i += 2) {
            const float *from = memory + i * COLUMNS;
            vec first = all(key[i]), second = all(key[i + 1]);
            for (long v = 0; v < VECS; v++) {
                even[v] = fma(first, load(from + v * LANES), even[v]);
                odd[v] = fma(second, load(from + COLUMNS + v * LANES), odd[v]);
            }
        }
        const Element *value = row + 2 * layer.keys() + head * wide + column;
        for (long v = 0; v < VECS; v++) {
            seen[v] = v * LANES < count ? some(value + v * LANES, count - v * LANES) : all(0.0f);
            change[v] = mul(strength, IS_DELTA ? sub(seen[v], mul(decay, add(even[v], odd[v]))) : seen[v]);
            even[v] = odd[v] = all(0.0f);
        }
        for (long i = 0; i < rows; i += 2) {
            float *to = memory + i * COLUMNS;
            for (long v = 0; v < VECS; v++) {
                vec first = fma(all(key[i]), change[v], mul(decay, load(to + v * LANES)));
                vec second = fma(all(key[i + 1]), change[v], mul(decay, load(to + COLUMNS + v * LANES)));
                store(to + v * LANES, first), store(to + COLUMNS + v * LANES, second);
                even[v] = fma(all(query[i]), first, even[v]), odd[v] = fma(all(query[i + 1]), second, odd[v]);
            }
        }
        Element *out = (Element *)layer.out + at * layer.values() + head * wide + column;
        for (long v = 0; v * LANES < count; v++) {
            vec sum = add(even[v], odd[v]);
            put(out + v * LANES, IS_DELTA ? sum : fma(all(layer.skip[head]), seen[v], sum), count - v * LANES);
        }
        for (; save < end && save->at == at + 1 - chunk.begin; save++) copy_to(save->state + part);
    }
    copy_to(chunk.state + part);
}

// norm(x) * silu(gate) for the outputs x of one head, of Mamba-2 norm(x * silu(gate)) of one group, in place.
template <class Element>
inline void norm_and_gate(const Matrices &layer, Element *x, const Element *gate, const Element *norm, long size) {
    auto silu = [=](long i) {
        vec g = some(gate + i, size - i);
        return mul(g, sigmoid(g));
    };
    auto value = [=](long i) { return layer.skip ? mul(some(x + i, size - i), silu(i)) : some(x + i, size - i); };
    vec sum = all(0.0f);
    for (long i = 0; i < size; i += LANES) sum = fma(value(i), value(i), sum);
    vec factor = all(1.0f / sqrtf(sum_of(sum) / (float)size + layer.eps));
    for (long i = 0; i < size; i += LANES) {
        vec normed = mul(value(i), factor), weight = some(norm + i, size - i);
        if (layer.skip) normed = mul(as_stored<Element>(normed), weight);
        else normed = mul(as_stored<Element>(mul(normed, weight)), silu(i));
        put(x + i, normed, size - i);
    }
}

template <class Element>
void matrix_mixer(const Matrices &layer, const Chunk *chunks, long num_chunks) {
    const Convolution &conv = layer.convolution;
    Element *rows = (Element *)layer.rows, *out = (Element *)layer.out;
    long pieces = (conv.channels + CHANNELS - 1) / CHANNELS, parts = (layer.value_dim + COLUMNS - 1) / COLUMNS;
    long width = layer.width(), heads = layer.heads;
    Memory factors(layer.count * layer.num_factors());  // [count, 2 key heads + 2 heads]
#pragma omp parallel num_threads(layer.threads) if (layer.count * layer.values() * layer.key_dim >= MANY)
    {
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (long chunk = 0; chunk < num_chunks; chunk++)
            for (long piece = 0; piece < pieces; piece++)
                convolve(
                    conv, chunks[chunk], piece * CHANNELS, least((piece + 1) * CHANNELS, conv.channels),
                    [=](long row, long c, long count) { return some(rows + row * width + c, count); },
                    [=](long row, long c, long count, vec sum) {
                        sum = as_stored<Element>(sum);
                        put(rows + row * width + c, mul(sum, sigmoid(sum)), count);
                    });
#pragma omp for schedule(static)
        for (long row = 0; row < layer.count; row++)
            set_factors(layer, rows + row * width, factors.at + row * layer.num_factors());
        Memory scratch(padded(layer.key_dim) * (COLUMNS + 2));
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (long chunk = 0; chunk < num_chunks; chunk++)
            for (long task = 0; task < heads * parts; task++)
                (layer.skip ? advance<Element, false> : advance<Element, true>)(
                    layer, factors.at, chunks[chunk], task / parts, task % parts * COLUMNS, scratch.at);
        long groups = layer.skip ? layer.key_heads : heads, size = layer.values() / groups;
#pragma omp for collapse(2) schedule(static)
        for (long row = 0; row < layer.count; row++)
            for (long group = 0; group < groups; group++)
                norm_and_gate(layer, out + row * layer.values() + group * size,
                              rows + row * width + conv.channels + group * size,
                              (const Element *)layer.norm + (layer.skip ? group * size : 0), size);
    }
}

template <class Element>
void gate_rows(const Gate &gate) {
    long size = gate.size;
#pragma omp parallel for num_threads(gate.threads) if (gate.count * size >= MANY)
    for (long row = 0; row < gate.count; row++) {
        Element *to = (Element *)gate.rows + row * size;
        const Element *gates = (const Element *)gate.gates + row * gate.stride;
        for (long i = 0; i < size; i += LANES) {
            vec open = as_stored<Element>(sigmoid(some(gates + i, size - i)));
            put(to + i, mul(some(to + i, size - i), open), size - i);
        }
    }
}

}  // namespace

// ---- exported ---------------------------------------------------------------------------------------------------------

// A gated delta net or Mamba-2 from the product before it to the one behind it; advances the states of all chunks.
EXPORT void headstart_matrices(const Matrices *layer, const Chunk *chunks, long num_chunks) {
    if (layer->is_bf16) matrix_mixer<bf16>(*layer, chunks, num_chunks);
    else matrix_mixer<float>(*layer, chunks, num_chunks);
}

// A short convolution; advances the states of all chunks.
EXPORT void headstart_short_convolution(const ShortConvolution *layer, const Chunk *chunks, long num_chunks) {
    if (layer->is_bf16) short_convolution<bf16>(*layer, chunks, num_chunks);
    else short_convolution<float>(*layer, chunks, num_chunks);
}

EXPORT void headstart_gate(const Gate *gate) {
    if (gate->is_bf16) gate_rows<bf16>(*gate);
    else gate_rows<float>(*gate);
}
