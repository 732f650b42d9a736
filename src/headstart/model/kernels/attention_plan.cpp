// The attention plan of a step: which rows read which blocks, which blocks are read once for many rows, and the splits.
//
// Sequences whose tables begin with the same blocks form a tree: a node is a run of blocks and the sequences that share
// it, a leaf is the blocks that one sequence reads alone. A node is made if the tiles of rows it saves cost more than
// merging one more part per row; otherwise its children read these blocks themselves. With a sliding window, a node has
// only blocks that the first tokens of all its sequences see completely; a sequence reads earlier blocks alone. Nodes and
// their parts begin and end where segments do, so a plan does not change the results.
#include "attention.h"

#include <stdlib.h>

namespace {

// Costs in units of one row times one page. For a tile of MICRO_ROWS, loading a page costs as much as TILE_COST rows.
enum { TILE_COST = 3, PARTS_PER_THREAD = 4 };
// A part costs each row about as much as this many pages: it is written, read back and merged. Set so that groups of
// 2 to 32 decoding sequences with 1, 3 and 7 rows per kv head are made only where measurements show no slowdown.
enum { PART_COST = 6 };
// A group also costs the overhead of its items.
enum { GROUP_COST = 32 };

struct Node {
    const int32_t *members;  // sequences
    int32_t count, block_begin, block_end, parts;
};

struct Planner {
    const StepTables *step;
    Node *nodes;
    int32_t num_nodes, num_groups, grouped_blocks;
    uint64_t *keys;  // scratch: sort keys
    int32_t *rows;   // rows[r] is r: the member lists of the leaves
    int32_t *begins;  // for each row, the first block that no node reads yet
};

int32_t tokens_of(const StepTables &step, int32_t row) { return step.qo_indptr[row + 1] - step.qo_indptr[row]; }

const int32_t *table_of(const StepTables &step, int32_t row) { return step.kv_indices + step.kv_indptr[row]; }

int32_t blocks_of(const StepTables &step, int32_t row) {
    return ceil_div(step.starts[row] + tokens_of(step, row), step.block_size);
}

// Returns the number of leading blocks that lie completely before the row's tokens, so that the row writes none of them.
int32_t seen_whole(const StepTables &step, int32_t row) { return step.starts[row] / step.block_size; }

// Returns the first position that the row's first token attends to.
int32_t first_seen(const StepTables &step, int32_t row) {
    return step.window > 0 && step.starts[row] >= step.window ? step.starts[row] - step.window + 1 : 0;
}

int64_t tiles_of(int64_t rows) { return (rows + MICRO_ROWS - 1) / MICRO_ROWS; }

int compare_keys(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

void add_node(Planner &planner, const int32_t *members, int32_t count, int32_t begin, int32_t end) {
    if (begin < end) planner.nodes[planner.num_nodes++] = Node{members, count, begin, end, 1};
}

// Adds a leaf of one row: its blocks up to `end` that no node reads yet.
void add_leaf(Planner &planner, int32_t row, int32_t end) {
    add_node(planner, planner.rows + row, 1, planner.begins[row], end);
    if (planner.begins[row] < end) planner.begins[row] = end;
}

// Returns the first block of a segment from `block` on.
int32_t next_segment(const StepTables &step, int32_t block) {
    int32_t pages = ceil_div(step.block_size, PAGE);
    return segment_begin(block, pages) == block ? block : segment_end(block * pages, pages) / pages;
}

// Returns the first block of a segment that no node reads yet and that the first tokens of all `members` see completely.
int32_t first_common(const Planner &planner, const int32_t *members, int32_t count) {
    int32_t begin = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t seen = ceil_div(first_seen(*planner.step, members[i]), planner.step->block_size);
        if (begin < seen) begin = seen;
        if (begin < planner.begins[members[i]]) begin = planner.begins[members[i]];
    }
    return next_segment(*planner.step, begin);
}

// Returns whether reading `blocks` once for all `members` is cheaper than once per member.
bool pays(const Planner &planner, const int32_t *members, int32_t count, int64_t blocks) {
    const StepTables &step = *planner.step;
    if (step.sharing == 2) return true;
    int64_t rows = 0, apart = 0;
    for (int32_t i = 0; i < count; i++) {
        int64_t own = (int64_t)tokens_of(step, members[i]) * step.group;
        rows += own;
        apart += tiles_of(own);
    }
    int64_t pages = blocks * ceil_div(step.block_size, PAGE);
    return (apart - tiles_of(rows)) * TILE_COST * pages > PART_COST * rows + GROUP_COST;
}

// Adds the nodes of `members`, whose tables are equal in the first `depth` blocks. Reorders `members`.
void grow(Planner &planner, int32_t *members, int32_t count, int32_t depth) {
    const StepTables &step = *planner.step;
    if (count == 1) return add_leaf(planner, members[0], blocks_of(step, members[0]));
    const int32_t *first = table_of(step, members[0]);
    int32_t common = seen_whole(step, members[0]);
    for (int32_t i = 1; i < count; i++) {
        int32_t limit = seen_whole(step, members[i]);
        if (limit < common) common = limit;
    }
    for (int32_t i = 1; i < count && common > depth; i++) {
        const int32_t *table = table_of(step, members[i]);
        int32_t same = depth;
        while (same < common && table[same] == first[same]) same++;
        common = same;
    }
    int32_t begin = first_common(planner, members, count);
    int32_t end = segment_begin(common, ceil_div(step.block_size, PAGE));
    if (end > begin && pays(planner, members, count, end - begin)) {
        for (int32_t i = 0; i < count; i++) {
            add_leaf(planner, members[i], begin);
            planner.begins[members[i]] = end;
        }
        add_node(planner, members, count, begin, end);
        planner.num_groups++;
        planner.grouped_blocks += end - begin;
    }
    // Members without another complete block continue alone: key 0, since block 0 is in no table.
    for (int32_t i = 0; i < count; i++) {
        bool ends = seen_whole(step, members[i]) <= common;
        uint64_t block = ends ? 0 : (uint64_t)table_of(step, members[i])[common];
        planner.keys[i] = block << 32 | (uint32_t)members[i];
    }
    qsort(planner.keys, count, sizeof *planner.keys, compare_keys);
    // The members of a node have no order: its children, which are slices of the same array, may reorder them.
    int32_t *sorted = (int32_t *)malloc(sizeof(int32_t) * count);
    uint32_t *blocks = (uint32_t *)malloc(sizeof(uint32_t) * count);
    for (int32_t i = 0; i < count; i++) {
        sorted[i] = (int32_t)(uint32_t)planner.keys[i];
        blocks[i] = (uint32_t)(planner.keys[i] >> 32);
    }
    memcpy(members, sorted, sizeof(int32_t) * count);
    for (int32_t low = 0, high; low < count; low = high) {
        for (high = low + 1; high < count && blocks[low] != 0 && blocks[high] == blocks[low];) high++;
        grow(planner, members + low, high - low, common);
    }
    free(sorted);
    free(blocks);
}

// Adds the nodes of all sequences; `members` lists them.
void grow_all(Planner &planner, int32_t *members) {
    const StepTables &step = *planner.step;
    for (int32_t row = 0; row < step.num_rows; row++) planner.begins[row] = first_seen(step, row) / step.block_size;
    if (step.sharing != 0) return grow(planner, members, step.num_rows, 0);
    for (int32_t row = 0; row < step.num_rows; row++) add_leaf(planner, row, blocks_of(step, row));
}

int32_t node_tokens(const StepTables &step, const Node &node) {
    int32_t tokens = 0;
    for (int32_t i = 0; i < node.count; i++) tokens += tokens_of(step, node.members[i]);
    return tokens;
}

// Returns the tokens per tile: whole tokens, unless a single token has more rows than a tile.
int32_t tile_tokens(int32_t group) { return group > TILE_ROWS ? 1 : TILE_ROWS / group; }

int32_t items_of(const StepTables &step, const Node &node) {
    int32_t tiles = ceil_div(node_tokens(step, node), tile_tokens(step.group));
    return tiles * ceil_div(step.group, TILE_ROWS);
}

int64_t cost_of(const StepTables &step, const Node &node) {
    int64_t rows = (int64_t)node_tokens(step, node) * step.group;
    int64_t pages = (int64_t)(node.block_end - node.block_begin) * ceil_div(step.block_size, PAGE);
    return (rows + TILE_COST * tiles_of(rows)) * pages;
}

// Splits long nodes if there are too few items for the threads. Returns the cost of one kv head.
int64_t split(Planner &planner) {
    const StepTables &step = *planner.step;
    int64_t cost = 0, items = 0;
    for (int32_t i = 0; i < planner.num_nodes; i++) {
        cost += cost_of(step, planner.nodes[i]);
        items += items_of(step, planner.nodes[i]);
    }
    int64_t wanted = (int64_t)PARTS_PER_THREAD * step.threads;
    if (step.split_blocks == 0 || step.threads < 2 || items * step.num_kv_heads >= wanted) return cost;
    int64_t per_item = cost * step.num_kv_heads / wanted + 1;
    for (int32_t i = 0; i < planner.num_nodes; i++) {
        Node &node = planner.nodes[i];
        int64_t parts = cost_of(step, node) / items_of(step, node) / per_item + 1;
        int64_t most = (node.block_end - node.block_begin) / step.split_blocks;
        if (parts > most) parts = most;
        node.parts = parts < 1 ? 1 : (int32_t)parts;
    }
    return cost;
}

// The output position in a plan. A dry run only counts the structures.
struct Writer {
    Plan head;
    Item *items;
    Entry *entries;
    Merge *merges;
    bool dry;
};

// Returns the first block of part `part` of a node, or its end for the number of parts. A part may be empty.
int32_t part_begin(const StepTables &step, const Node &node, int32_t part) {
    if (part == node.parts) return node.block_end;
    int64_t blocks = node.block_end - node.block_begin;
    int32_t begin = node.block_begin + (int32_t)(blocks * part / node.parts);
    begin = segment_begin(begin, ceil_div(step.block_size, PAGE));
    return begin > node.block_begin ? begin : node.block_begin;
}

// Returns the number of states that a part stores for each of its rows; see Entry.
int32_t states_of(const StepTables &step, int32_t begin, int32_t end) {
    if (begin == 0) return 1;
    int32_t pages = ceil_div(step.block_size, PAGE), states = 0;
    for (int32_t page = begin * pages; page < end * pages; page = segment_end(page, pages)) states++;
    return states;
}

// The parts of one sequence: their number, the states they store for each of its tokens, and, if there are several
// parts, the slot of the next state of its first token.
struct Parts {
    int32_t count, states, slot;
};

void write_node(Writer &out, const StepTables &step, const Node &node, Parts *parts, int32_t part) {
    int32_t begin = part_begin(step, node, part), end = part_begin(step, node, part + 1);
    if (begin == end) return;
    int32_t first_entry = out.head.num_entries, tokens = 0;
    for (int32_t i = 0; i < node.count; i++) {
        int32_t row = node.members[i];
        Parts &own = parts[row];
        for (int32_t at = 0; at < tokens_of(step, row); at++, tokens++) {
            int32_t token = step.qo_indptr[row] + at;
            int32_t slot = own.count < 2 ? -1 : own.slot + at * own.states;
            if (!out.dry) {
                Entry entry = {token, step.starts[row] + at + 1, slot, -1};
                out.entries[out.head.num_entries] = entry;
            }
            out.head.num_entries++;
        }
        own.slot += states_of(step, begin, end);
    }
    int32_t per_tile = tile_tokens(step.group);
    for (int32_t tile = 0; tile < tokens; tile += per_tile) {
        int32_t last = tile + per_tile < tokens ? tile + per_tile : tokens;
        for (int32_t row = tile * step.group; row < last * step.group; row += TILE_ROWS) {
            int32_t stop = row + TILE_ROWS < last * step.group ? row + TILE_ROWS : last * step.group;
            if (!out.dry)
                out.items[out.head.num_items] =
                    Item{first_entry, row, stop, step.kv_indptr[node.members[0]], begin, end};
            out.head.num_items++;
        }
    }
}

void count_parts(const Planner &planner, Parts *parts) {
    const StepTables &step = *planner.step;
    memset(parts, 0, sizeof(Parts) * step.num_rows);
    for (int32_t i = 0; i < planner.num_nodes; i++) {
        const Node &node = planner.nodes[i];
        for (int32_t part = 0; part < node.parts; part++) {
            int32_t begin = part_begin(step, node, part), end = part_begin(step, node, part + 1);
            for (int32_t m = 0; begin < end && m < node.count; m++) {
                parts[node.members[m]].count++;
                parts[node.members[m]].states += states_of(step, begin, end);
            }
        }
    }
}

// Writes, or counts, the whole plan. `parts` [num_rows] and `merge_of` [tokens] are scratch.
void write_plan(Writer &out, const Planner &planner, Parts *parts, int32_t *merge_of) {
    const StepTables &step = *planner.step;
    count_parts(planner, parts);
    for (int32_t row = 0; row < step.num_rows; row++) {
        Parts &own = parts[row];
        if (own.count < 2) continue;
        own.slot = out.head.num_slots;
        for (int32_t token = step.qo_indptr[row]; token < step.qo_indptr[row + 1]; token++) {
            merge_of[token] = out.head.num_merges;
            if (!out.dry) out.merges[out.head.num_merges] = Merge{token, out.head.num_slots, own.states};
            out.head.num_merges++;
            out.head.num_slots += own.states;
        }
    }
    for (int32_t i = 0; i < planner.num_nodes; i++)
        for (int32_t part = 0; part < planner.nodes[i].parts; part++)
            write_node(out, step, planner.nodes[i], parts, part);
    for (int32_t i = 0; !out.dry && i < out.head.num_entries; i++)
        if (out.entries[i].slot >= 0) out.entries[i].merge = merge_of[out.entries[i].token];
}

int64_t bytes_of(const Plan &head) {
    return (int64_t)sizeof(Plan) + (int64_t)sizeof(Item) * head.num_items + (int64_t)sizeof(Entry) * head.num_entries +
           (int64_t)sizeof(Merge) * head.num_merges;
}

}  // namespace

