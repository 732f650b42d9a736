// Paged attention: the arguments from Python, and the layout of KV pages.
//
// A page holds PAGE token slots of one kv head, in words of four bytes: two bf16 or one fp32.
//   keys    [dims / W][PAGE][W]   so that a vector is one word of 16 tokens, and a score is a sum down the page
//   values  [PAGE / W][dims][W]   so that a vector is 16 dims of a word of tokens, and an output is a sum down the page
// with W elements per word and dims = head_dim rounded up to 16; padding stays zero. A block of B tokens has
// ceil(B / PAGE) pages, the last partly filled if B is not a multiple of PAGE. Per layer the pool is
// [keys, values][kv heads][blocks][pages of a block][words of a page].
#pragma once

#include "common.h"

enum { PAGE = 16, MAX_DIMS = 512, MICRO_ROWS = 6 };
#if defined(AMX_TILES)
enum { TILE_ROWS = 96 };
#else
enum { TILE_ROWS = 48 };
#endif

// A row's softmax is computed in segments of pages, and joined from them in order. Segments depend on positions alone:
// whatever reads a segment, for however many rows, adds the same numbers in the same order. So nodes and parts of a plan
// begin and end where segments do.
enum { MAX_SEGMENT = 16, MIN_SEGMENT = 4 };  // pages

// Work of one kv head: rows [row_begin, row_end) of the tokens entries[entry], times the blocks
// tables[table + block_begin .. table + block_end). A row is one query head of one token.
struct Item {
    int32_t entry, row_begin, row_end;
    int32_t table, block_begin, block_end;
};

// One token in an item: it attends to positions below `limit`. Its result is final if `slot` is -1. Else the item's
// state is stored there for a merge: one slot if it begins at block 0, or one per segment.
struct Entry {
    int32_t token, limit, slot, merge;
};

// The states of one token, in the order of positions: slots [slot, slot + count).
struct Merge {
    int32_t token, slot, count;
};

// Header of a plan; Items, Entries and Merges follow it, in this order.
struct Plan {
    int32_t num_items, num_entries, num_merges, num_slots;
    int32_t num_groups;    // sets of sequences whose shared blocks are read once
    int32_t grouped_blocks;  // blocks that groups read, each counted once
    int64_t cost;          // of one kv head; see attention_plan.cpp
};

// A step, as FlashInfer's arrays; see StepInputs.
struct StepTables {
    const int32_t *qo_indptr, *starts, *kv_indptr, *kv_indices;
    int32_t num_rows, block_size;
    int32_t window;  // 0: none
    int32_t group;   // query heads per kv head
    int32_t num_kv_heads, threads;
    int32_t sharing;      // 0: never, 1: where it saves time, 2: wherever blocks are shared
    int32_t split_blocks;  // minimum blocks of a part when a long row is split; 0: never split
};

// One layer of one step. Strides count elements; the last dimension of queries, keys and values is contiguous.
struct AttentionCall {
    const void *queries, *keys, *values;
    void *out;        // [tokens, query heads, head_dim], contiguous
    float *lse;       // [tokens, query heads], natural logarithm of the sum of exponentials, sink included; or null
    void *key_pages, *value_pages;
    const int32_t *plan;
    const int32_t *tables;
    float *parts;      // [slots, query heads, dims]
    float *part_sums;  // [slots, query heads, 2]: greatest score in base 2, sum of the weights relative to it
    int32_t *arrived;  // [merges, kv heads], zero between calls
    const int32_t *page_writes;   // [num_page_writes, 2]: first token, page
    const int32_t *token_writes;  // [num_token_writes, 2]: token, page * PAGE + offset in the page
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t head_words;  // words of one kv head in the pool
    int32_t num_page_writes, num_token_writes;
    int32_t head_dim, num_kv_heads, group, block_size;
    int32_t is_bf16, window, threads;
    float scale, softcap;  // softcap 0: none
    // [query heads], or null: a score that is added to the softmax of every row of the head and has no value.
    const float *sinks;
};

static inline int padded_dims(int head_dim) { return (head_dim + 15) / 16 * 16; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Returns the end of the segment of `page`, a page of a block table. Segments grow with the position: a shared prefix is
// read once up to its last whole segment. A block whose pages do not divide a segment has segments of its own.
static inline int segment_end(int page, int pages_per_block) {
    int within = page % pages_per_block, rest = pages_per_block - within;
    if (MIN_SEGMENT % pages_per_block != 0) {
        int left = MAX_SEGMENT - within % MAX_SEGMENT;
        return page + (left < rest ? left : rest);
    }
    int size = page < 8 * MIN_SEGMENT ? MIN_SEGMENT : page < 16 * MIN_SEGMENT ? 2 * MIN_SEGMENT : MAX_SEGMENT;
    return (page / size + 1) * size;
}

// Returns the last block that begins a segment, `block` at most.
static inline int segment_begin(int block, int pages_per_block) {
    while (block > 0 && segment_end(block * pages_per_block - 1, pages_per_block) != block * pages_per_block) block--;
    return block;
}
