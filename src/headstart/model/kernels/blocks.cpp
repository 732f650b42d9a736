// Copies of single blocks out of and into the KV pool, in canonical form: for each layer keys, then values,
// [block_size, kv heads, head_dim]. All work is done on the calling thread.
#include "pages.h"

namespace {

// Returns the bytes of one layer's keys, or values, in one block.
int64_t half_bytes(const AttentionCall &call) {
    return (int64_t)call.block_size * call.num_kv_heads * call.head_dim * (call.is_bf16 ? 2 : 4);
}

template <int W>
void read_rows(const AttentionCall &call, int block, void *keys, void *values) {
    typedef typename pages::Of<W>::element element;
    pages::Pool<W> pool(call);
    int pages = ceil_div(call.block_size, PAGE);
    for (int slot = 0; slot < call.block_size; slot++) {
        for (int head = 0; head < call.num_kv_heads; head++) {
            int64_t page = (int64_t)block * pages + slot / PAGE;
            int64_t row = ((int64_t)slot * call.num_kv_heads + head) * call.head_dim;
            pages::read_token<W>(pool.keys(head, page), pool.values(head, page), call.head_dim, slot % PAGE,
                                 (element *)keys + row, (element *)values + row);
        }
    }
}

// Writes page by page if the block consists of whole pages, else token by token.
template <int W>
void write_rows(const AttentionCall &call, int block, const void *keys, const void *values) {
    typedef typename pages::Of<W>::element element;
    pages::Pool<W> pool(call);
    int pages = ceil_div(call.block_size, PAGE);
    int64_t stride = (int64_t)call.num_kv_heads * call.head_dim;
    bool by_page = call.block_size % PAGE == 0;
    for (int head = 0; head < call.num_kv_heads; head++) {
        for (int slot = 0; slot < call.block_size; slot += by_page ? PAGE : 1) {
            int64_t page = (int64_t)block * pages + slot / PAGE, row = slot * stride + head * call.head_dim;
            const element *key = (const element *)keys + row, *value = (const element *)values + row;
            if (by_page)
                pages::write_page<W>({key, stride}, {value, stride}, call.head_dim, pool.keys(head, page),
                                     pool.values(head, page));
            else
                pages::write_token<W>(key, value, call.head_dim, slot % PAGE, pool.keys(head, page),
                                      pool.values(head, page));
        }
    }
}

}  // namespace

EXPORT void headstart_read_block(const AttentionCall *layers, int num_layers, int block, void *data) {
    char *at = (char *)data;
    for (int layer = 0; layer < num_layers; layer++) {
        int64_t half = half_bytes(layers[layer]);
        (layers[layer].is_bf16 ? read_rows<2> : read_rows<1>)(layers[layer], block, at, at + half);
        at += 2 * half;
    }
}

EXPORT void headstart_write_block(const AttentionCall *layers, int num_layers, int block, const void *data) {
    const char *at = (const char *)data;
    for (int layer = 0; layer < num_layers; layer++) {
        int64_t half = half_bytes(layers[layer]);
        (layers[layer].is_bf16 ? write_rows<2> : write_rows<1>)(layers[layer], block, at, at + half);
        at += 2 * half;
    }
}
