// Chains of products: the division of work between threads. The products themselves are in product_*.cpp.
//
// With few rows, the threads divide the weights of each product. With many rows, each thread computes blocks of rows
// through all products of the chain, without waiting for other threads in between.
#include "operations.h"

namespace {

constexpr long MANY_ROWS = 16;  // from here on, rows are prepared once for all threads; below, once per thread

// Returns the maximum bytes of `count` rows in any format, with their scales: 4 bytes for each input of whole groups. So
// many rows are whole AMX tiles.
inline long prepared_bytes(long in_features, long count) {
    if (count >= TILED_ROWS) count = (count + 15) / 16 * 16;
    return (count * ((in_features + 31) / 32 * 128 + 4) + 63) / 64 * 64;
}

// ---- work shared between threads --------------------------------------------------------------------------------------

// Tiles of a product that two threads compute, one from each end: begin and end of the remaining tiles, in the halves
// of a word. Both threads read adjacent weights, neither waits while tiles remain, and other threads may help at the
// end.
struct alignas(64) Share {
    uint64_t left;
};

struct Taken {
    long begin, end;
    long next;  // begin of the next tiles from this end, or -1
};

// Returns how many of `left` tiles are taken at once: fewer as fewer remain, but whole groups.
inline long portion(long left, long group) {
    long most = left / 8 / group * group;
    return most > group ? most : left < group ? left : group;
}

bool take(Share &share, long group, bool front, Taken &taken) {
    uint64_t seen = __atomic_load_n(&share.left, __ATOMIC_RELAXED);
    for (;;) {
        long low = seen >> 32, high = seen & 0xffffffffu, count = portion(high - low, group), rest = high - low - count;
        if (count <= 0) return false;
        taken.begin = front ? low : high - count, taken.end = taken.begin + count;
        taken.next = rest == 0 ? -1 : front ? taken.end : taken.begin - portion(rest, group);
        uint64_t left = front ? (uint64_t)taken.end << 32 | high : (uint64_t)low << 32 | taken.begin;
        if (__atomic_compare_exchange_n(&share.left, &seen, left, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return true;
    }
}

constexpr int MAX_LINKS = 8;  // of a chain; checked by chain.py

// Memory of one call: the shares of each link, the sums of each thread, then the prepared rows.
struct Scratch {
    static constexpr long FIXED_BYTES = MAX_LINKS * sizeof(Share) + SUMS_BYTES;  // for each thread
    char *start;
    int threads;
    int shares() const { return (threads + 1) / 2; }
    Share *share(int link, int index) const { return (Share *)start + link * threads + index; }
    float *sums(int thread) const { return (float *)(start + MAX_LINKS * threads * sizeof(Share) + thread * SUMS_BYTES); }
    char *prepared() const { return start + threads * FIXED_BYTES; }
};

struct Call {
    const Link *links;
    int num_links;
    void *const *buffers;
    const bf16 *cosine, *sine;
    long count;
    Scratch scratch;

    Step step(int link) const {
        const Link &at = links[link];
        long offset = at.offset * operations_of(*at.linear).element_bytes;
        const char *residual = at.residual < 0 ? nullptr : (const char *)buffers[at.residual] + offset;
        return {at.linear, buffers[at.x], residual, (char *)buffers[at.y] + offset, at.stride, non_temporal(at, offset)};
    }
    // Whether the outputs of a link are written by non-temporal stores: no link reads them, and they are larger than a cache.
    bool non_temporal(const Link &at, long offset) const {
        long row_bytes = at.stride * operations_of(*at.linear).element_bytes, start = (long)buffers[at.y] + offset;
        return num_links == 1 && at.residual < 0 && !at.heads && !at.linear->gated && count * row_bytes > NON_TEMPORAL_BYTES
            && at.linear->out_features % TILE == 0 && (row_bytes | start) % 64 == 0;
    }
    // Returns the first tile of share `index` of a product; for index == shares, the number of tiles.
    static long first(const Linear &linear, int index, int shares) { return linear.tiles() * index / shares; }
    // Returns the first weights that a thread reads of the next product; prefetched at the end of this product.
    const char *after(int link, int thread) const {
        const Linear &next = *links[link + 1 < num_links ? link + 1 : link].linear;
        int index = thread / 2 % scratch.shares();
        long tile = thread % 2 ? first(next, index + 1, scratch.shares()) - 1 : first(next, index, scratch.shares());
        return operations_of(next).tile(next, tile);
    }
};

// ---- few rows: by tiles -----------------------------------------------------------------------------------------------

// Computes one product with all threads of a parallel region.
void by_tiles(const Call &call, int link) {
    const Step step = call.step(link);
    const Linear &linear = *step.linear;
    const Operations &op = operations_of(linear, call.count);
    int me = omp_get_thread_num();
    long count = call.count, size = linear.in_features, row_bytes = op.units(linear) * op.row_bytes;
    long from_bytes = size * op.element_bytes;
    const char *from = (const char *)step.x;
    bool few = count < MANY_ROWS, as_is = op.as_is(linear);
    char *prepared = call.scratch.prepared() + (few ? me * prepared_bytes(size, count) : 0);
    float *scales = (float *)(prepared + count * row_bytes);
    if (!as_is && few) {
        for (long row = 0; row < count; row++)
            op.prepare(linear, from + row * from_bytes, prepared + row * row_bytes, scales + row);
    } else if (!as_is) {
#pragma omp for
        for (long row = 0; row < count; row++)
            op.prepare(linear, from + row * from_bytes, prepared + row * row_bytes, scales + row);
    }
    const char *x = as_is ? from : prepared;
    long group = tiles_together(count, row_bytes, op.block, op.panel_bytes), blocks = (count + op.block - 1) / op.block;
    Taken taken;
    for (int turn = 0; turn < call.scratch.shares(); turn++) {
        Share *share = call.scratch.share(link, (me / 2 + turn) % call.scratch.shares());
        while (take(*share, group, me % 2 == 0, taken)) {
            const char *after = taken.next < 0 ? call.after(link, me) : op.tile(linear, taken.next);
            for (long b = 0; b < blocks; b++) {
                long first = count * b / blocks, past = count * (b + 1) / blocks;
                PreparedRows rows{x + first * row_bytes, scales + first, first, past - first};
                const char *next = b + 1 < blocks ? op.tile(linear, taken.begin) : after;
                op.multiply(step, rows, taken.begin, taken.end, next, call.scratch.sums(me));
            }
        }
    }
#pragma omp barrier
}

void all_by_tiles(const Call &call) {
    for (int l = 0; l < call.num_links; l++) {
        const Link &link = call.links[l];
        by_tiles(call, l);
        if (!link.heads) continue;
#pragma omp for
        for (long row = 0; row < call.count; row++)
            turn_heads(*link.heads, (bf16 *)call.buffers[link.y], call.cosine, call.sine, row);
    }
}

// ---- many rows: block by block ----------------------------------------------------------------------------------------

void block_through(const Call &call, int link, long first, long past, char *prepared) {
    const Step step = call.step(link);
    const Linear &linear = *step.linear;
    const Operations &op = operations_of(linear, past - first);
    long from_bytes = linear.in_features * op.element_bytes, row_bytes = op.units(linear) * op.row_bytes;
    const char *from = (const char *)step.x;
    float *scales = (float *)(prepared + (past - first) * row_bytes);
    bool as_is = op.as_is(linear);
    for (long row = first; !as_is && row < past; row++)
        op.prepare(linear, from + row * from_bytes, prepared + (row - first) * row_bytes, scales + row - first);
    PreparedRows rows{as_is ? from + first * from_bytes : prepared, scales, first, past - first};
    op.multiply(step, rows, 0, linear.tiles(), call.after(link, 0), call.scratch.sums(omp_get_thread_num()));
}

void all_by_blocks(const Call &call) {
    int threads = call.scratch.threads;
    long block = MOST_ROWS, widest = 0;
    for (int l = 0; l < call.num_links; l++) {
        const Linear &linear = *call.links[l].linear;
        const Operations &op = operations_of(linear, call.count);
        block = op.block < block ? op.block : block;
        widest = linear.in_features > widest ? linear.in_features : widest;
    }
    long blocks = (call.count + block * threads - 1) / (block * threads) * threads;
    char *prepared = call.scratch.prepared() + omp_get_thread_num() * prepared_bytes(widest, MOST_ROWS);
#pragma omp for schedule(dynamic, 1)
    for (long b = 0; b < blocks; b++) {
        long first = call.count * b / blocks, past = call.count * (b + 1) / blocks;
        for (int l = 0; l < call.num_links; l++) {
            const Link &link = call.links[l];
            block_through(call, l, first, past, prepared);
            for (long row = first; link.heads && row < past; row++)
                turn_heads(*link.heads, (bf16 *)call.buffers[link.y], call.cosine, call.sine, row);
        }
    }
}

inline bool is_many(const Call &call) {
    long each = ROWS_EACH;
    for (int l = 0; l < call.num_links; l++) {
        long own = operations_of(*call.links[l].linear, call.count).rows_each;
        each = own > each ? own : each;
    }
    return call.count >= each * call.scratch.threads;
}

}  // namespace

// Returns the bytes of scratch for a chain whose widest rows have `in_features`.
EXPORT long headstart_scratch(long in_features, long count, int threads) {
    long fixed = threads * Scratch::FIXED_BYTES, of_blocks = threads * prepared_bytes(in_features, MOST_ROWS);
    long of_tiles = prepared_bytes(in_features, count) * (count < MANY_ROWS ? threads : 1);
    if (count >= MOST_EACH * threads) return fixed + of_blocks;
    return fixed + (count >= ROWS_EACH * threads && of_blocks > of_tiles ? of_blocks : of_tiles);
}

// Runs `num_links` products, at most MAX_LINKS, one after the other in one parallel region; each may read the results
// of those before it. cosine and sine [count, 2, rotary_dim / 2] are the angles of heads (see rows.h), null if no link
// has heads, which only rows in bf16 have. scratch: headstart_scratch bytes for the largest K, 64-byte aligned.
EXPORT void headstart_chain(const Link *links, int num_links, void *const *buffers, const bf16 *cosine,
                            const bf16 *sine, char *scratch, long count, int threads) {
    Call call{links, num_links, buffers, cosine, sine, count, {scratch, threads}};
    bool many = is_many(call);
    for (int l = 0; !many && l < num_links; l++) {
        for (int i = 0, shares = call.scratch.shares(); i < shares; i++) {
            uint64_t begin = Call::first(*links[l].linear, i, shares), end = Call::first(*links[l].linear, i + 1, shares);
            call.scratch.share(l, i)->left = begin << 32 | end;
        }
    }
#pragma omp parallel num_threads(threads)
    {
        if (many) all_by_blocks(call);
        else all_by_tiles(call);
        if (call.step(0).non_temporal) _mm_sfence();  // orders the non-temporal stores before other threads' reads
    }
}
