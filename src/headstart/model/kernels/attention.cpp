// Attention of one layer over paged KV: writes the step's keys and values, then computes a plan's items.
//
// Decode, chunked prefill and cached prefixes are one case: each row has the range of positions it sees. An item goes
// through its pages in pieces of CHUNK_PAGES; of each piece all its rows are computed in tiles of up to MICRO_ROWS:
// scores, weights 2^(score - greatest so far), weighted values. Nothing masked is multiplied: neither scores of slots
// that a row does not see, nor values of slots that no row of the item sees, so what lies there never matters.
#include "attention.h"
#include "attention_math.h"
#include "pages.h"

namespace {

enum { CHUNK_PAGES = 16, CHUNK = CHUNK_PAGES * PAGE, AHEAD = 4 };
// Column vectors per pass over values, and pages per pass over keys: with MICRO_ROWS rows they fill the registers.
#if defined(__AVX512F__)
enum { MOST_VALUE_VECS = 4, MOST_KEY_PAGES = 4, WIDE_KEY_PAGES = 3, MOST_ROWS = MICRO_ROWS };
#else
enum { MOST_VALUE_VECS = 2, MOST_KEY_PAGES = 1, WIDE_KEY_PAGES = 1, MOST_ROWS = 4 };
#endif
const float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// The pages of a piece of an item, in order, and a few that follow (or the last again) to be fetched ahead.
struct Piece {
    const uint32_t *keys[CHUNK_PAGES + AHEAD], *values[CHUNK_PAGES + AHEAD];
    int position[CHUNK_PAGES], filled[CHUNK_PAGES];  // position of slot 0; slots that are tokens
    int count;
    bool whole;  // every slot is a token
};

// What a tile of rows has gathered so far.
template <typename Kind>
struct Tile {
    alignas(64) typename Kind::factor queries[TILE_ROWS * MAX_DIMS];
    alignas(64) float out[TILE_ROWS * MAX_DIMS];  // [rows, dims], relative to `greatest`
    float greatest[TILE_ROWS], total[TILE_ROWS];  // of scores in base 2
    int from[TILE_ROWS], upto[TILE_ROWS];         // positions a row sees
    int rows, dims, low, high;                    // positions that any row sees
    alignas(64) uint32_t masked[PAGE * MAX_DIMS];
};

struct Scores {
    alignas(64) float score[MOST_ROWS * CHUNK];
    float shrink[MOST_ROWS];  // what earlier pieces are multiplied by
};

template <typename Kind>
struct Weights {
    alignas(64) typename Kind::factor weight[MOST_ROWS * CHUNK];
};

// Scores of R rows against P pages: queries [words][R] words.
template <typename Kind, int R, int P, bool FETCH>
static inline void score_pages(const typename Kind::factor *queries, int num_words, const uint32_t *const *pages,
                               const uint32_t *const *next, float *scores) {
    vec acc[R][P * PAGE_VECS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < P * PAGE_VECS; v++) acc[r][v] = zero();
    for (int word = 0; word < num_words; word++) {
        const typename Kind::factor *row = queries + word * R * Kind::PER_WORD;
#pragma GCC unroll 8
        for (int v = 0; v < P * PAGE_VECS; v++) {
            int page = v / PAGE_VECS, part = v % PAGE_VECS;
            if (FETCH && part == 0) _mm_prefetch((const char *)(next[page] + word * PAGE), _MM_HINT_T0);
            typename Kind::loaded keys = Kind::take(pages[page] + word * PAGE + part * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[r][v] = Kind::step(acc[r][v], row + r * Kind::PER_WORD, keys);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < P * PAGE_VECS; v++) store(scores + r * CHUNK + v * LANES, acc[r][v]);
}

// Adds to out [R, dims] the values of `count` pages, weighted; V vectors of columns. What was there shrinks before.
template <typename Kind, int R, int V, bool FETCH>
static inline void weigh_pages(const typename Kind::factor *weights, const uint32_t *const *pages, int count, int dims,
                               int column, const float *shrink, float *out) {
    vec acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = mul(load(out + r * dims + column + v * LANES), all(shrink[r]));
    for (int p = 0; p < count; p++) {
        const uint32_t *values = pages[p] + column, *next = pages[p + 2] + column;
        const typename Kind::factor *row = weights + p * PAGE;
        for (int word = 0; word < PAGE / Kind::W; word++) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                if (FETCH) _mm_prefetch((const char *)(next + word * dims + v * LANES), _MM_HINT_T0);
                typename Kind::loaded value = Kind::take(values + word * dims + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    acc[r][v] = Kind::step(acc[r][v], row + r * CHUNK + word * Kind::PER_WORD, value);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * dims + column + v * LANES, acc[r][v]);
}

template <typename Kind, int R, bool FETCH>
static inline void weigh_columns(const typename Kind::factor *weights, const uint32_t *const *pages, int count,
                                 int dims, const float *shrink, float *out) {
    int left = dims / LANES;
    for (int column = 0; left > 0;) {
        // as even as possible: five vectors are three and two
        int passes = ceil_div(left, MOST_VALUE_VECS), width = ceil_div(left, passes);
        if (width == 1) weigh_pages<Kind, R, 1, FETCH>(weights, pages, count, dims, column, shrink, out);
        if (width == 2) weigh_pages<Kind, R, 2, FETCH>(weights, pages, count, dims, column, shrink, out);
#if defined(__AVX512F__)
        if (width == 3) weigh_pages<Kind, R, 3, FETCH>(weights, pages, count, dims, column, shrink, out);
        if (width == 4) weigh_pages<Kind, R, 4, FETCH>(weights, pages, count, dims, column, shrink, out);
#endif
        column += width * LANES;
        left -= width;
    }
}

// Turns one row's scores of a piece into weights. Gives their sum; updates the greatest and says what to shrink by.
template <typename Kind>
static inline float soften(float *scores, const Piece &piece, int from, int upto, float scale, float softcap,
                           float *greatest_score, float *shrink, typename Kind::factor *weights) {
    float to_base2 = scale * LOG2E;
    int count = piece.count;
    if (softcap > 0.0f) {
        for (int i = 0; i < count * PAGE; i += LANES)
            store(scores + i, capped(load(scores + i), softcap, 2.0f * LOG2E * scale / softcap));
        to_base2 = LOG2E;
    }
    bool all_seen = piece.whole && from <= piece.position[0] && upto >= piece.position[count - 1] + PAGE;
    vec most = all(-INFINITY);
    for (int p = 0; p < count; p++) {
        int seen = upto - piece.position[p] < piece.filled[p] ? upto - piece.position[p] : piece.filled[p];
        int skip = from - piece.position[p];
        for (int v = 0; v < PAGE_VECS; v++) {
            float *at = scores + p * PAGE + v * LANES;
            vec x = mul(load(at), all(to_base2));
            if (!all_seen) x = between(x, all(-INFINITY), skip - v * LANES, seen - v * LANES);
            store(at, x);
            most = greater(most, x);
        }
    }
    float reached = greatest(most), before = *greatest_score;
    if (!(reached > before) && reached == reached) reached = before;  // a NaN goes on
    *shrink = 1.0f;
    if (reached == -INFINITY) {  // nothing seen yet
        for (int i = 0; i < count * PAGE; i += LANES) Kind::put(weights + i, zero());
        return 0.0f;
    }
    if (before != reached) *shrink = before == -INFINITY ? 0.0f : exp2f(before - reached);
    *greatest_score = reached;
    vec total = zero();
    for (int p = 0; p < count; p++) {
        int seen = upto - piece.position[p] < piece.filled[p] ? upto - piece.position[p] : piece.filled[p];
        int skip = from - piece.position[p];
        for (int v = 0; v < PAGE_VECS; v++) {
            vec weight = power_of_two(sub(load(scores + p * PAGE + v * LANES), all(reached)));
            if (!all_seen) weight = between(weight, zero(), skip - v * LANES, seen - v * LANES);
            total = add(total, weight);
            Kind::put(weights + p * PAGE + v * LANES, weight);
        }
    }
    return sum(total);
}

// Values of a page with the slots outside [low, high) zeroed, in `copy`.
template <typename Kind>
static inline const uint32_t *masked_values(const uint32_t *page, int dims, int low, int high, uint32_t *copy) {
    typedef typename Kind::element element;
    memcpy(copy, page, sizeof(uint32_t) * (PAGE / Kind::W) * dims);
    element *elements = (element *)copy;
    for (int slot = 0; slot < PAGE; slot++) {
        if (slot >= low && slot < high) continue;
        for (int dim = 0; dim < dims; dim++) elements[(slot / Kind::W * dims + dim) * Kind::W + slot % Kind::W] = 0;
    }
    return copy;
}

// The rows [first, first + R) of a tile against one piece.
template <typename Kind, int R, bool FETCH>
static inline void attend_rows(Tile<Kind> &tile, int first, const Piece &piece, float scale, float softcap) {
    Scores scores;
    Weights<Kind> weights;
    enum { MOST = Kind::PER_WORD == 2 && sizeof(typename Kind::factor) == 4 ? WIDE_KEY_PAGES : MOST_KEY_PAGES };
    int dims = tile.dims, num_words = dims / Kind::W, page = 0;
    const typename Kind::factor *queries = tile.queries + first * dims;
    for (; page + MOST <= piece.count; page += MOST)
        score_pages<Kind, R, MOST, FETCH>(queries, num_words, piece.keys + page, piece.keys + page + MOST,
                                          scores.score + page * PAGE);
    for (; page < piece.count; page++)
        score_pages<Kind, R, 1, FETCH>(queries, num_words, piece.keys + page, piece.keys + page + 1,
                                       scores.score + page * PAGE);
    for (int r = 0; r < R; r++) {
        int row = first + r;
        float total = soften<Kind>(scores.score + r * CHUNK, piece, tile.from[row], tile.upto[row], scale, softcap,
                                   &tile.greatest[row], &scores.shrink[r], weights.weight + r * CHUNK);
        tile.total[row] = tile.total[row] * scores.shrink[r] + total;
    }
    // Runs of pages that are seen to the last slot at once, others by a copy.
    float *out = tile.out + first * dims;
    for (int begin = 0, end; begin < piece.count; begin = end) {
        int low = tile.low - piece.position[begin], high = tile.high - piece.position[begin];
        if (high > piece.filled[begin]) high = piece.filled[begin];
        const typename Kind::factor *weight = weights.weight + begin * PAGE;
        if (low <= 0 && high >= PAGE) {
            for (end = begin + 1; end < piece.count; end++)
                if (tile.high < piece.position[end] + PAGE || piece.filled[end] < PAGE) break;
            weigh_columns<Kind, R, FETCH>(weight, piece.values + begin, end - begin, dims, scores.shrink, out);
        } else {
            end = begin + 1;
            const uint32_t *copy = masked_values<Kind>(piece.values[begin], dims, low, high, tile.masked);
            const uint32_t *pages[3] = {copy, copy, copy};
            weigh_columns<Kind, R, false>(weight, pages, 1, dims, scores.shrink, out);
        }
        for (int r = 0; r < R; r++) scores.shrink[r] = 1.0f;
    }
}

template <typename Kind>
static inline void attend_some_rows(Tile<Kind> &tile, int first, int rows, const Piece &piece, float scale,
                                    float softcap) {
#define ROWS(R)                                                             \
    case R:                                                                 \
        if (first == 0)                                                     \
            attend_rows<Kind, R, true>(tile, first, piece, scale, softcap);  \
        else                                                                \
            attend_rows<Kind, R, false>(tile, first, piece, scale, softcap); \
        break;
    switch (rows) {
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
#if defined(__AVX512F__)
        ROWS(5)
        ROWS(6)
#endif
    }
#undef ROWS
}

// The first row of part `index` of `parts` as equal parts of `rows` as can be.
static inline int part_of(int rows, int index, int parts) { return rows * index / parts; }

template <typename Kind>
class Layer {
    typedef typename Kind::element element;
    typedef typename Kind::factor factor;

   public:
    explicit Layer(const AttentionCall &call)
        : call(call),
          plan(*(const Plan *)call.plan),
          items((const Item *)(&plan + 1)),
          entries((const Entry *)(items + plan.num_items)),
          merges((const Merge *)(entries + plan.num_entries)),
          dims(padded_dims(call.head_dim)),
          num_heads(call.num_kv_heads * call.group),
          page_words(PAGE / Kind::W * dims),
          pages_per_block(ceil_div(call.block_size, PAGE)) {}

    void write_page(int index) const {
        int token = call.page_writes[2 * index], page = call.page_writes[2 * index + 1];
        for (int head = 0; head < call.num_kv_heads; head++)
            pages::write_page<Kind::W>({key_row(token, head), call.key_token}, {value_row(token, head), call.value_token},
                                       call.head_dim, key_page(head, page), value_page(head, page));
    }

    void write_token(int index) const {
        int token = call.token_writes[2 * index], slot = call.token_writes[2 * index + 1];
        for (int head = 0; head < call.num_kv_heads; head++)
            pages::write_token<Kind::W>({key_row(token, head), 0}, {value_row(token, head), 0}, call.head_dim,
                                        slot % PAGE, key_page(head, slot / PAGE), value_page(head, slot / PAGE));
    }

    // Computes one item for one kv head, and merges the tokens whose last part it was.
    void attend(Tile<Kind> &tile, int head, int index) const {
        const Item &item = items[index];
        open_tile(tile, head, item);
        int low = tile.low / call.block_size, high = ceil_div(tile.high, call.block_size);
        if (low < item.block_begin) low = item.block_begin;
        if (high > item.block_end) high = item.block_end;
        int parts = ceil_div(tile.rows, MOST_ROWS), pages = (high - low) * pages_per_block;
        for (int begin = 0; begin < pages; begin += CHUNK_PAGES) {
            Piece piece;
            open_piece(piece, head, item, low, begin, pages);
            for (int part = 0; part < parts; part++) {
                int first = part_of(tile.rows, part, parts);
                attend_some_rows<Kind>(tile, first, part_of(tile.rows, part + 1, parts) - first, piece, call.scale,
                                       call.softcap);
            }
        }
        close_tile(tile, head, item);
    }

   private:
    const AttentionCall &call;
    const Plan &plan;
    const Item *items;
    const Entry *entries;
    const Merge *merges;
    int dims, num_heads, page_words, pages_per_block;

    const element *key_row(int token, int head) const {
        return (const element *)call.keys + token * call.key_token + head * call.key_head;
    }
    const element *value_row(int token, int head) const {
        return (const element *)call.values + token * call.value_token + head * call.value_head;
    }
    uint32_t *key_page(int head, int64_t page) const {
        return (uint32_t *)call.key_pages + head * call.head_words + page * page_words;
    }
    uint32_t *value_page(int head, int64_t page) const {
        return (uint32_t *)call.value_pages + head * call.head_words + page * page_words;
    }
    const Entry &entry_of(const Item &item, int row) const {
        return entries[item.entry + (item.row_begin + row) / call.group];
    }
    int query_head(const Item &item, int head, int row) const {
        return head * call.group + (item.row_begin + row) % call.group;
    }

    // Reads the queries, interleaved by parts of rows: [parts][words][rows of the part] words.
    void open_tile(Tile<Kind> &tile, int head, const Item &item) const {
        tile.rows = item.row_end - item.row_begin;
        tile.dims = dims;
        tile.low = INT32_MAX;
        tile.high = 0;
        int parts = ceil_div(tile.rows, MOST_ROWS);
        factor packed[MAX_DIMS];
        for (int dim = call.head_dim; dim < dims; dim++) packed[dim] = 0;
        for (int part = 0; part < parts; part++) {
            int first = part_of(tile.rows, part, parts), size = part_of(tile.rows, part + 1, parts) - first;
            for (int row = first; row < first + size; row++) {
                const Entry &entry = entry_of(item, row);
                const element *query = (const element *)call.queries + entry.token * call.query_token +
                                       query_head(item, head, row) * call.query_head;
                Kind::pack(packed, query, call.head_dim);
                factor *to = tile.queries + first * dims + (row - first) * Kind::PER_WORD;
                for (int dim = 0; dim < dims; dim += Kind::PER_WORD)
                    memcpy(to + dim * size, packed + dim, sizeof(factor) * Kind::PER_WORD);
                tile.upto[row] = entry.limit;
                tile.from[row] = call.window > 0 && entry.limit > call.window ? entry.limit - call.window : 0;
                if (tile.from[row] < tile.low) tile.low = tile.from[row];
                if (tile.upto[row] > tile.high) tile.high = tile.upto[row];
                tile.greatest[row] = -INFINITY;
                tile.total[row] = 0.0f;
            }
        }
        memset(tile.out, 0, sizeof(float) * tile.rows * dims);
    }

    // The pages [begin, begin + CHUNK_PAGES) of those of an item from block `low` on.
    void open_piece(Piece &piece, int head, const Item &item, int low, int begin, int pages) const {
        piece.count = pages - begin < CHUNK_PAGES ? pages - begin : CHUNK_PAGES;
        piece.whole = true;
        for (int i = 0; i < piece.count + AHEAD; i++) {
            int page = begin + i < pages ? begin + i : pages - 1;
            int block = low + page / pages_per_block, sub = page % pages_per_block;
            int64_t where = (int64_t)call.tables[item.table + block] * pages_per_block + sub;
            piece.keys[i] = key_page(head, where);
            piece.values[i] = value_page(head, where);
            if (i >= piece.count) continue;
            int filled = call.block_size - sub * PAGE;
            piece.position[i] = block * call.block_size + sub * PAGE;
            piece.filled[i] = filled < PAGE ? filled : PAGE;
            piece.whole = piece.whole && filled >= PAGE;
        }
        if (begin > 0) return;
        for (int i = 0; i < 2; i++)  // later ones are fetched while these are weighed
            for (int at = 0; at < page_words; at += PAGE) _mm_prefetch((const char *)(piece.values[i] + at), _MM_HINT_T0);
    }

    void close_tile(Tile<Kind> &tile, int head, const Item &item) const {
        for (int row = 0; row < tile.rows; row++) {
            const Entry &entry = entry_of(item, row);
            int query = query_head(item, head, row);
            float *out = tile.out + row * dims;
            float total = tile.total[row], lse = tile.greatest[row] + log2f(total);
            if (total == 0.0f) lse = -INFINITY;
            float share = total == 0.0f ? 0.0f : 1.0f / total;
            for (int dim = 0; dim < dims; dim += LANES) store(out + dim, mul(load(out + dim), all(share)));
            if (entry.slot < 0) {
                put(entry.token, query, out, lse);
            } else {
                int64_t at = (int64_t)entry.slot * num_heads + query;
                memcpy(call.parts + at * dims, out, sizeof(float) * dims);
                call.part_lse[at] = lse;
            }
        }
        for (int row = 0, next; row < tile.rows; row = next) {
            const Entry &entry = entry_of(item, row);
            for (next = row + 1; next < tile.rows && &entry_of(item, next) == &entry; next++) {}
            if (entry.slot >= 0) arrive(entry.merge, head, next - row);
        }
    }

    // Counts rows of one token's parts; whoever brings the last ones merges them.
    void arrive(int index, int head, int rows) const {
        const Merge &merge = merges[index];
        int32_t *arrived = call.arrived + (int64_t)index * call.num_kv_heads + head;
        if (__atomic_add_fetch(arrived, rows, __ATOMIC_ACQ_REL) < merge.count * call.group) return;
        *arrived = 0;
        for (int query = head * call.group; query < (head + 1) * call.group; query++) merge_parts(merge, query);
    }

    // The mean of a head's parts, weighted by the sums of their exponentials.
    void merge_parts(const Merge &merge, int query) const {
        alignas(64) float out[MAX_DIMS];
        float most = -INFINITY, total = 0.0f;
        for (int part = 0; part < merge.count; part++) {
            float lse = call.part_lse[(int64_t)(merge.slot + part) * num_heads + query];
            if (lse > most) most = lse;
        }
        if (most == -INFINITY) most = 0.0f;
        memset(out, 0, sizeof(float) * dims);
        for (int part = 0; part < merge.count; part++) {
            int64_t at = (int64_t)(merge.slot + part) * num_heads + query;
            float weight = exp2f(call.part_lse[at] - most);
            const float *from = call.parts + at * dims;
            total += weight;
            for (int dim = 0; dim < dims; dim += LANES)
                store(out + dim, fma(all(weight), load(from + dim), load(out + dim)));
        }
        for (int dim = 0; dim < dims; dim += LANES) store(out + dim, mul(load(out + dim), all(1.0f / total)));
        put(merge.token, query, out, most + log2f(total));
    }

    void put(int token, int query, const float *out, float lse) const {
        int64_t at = (int64_t)token * num_heads + query;
        put_row((element *)call.out + at * call.head_dim, out, call.head_dim);
        if (call.lse != nullptr) call.lse[at] = lse * LN2;
    }
};

// Below these, waking threads costs more than they save: elements written, and rows times pages times dims.
const int64_t FEW_WRITES = 1 << 16, LITTLE_WORK = 1 << 15;

template <typename Kind>
void run(const AttentionCall &call) {
    Layer<Kind> layer(call);
    const Plan &plan = *(const Plan *)call.plan;
    int64_t written = ((int64_t)call.num_page_writes * PAGE + call.num_token_writes) * call.num_kv_heads * call.head_dim;
    bool write_alone = written < FEW_WRITES;
    int tasks = plan.num_items * call.num_kv_heads;
    int64_t work = plan.cost * call.num_kv_heads * call.head_dim;
    int threads = work + (write_alone ? 0 : written) < LITTLE_WORK ? 1 : call.threads;
    if (write_alone) {
        for (int i = 0; i < call.num_page_writes; i++) layer.write_page(i);
        for (int i = 0; i < call.num_token_writes; i++) layer.write_token(i);
    }
#pragma omp parallel num_threads(threads)
    {
        if (!write_alone) {
#pragma omp for schedule(dynamic, 4) nowait
            for (int i = 0; i < call.num_page_writes; i++) layer.write_page(i);
#pragma omp for schedule(dynamic, 16)
            for (int i = 0; i < call.num_token_writes; i++) layer.write_token(i);
        }
        Tile<Kind> tile;
        // by head, then in the order of the plan: neighbours share blocks
#pragma omp for schedule(dynamic, 1) nowait
        for (int task = 0; task < tasks; task++) layer.attend(tile, task / plan.num_items, task % plan.num_items);
    }
}

template <int W>
void read_page_rows(const AttentionCall &call, int block, void *keys, void *values) {
    typedef typename pages::Of<W>::element element;
    int64_t page_words = PAGE / W * padded_dims(call.head_dim), pages = ceil_div(call.block_size, PAGE);
    for (int slot = 0; slot < call.block_size; slot++) {
        for (int head = 0; head < call.num_kv_heads; head++) {
            int64_t at = head * call.head_words + (block * pages + slot / PAGE) * page_words;
            int64_t row = ((int64_t)slot * call.num_kv_heads + head) * call.head_dim;
            pages::read_token<W>((const uint32_t *)call.key_pages + at, (const uint32_t *)call.value_pages + at,
                                 call.head_dim, slot % PAGE, (element *)keys + row, (element *)values + row);
        }
    }
}

// Bytes of one layer's keys, or values, of one block.
int64_t half_bytes(const AttentionCall &call) {
    return (int64_t)call.block_size * call.num_kv_heads * call.head_dim * (call.is_bf16 ? 2 : 4);
}

}  // namespace

// Writes the step's keys and values, then attends. A plan without items only writes.
EXPORT void headstart_attention(const AttentionCall *call) {
#if defined(__AVX512BF16__)
    if (call->is_bf16) return run<Paired>(*call);
#else
    if (call->is_bf16) return run<Widened>(*call);
#endif
    run<Single>(*call);
}

// Copies one block out, on the calling thread alone: for each layer keys, then values, [block_size, kv heads, head_dim].
EXPORT void headstart_read_block(const AttentionCall *layers, int num_layers, int block, void *data) {
    char *at = (char *)data;
    for (int layer = 0; layer < num_layers; layer++) {
        const AttentionCall &call = layers[layer];
        int64_t half = half_bytes(call);
        if (call.is_bf16)
            read_page_rows<2>(call, block, at, at + half);
        else
            read_page_rows<1>(call, block, at, at + half);
        at += 2 * half;
    }
}

// Writes the rows of one whole block: page by page where it has whole ones, else token by token.
static void write_rows(AttentionCall &call, int block) {
    bool by_page = call.block_size % PAGE == 0;
    int first_page = block * ceil_div(call.block_size, PAGE);
    for (int token = 0; token < call.block_size; token += by_page ? PAGE : 1) {
        int32_t write[2] = {token, by_page ? first_page + token / PAGE : first_page * PAGE + token};
        (by_page ? call.page_writes : call.token_writes) = write;
        (by_page ? call.num_page_writes : call.num_token_writes) = 1;
        headstart_attention(&call);
    }
}

// Takes one block in, the other way round. The plan of each call has no items.
EXPORT void headstart_write_block(const AttentionCall *layers, int num_layers, int block, const void *data) {
    const char *at = (const char *)data;
    for (int layer = 0; layer < num_layers; layer++) {
        AttentionCall call = layers[layer];
        call.keys = at, call.values = at + half_bytes(call);
        call.key_token = call.value_token = (int64_t)call.num_kv_heads * call.head_dim;
        call.key_head = call.value_head = call.head_dim;
        call.threads = 1;
        write_rows(call, block);
        at += 2 * half_bytes(call);
    }
}