// Writes the plan of `step` into `out` if it fits in `capacity` bytes. Returns the bytes of the plan.
EXPORT int64_t headstart_attention_plan(const StepTables *step, void *out, int64_t capacity) {
    int32_t rows = step->num_rows, tokens = step->qo_indptr[rows];
    // The tree has fewer than 2 * rows nodes. Each row adds at most one leaf before its first group, because all later
    // groups begin where the one before them ends.
    Node *nodes = (Node *)malloc(sizeof(Node) * (3 * rows + 1));
    uint64_t *keys = (uint64_t *)malloc(sizeof(uint64_t) * (rows + 1));
    int32_t *members = (int32_t *)malloc(sizeof(int32_t) * 3 * (rows + 1));
    Parts *parts = (Parts *)malloc(sizeof(Parts) * (rows + 1));
    int32_t *merge_of = (int32_t *)malloc(sizeof(int32_t) * (tokens + 1));
    Planner planner = {step, nodes, 0, 0, 0, keys, members + rows, members + 2 * rows};
    for (int32_t row = 0; row < rows; row++) members[row] = planner.rows[row] = row;
    grow_all(planner, members);
    int64_t cost = split(planner);

    Writer counter = {};
    counter.dry = true;
    write_plan(counter, planner, parts, merge_of);
    Plan head = counter.head;
    head.num_groups = planner.num_groups;
    head.grouped_blocks = planner.grouped_blocks;
    head.cost = cost;
    int64_t needed = bytes_of(head);
    if (needed <= capacity) {
        Writer writer = {};
        writer.items = (Item *)((Plan *)out + 1);
        writer.entries = (Entry *)(writer.items + head.num_items);
        writer.merges = (Merge *)(writer.entries + head.num_entries);
        write_plan(writer, planner, parts, merge_of);
        memcpy(out, &head, sizeof head);
    }
    free(nodes);
    free(keys);
    free(members);
    free(parts);
    free(merge_of);
    return needed;
}
