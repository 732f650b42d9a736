// Attention of one layer over paged KV: writes the step's keys and values, then computes a plan's items.
//
// Decode, chunked prefill and cached prefixes are one case: each row has the range of positions it attends to. The
// products of an item's rows and pages are in attention_tile.h; this file reads the rows, finishes them, and merges them
// if a token has several parts.
#include "attention_amx.h"
#include "attention_tile.h"
#include "pages.h"

namespace {

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
          pool(call),
          dims(padded_dims(call.head_dim)),
          num_heads(call.num_kv_heads * call.group),
          pages_per_block(ceil_div(call.block_size, PAGE)) {}

    void write_page(int index) const {
        int token = call.page_writes[2 * index], page = call.page_writes[2 * index + 1];
        for (int head = 0; head < call.num_kv_heads; head++)
            pages::write_page<Kind::W>({key_row(token, head), call.key_token}, {value_row(token, head), call.value_token},
                                       call.head_dim, pool.keys(head, page), pool.values(head, page));
    }

    void write_token(int index) const {
        int token = call.token_writes[2 * index], slot = call.token_writes[2 * index + 1];
        for (int head = 0; head < call.num_kv_heads; head++) {
            // A key writes to every cache line of its page. They are prefetched together, while the last key is written.
            if (head + 1 < call.num_kv_heads)
                pages::fetch(pool.keys(head + 1, slot / PAGE), pool.page_words);
            else if (index + 1 < call.num_token_writes)
                pages::fetch(pool.keys(0, call.token_writes[2 * index + 3] / PAGE), pool.page_words);
            pages::write_token<Kind::W>(key_row(token, head), value_row(token, head), call.head_dim, slot % PAGE,
                                        pool.keys(head, slot / PAGE), pool.values(head, slot / PAGE));
        }
    }

    // Computes one item for one kv head, and merges the tokens of which all parts are then complete.
    void attend(Tile<Kind> &tile, int head, int index) const {
        const Item &item = items[index];
        open_tile(tile, head, item);
        int low = tile.low / call.block_size, high = ceil_div(tile.high, call.block_size);
        if (low < item.block_begin) low = item.block_begin;
        if (high > item.block_end) high = item.block_end;
        int last = item.block_end * pages_per_block, stored = 0;
        bool is_part = entry_of(item, 0).slot >= 0, apart = is_part && item.block_begin > 0;
        Reading reading = {head, &item, low * pages_per_block, high * pages_per_block};
        for (int page = item.block_begin * pages_per_block, end; page < last; page = end) {
            end = segment_end(page, pages_per_block);
            Piece piece;
            if (open_piece(piece, reading, page, end < last ? end : last)) attend_all_rows(tile, piece, {call.scale, call.softcap});
            if (apart) store_tile(tile, head, item, stored++);
        }
        if (is_part && !apart) store_tile(tile, head, item, stored++);
        close_tile(tile, head, item, stored);
    }

   private:
    const AttentionCall &call;
    const Plan &plan;
    const Item *items;
    const Entry *entries;
    const Merge *merges;
    pages::Pool<Kind::W> pool;
    int dims, num_heads, pages_per_block;

    // The pages [low, high) of an item that its rows see.
    struct Reading {
        int head;
        const Item *item;
        int low, high;
    };

    const element *key_row(int token, int head) const {
        return (const element *)call.keys + token * call.key_token + head * call.key_head;
    }
    const element *value_row(int token, int head) const {
        return (const element *)call.values + token * call.value_token + head * call.value_head;
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
        enum { WORD = Kind::PARTS * Kind::FACTORS };
        int parts = parts_of<Kind>(tile.rows);
        factor packed[MAX_DIMS];
        for (int dim = call.head_dim; dim < dims; dim++) packed[dim] = 0;
        for (int part = 0; part < parts; part++) {
            int first = part_of(tile.rows, part, parts), size = part_of(tile.rows, part + 1, parts) - first;
            for (int row = first; row < first + size; row++) {
                const Entry &entry = entry_of(item, row);
                const element *query = (const element *)call.queries + entry.token * call.query_token +
                                       query_head(item, head, row) * call.query_head;
                Kind::pack(packed, query, call.head_dim);
                factor *to = tile.queries + first * dims + (row - first) * WORD;
                if (size == 1) memcpy(to, packed, sizeof(factor) * dims);
                for (int dim = 0; size > 1 && dim < dims; dim += WORD)
                    memcpy(to + dim * size, packed + dim, sizeof(factor) * WORD);
                tile.upto[row] = entry.limit;
                tile.from[row] = call.window > 0 && entry.limit > call.window ? entry.limit - call.window : 0;
                if (tile.from[row] < tile.low) tile.low = tile.from[row];
                if (tile.upto[row] > tile.high) tile.high = tile.upto[row];
            }
        }
        clear_tile(tile);
    }

    // Sets the state of all rows to that before the first segment.
    void clear_tile(Tile<Kind> &tile) const {
        for (int row = 0; row < tile.rows; row++) tile.set_sums(row, {-INFINITY, 0.0f});
        memset(tile.out, 0, sizeof(float) * tile.rows * dims);
    }

