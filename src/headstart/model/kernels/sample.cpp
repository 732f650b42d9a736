// Sampling: from logits to tokens and log-probabilities. One thread computes a whole row, so the result does not depend
// on other rows or on the number of threads. The reference in torch is model/sampling/draw.py, with
// model/sampling/logit_edits.py.
#include "logprobs.h"
#include "sample.h"
#include "threshold.h"

namespace {

constexpr long MANY_LOGITS = 1 << 15;   // below, one thread finishes before a second one wakes
constexpr float LEAST_EXPONENT = -87;   // e^x of less is 0
constexpr float LEAST_WEIGHT = 1e-38f;  // less than every weight above 0
constexpr float FLOAT_MAX = 3.40282347e38f;

struct Scratch {  // of one thread
    float *weights;       // [padded(size, BLOCK)]
    float *buffer;        // [padded(size, BLOCK) + LANES]
    float *block_max;     // [number of blocks, padded]: of weights
    double *block_sums;   // [number of blocks]: of weights
    static long blocks(long size) { return padded(padded(size, BLOCK) / BLOCK, LANES); }
    static long bytes(long size) {
        return padded((2 * padded(size, BLOCK) + LANES + blocks(size)) * 4 + blocks(size) * 8, 64);
    }
    Scratch(char *memory, long size) {
        long count = padded(size, BLOCK);
        block_sums = (double *)memory;
        weights = (float *)(block_sums + blocks(size));
        buffer = weights + count;
        block_max = buffer + count + LANES;
    }
};

// ---- weights ----------------------------------------------------------------------------------------------------------

inline vec weight_of(vec x, vec best, vec temperature, bool is_tempered) {
    vec exponent = sub(x, best);
    if (is_tempered) exponent = quotient(exponent, temperature);
    // 0 where the exponent is too low. The exponent is compared, so that -inf and rounding need no special case.
    return kept_where(exponential(exponent), exponent, all(LEAST_EXPONENT));
}

// Writes e^((x - best) / temperature) of all logits of a row to `scratch.weights`, padded with zeros, with the sum and
// the maximum of each BLOCK. Returns the sum. The weight of the best logit is 1.
template <class Logit>
double weigh(const Logit *x, long size, float best, float temperature, const Scratch &scratch) {
    bool is_tempered = temperature != 1;
    vec high = all(best), divisor = all(temperature);
    double total = 0;
    long count = padded(size, BLOCK) / BLOCK;
    for (long block = 0; block < count; block++) {
        const Logit *in = x + block * BLOCK;
        float *out = scratch.weights + block * BLOCK;
        Logit last[BLOCK];
        if (long left = size - block * BLOCK; left < BLOCK) {
            for (long i = 0; i < BLOCK; i++) last[i] = i < left ? in[i] : minus_infinity(in);
            in = last;
        }
        vec even = all(0), odd = all(0), most = all(0);
        for (long i = 0; i < BLOCK; i += 2 * LANES) {
            vec first = weight_of(load_floats(in + i), high, divisor, is_tempered);
            vec second = weight_of(load_floats(in + i + LANES), high, divisor, is_tempered);
            store(out + i, first), store(out + i + LANES, second);
            even = add(even, first), odd = add(odd, second), most = greater(most, greater(first, second));
        }
        scratch.block_max[block] = greatest_of(most);
        total += scratch.block_sums[block] = sum_of(add(even, odd));
    }
    for (long block = count; block < Scratch::blocks(size); block++) scratch.block_max[block] = 0;
    return total;
}

// Copies the weights >= least to the buffer, block by block; skips blocks whose maximum is less.
List candidates(const Scratch &scratch, long size, float least) {
    long count = 0;
    for (long block = 0; block < padded(size, BLOCK) / BLOCK; block++) {
        if (scratch.block_max[block] < least) continue;
        List part = {scratch.weights + block * BLOCK, BLOCK};
        count += copy_between(part, least, INFINITY, scratch.buffer + count);
    }
    return {scratch.buffer, padded(count, LANES)};
}

// ---- filters ----------------------------------------------------------------------------------------------------------

// Returns a value that at least k weights reach: the k-th largest block maximum, or LEAST_WEIGHT for fewer blocks.
float reached_by(long k, const Scratch &scratch, long size) {
    long count = padded(size, BLOCK) / BLOCK;
    if (k > count) return LEAST_WEIGHT;
    return threshold<BY_COUNT>({scratch.block_max, Scratch::blocks(size)}, (double)k, LEAST_WEIGHT, scratch.buffer);
}

// Estimates, from one vector of each block, the weight at which the sum reaches `share` of the total. 0: no estimate.
float guess_nucleus(const Scratch &scratch, long size, float share, float low) {
    long count = padded(size, BLOCK) / BLOCK, filled = 0;
    if (count < 32) return 0;
    double total = 0;
    for (long block = 0; block < count; block++, filled += LANES) {
        vec sample = load(scratch.weights + block * BLOCK);
        store(scratch.buffer + filled, sample);
        total += sum_of(sample);
    }
    return threshold<BY_SUM>({scratch.buffer, filled}, share * total, low, scratch.buffer);
}

// Returns the smallest weight that min_p, top_k and top_p, in this order, keep in a row.
float least_kept(const Row &row, long size, double total, const Scratch &scratch) {
    float least = row.min_p > LEAST_WEIGHT ? row.min_p : LEAST_WEIGHT;  // the greatest weight is 1
    List list = {scratch.weights, padded(size, BLOCK)};
    if (row.top_k > 0 && row.top_k < size) {
        float low = reached_by(row.top_k, scratch, size);
        list = candidates(scratch, size, low > least ? low : least);
        float found = threshold<BY_COUNT>(list, (double)row.top_k, low > least ? low : least, scratch.buffer);
        if (found > least) least = found;
    }
    if (row.top_p >= 1) return least;
    if (least > LEAST_WEIGHT) {
        list = candidates(scratch, size, least);
        total = amount_from(list, least).sum;
        return threshold<BY_SUM>(list, row.top_p * total, least, scratch.buffer);
    }
    // All weights below this one together are less than the share that may be left out.
    float low = (float)((1 - (double)row.top_p) * 0.999 * total / (double)size);
    if (low < LEAST_WEIGHT) low = LEAST_WEIGHT;
    float guess = guess_nucleus(scratch, size, row.top_p, low);
    return threshold<BY_SUM>(list, row.top_p * total, low, scratch.buffer, guess);
}

// ---- the draw ---------------------------------------------------------------------------------------------------------

// Replaces the sum of each block by the sum of its weights >= least. Returns the total.
double sum_kept(const Scratch &scratch, long size, float least) {
    double total = 0;
    for (long block = 0; block < padded(size, BLOCK) / BLOCK; block++) {
        bool is_empty = scratch.block_max[block] < least;
        double sum = is_empty ? 0 : amount_from({scratch.weights + block * BLOCK, BLOCK}, least).sum;
        total += scratch.block_sums[block] = sum;
    }
    return total;
}

// Returns the token at which the running sum of the weights >= least, in token order, exceeds `target`.
int64_t token_at(const Scratch &scratch, long size, float least, double target) {
    double before = 0, reached = 0;
    long chosen = 0;  // the block of the token; the last with a kept token if the target is never exceeded
    for (long block = 0; block < padded(size, BLOCK) / BLOCK; block++) {
        if (scratch.block_max[block] < least) continue;
        chosen = block, before = reached, reached += scratch.block_sums[block];
        if (reached > target) break;
    }
    // Rounding can raise the target to the end of a block; then the last kept token of the block is correct.
    int64_t token = 0;
    for (long i = chosen * BLOCK; i < size && i < (chosen + 1) * BLOCK; i++) {
        if (scratch.weights[i] < least) continue;
        token = i, before += scratch.weights[i];
        if (before > target) break;
    }
    return token;
}

// ---- edits ------------------------------------------------------------------------------------------------------------

void edit(float *x, const Edits &edits, bool bans) {
    for (long i = 0; i < edits.num_repeated; i++) {
        float *value = x + edits.repeated[i];
        if (isinf(*value)) continue;  // an infinite logit of the model stays as it is
        float scaled = *value > 0 ? *value / edits.repetition : *value * edits.repetition;
        *value = scaled > FLOAT_MAX ? FLOAT_MAX : scaled < -FLOAT_MAX ? -FLOAT_MAX : scaled;
    }
    for (long i = 0; i < edits.num_penalised; i++) x[edits.penalised[i]] -= edits.penalties[i];
    for (long i = 0; i < edits.num_biased; i++) x[edits.biased[i]] += edits.biases[i];
    for (long i = 0; bans && i < edits.num_banned; i++) x[edits.banned[i]] = -INFINITY;
}

// Sets the tokens that are not allowed to -inf.
void mask(float *x, long size, const uint32_t *allowed) {
    for (long begin = 0; begin < size; begin += 32) {
        uint32_t word = allowed[begin / 32];
        if (word == ~0u) continue;
        long end = begin + 32 < size ? begin + 32 : size;
        for (long i = begin; i < end; i++)
            if (!(word >> (i - begin) & 1)) x[i] = -INFINITY;
    }
}

// Returns the first token that is allowed, 0 if none is.
int64_t first_allowed(long size, const uint32_t *allowed) {
    for (long i = 0; i < size; i++)
        if (allowed[i / 32] >> (i % 32) & 1) return i;
    return 0;
}

// Writes a row with its edits to the buffer and returns the best token. Bans that would leave no token are ignored; the
// mask never is.
template <class Logit>
int64_t edited(const Logit *x, long size, const Edits &edits, const Scratch &scratch, float *best) {
    int64_t token = 0;
    for (int bans = 1; bans >= 0; bans--) {
        for (long i = 0; i < size; i++) scratch.buffer[i] = one_float(x[i]);
        edit(scratch.buffer, edits, bans);
        if (edits.allowed) mask(scratch.buffer, size, edits.allowed);
        token = first_best(scratch.buffer, size, best);
        if (*best != -INFINITY) break;
    }
    if (edits.allowed && *best == -INFINITY) {  // the model's own logits are -inf wherever a token is allowed
        token = first_allowed(size, edits.allowed);
        *best = scratch.buffer[token] = 0;
    }
    return token;
}

// ---- one row ----------------------------------------------------------------------------------------------------------

// `log_total` is the logarithm of the sum of e^(x - best).
template <class Logit>
void log_probabilities(const Logit *x, long size, float best, double log_total, Row &row) {
    row.logprob = logprob_of(one_float(x[row.token]), best, log_total);
    best_of(x, size, row.num_top, row.top_ids, row.top_logprobs);
    for (long i = 0; i < row.num_top; i++) row.top_logprobs[i] = logprob_of(row.top_logprobs[i], best, log_total);
}

// Draws a token from logits whose greatest is `best`. Returns the sum of all weights.
template <class Logit>
double draw(const Logit *x, long size, float best, const Scratch &scratch, Row &row) {
    double total = weigh(x, size, best, row.temperature, scratch), kept = total;
    float least = LEAST_WEIGHT;
    if (row.min_p > 0 || row.top_k > 0 || row.top_p < 1) {
        least = least_kept(row, size, total, scratch);
        if (least > LEAST_WEIGHT) kept = sum_kept(scratch, size, least);
    }
    row.token = token_at(scratch, size, least, kept * row.uniform);
    return total;
}

template <class Logit>
void sample(const Logit *x, long size, const Scratch &scratch, Row &row) {
    int64_t token = first_greatest(x, size, &row.best);
    if (!isfinite(row.best)) return;
    if (!row.is_given) row.token = token;
    double total = 0;  // the sum of e^(x - best); 0: not computed yet
    if (row.edits) {
        float best;
        row.token = edited(x, size, *row.edits, scratch, &best);
        if (row.temperature > 0) draw((const float *)scratch.buffer, size, best, scratch, row);
    } else if (row.temperature > 0) {
        double weights = draw(x, size, row.best, scratch, row);
        if (row.temperature == 1) total = weights;
    }
    if (row.num_top < 0) return;
    if (total == 0) total = weigh(x, size, row.best, 1, scratch);
    log_probabilities(x, size, row.best, log(total), row);
}

template <class Logit>
void sample_all(const Logit *logits, long count, long size, Row *rows, char *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (count > 1 && count * size >= MANY_LOGITS)
    for (long i = 0; i < count; i++) {
        Scratch own(scratch + omp_get_thread_num() * Scratch::bytes(size), size);
        sample(logits + i * size, size, own, rows[i]);
    }
}

}  // namespace

// ---- exported ---------------------------------------------------------------------------------------------------------

// Returns the bytes of scratch memory that each thread of a call needs for rows of `size`.
EXPORT long headstart_sample_scratch(long size) { return Scratch::bytes(size); }

// Chooses a token for each of `count` rows of `size` logits, bf16 or fp32, with the parameters in `rows`, and fills in
// the results there.
EXPORT void headstart_sample(const void *logits, int is_bf16, long count, long size, Row *rows, char *scratch,
                             int threads) {
    if (is_bf16)
        sample_all((const bf16 *)logits, count, size, rows, scratch, threads);
    else
        sample_all((const float *)logits, count, size, rows, scratch, threads);
}