    // Sets `piece` to those of the pages [begin, end) of a segment that are read. Returns whether there are any.
    bool open_piece(Piece &piece, const Reading &reading, int begin, int end) const {
        bool first = begin <= reading.low;
        piece.skip = first ? (reading.low - begin) & 1 : 0;
        if (begin < reading.low) begin = reading.low;
        if (end > reading.high) end = reading.high;
        if (begin >= end) return false;
        piece.count = end - begin;
        piece.whole = true;
        for (int i = 0; i < piece.count + AHEAD; i++) {
            int page = begin + i < reading.high ? begin + i : reading.high - 1;
            int block = page / pages_per_block, sub = page % pages_per_block;
            int64_t where = (int64_t)call.tables[reading.item->table + block] * pages_per_block + sub;
            piece.keys[i] = pool.keys(reading.head, where);
            piece.values[i] = pool.values(reading.head, where);
            if (i >= piece.count) continue;
            int filled = call.block_size - sub * PAGE;
            piece.position[i] = block * call.block_size + sub * PAGE;
            piece.filled[i] = filled < PAGE ? filled : PAGE;
            piece.whole = piece.whole && filled >= PAGE;
        }
        if (!first) return true;
        for (int i = 0; i < 2; i++)  // later ones are prefetched while these are summed
            for (int at = 0; at < pool.page_words; at += PAGE) _mm_prefetch((const char *)(piece.values[i] + at), _MM_HINT_T0);
        return true;
    }

    // Returns the score of a head's sink in base 2; see AttentionCall.
    float sink_of(int query) const { return call.sinks == nullptr ? -INFINITY : call.sinks[query] * LOG2E; }

    // Stores the state of all rows in slot `number` of their tokens, and clears it.
    void store_tile(Tile<Kind> &tile, int head, const Item &item, int number) const {
        for (int row = 0; row < tile.rows; row++) {
            int64_t at = (int64_t)(entry_of(item, row).slot + number) * num_heads + query_head(item, head, row);
            memcpy(call.parts + at * dims, tile.out + row * dims, sizeof(float) * dims);
            Sums sums = tile.sums(row);
            memcpy(call.part_sums + at * 2, &sums, sizeof sums);
        }
        clear_tile(tile);
    }

    // Completes the rows of an item; of rows with several parts, `stored` states are stored.
    void close_tile(Tile<Kind> &tile, int head, const Item &item, int stored) const {
        for (int row = 0, next; row < tile.rows; row = next) {
            const Entry &entry = entry_of(item, row);
            for (next = row; next < tile.rows && &entry_of(item, next) == &entry; next++)
                if (entry.slot < 0)
                    finish(entry.token, query_head(item, head, next), tile.out + next * dims, tile.sums(next));
            if (entry.slot >= 0) arrive(entry.merge, head, (next - row) * stored);
        }
    }

    // Counts the stored states of one token; the thread that stores the last ones merges them.
    void arrive(int index, int head, int states) const {
        const Merge &merge = merges[index];
        int32_t *arrived = call.arrived + (int64_t)index * call.num_kv_heads + head;
        if (__atomic_add_fetch(arrived, states, __ATOMIC_ACQ_REL) < merge.count * call.group) return;
        *arrived = 0;
        for (int query = head * call.group; query < (head + 1) * call.group; query++) merge_parts(merge, query);
    }

    void merge_parts(const Merge &merge, int query) const {
        alignas(64) float out[MAX_DIMS];
        Sums sums = {-INFINITY, 0.0f};
        memset(out, 0, sizeof(float) * dims);
        for (int part = 0; part < merge.count; part++) {
            int64_t at = (int64_t)(merge.slot + part) * num_heads + query;
            Sums next;
            memcpy(&next, call.part_sums + at * 2, sizeof next);
            join(out, sums, call.parts + at * dims, next, dims);
        }
        finish(merge.token, query, out, sums);
    }

    // Adds the sink of a row, divides by the sum of the weights, and writes the row. Not inlined, as `join`.
    SEPARATE void finish(int token, int query, float *out, Sums sums) const {
        float sink = sink_of(query), share = 1.0f;
        if (sink > sums.greatest) {
            share = sums.greatest == -INFINITY ? 0.0f : exp2f(sums.greatest - sink);
            sums = {sink, fmaf(sums.total, share, 1.0f)};
        } else if (sink != -INFINITY) {
            sums.total += exp2f(sink - sums.greatest);
        }
        share = sums.total == 0.0f ? 0.0f : share / sums.total;
        for (int dim = 0; dim < dims; dim += LANES) store(out + dim, mul(load(out + dim), all(share)));
        put(token, query, out, sums.total == 0.0f ? -INFINITY : sums.greatest + log2f(sums.total));
    }

    void put(int token, int query, const float *out, float lse) const {
        int64_t at = (int64_t)token * num_heads + query;
        put_row((element *)call.out + at * call.head_dim, out, call.head_dim);
        if (call.lse != nullptr) call.lse[at] = lse * LN2;
    }
};

// Below these, waking threads costs more time than they save: elements written, and rows times pages times dims.
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
        begin_items(tile);
        // By head, then in the order of the plan: neighbouring items share blocks.
#pragma omp for schedule(dynamic, 1) nowait
        for (int task = 0; task < tasks; task++) layer.attend(tile, task / plan.num_items, task % plan.num_items);
        end_items(tile);
    }
}

}  // namespace

// Writes the step's keys and values, then computes the attention. With a plan without items, it only writes.
EXPORT void headstart_attention(const AttentionCall *call) {
#if defined(AMX_TILES)
    if (call->is_bf16) return run<Tiled>(*call);
#elif defined(__AVX512BF16__)
    if (call->is_bf16) return run<Paired>(*call);
#else
    if (call->is_bf16) return run<Widened>(*call);
#endif
    run<Single>(*call);
}
