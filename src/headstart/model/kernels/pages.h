// Addresses of pages in the pool, and copies of keys and values between pages and rows [tokens, kv heads, head_dim].
#pragma once

#include "attention.h"

namespace pages {

// The element type of words with W elements.
template <int W>
struct Of;
template <>
struct Of<1> {
    typedef float element;
};
template <>
struct Of<2> {
    typedef bf16 element;
};

// The rows of one head: row r starts at `rows + r * stride`, in elements.
template <int W>
struct Rows {
    const typename Of<W>::element *rows;
    int64_t stride;
};

// Prefetches all cache lines of a page for writing.
static inline void fetch(const uint32_t *page, int page_words) {
    for (int word = 0; word < page_words; word += PAGE) __builtin_prefetch(page + word, 1);
}

// The pages of one layer.
template <int W>
struct Pool {
    uint32_t *key_pages, *value_pages;
    int64_t head_words;  // distance from one kv head to the next
    int page_words;

    explicit Pool(const AttentionCall &call)
        : key_pages((uint32_t *)call.key_pages),
          value_pages((uint32_t *)call.value_pages),
          head_words(call.head_words),
          page_words(PAGE / W * padded_dims(call.head_dim)) {}

    uint32_t *keys(int head, int64_t page) const { return key_pages + head * head_words + page * page_words; }
    uint32_t *values(int head, int64_t page) const { return value_pages + head * head_words + page * page_words; }
};

#if defined(__AVX512F__)
// Transposes 16 x 16 words: row r is the sixteen words of rows[r].
static inline void transpose16(__m512i rows[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // Now lane l of rows[4 i + c] holds column 4 l + c of rows 4 i .. 4 i + 3: transpose the lanes.
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88);
        __m512i high = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int i = 0; i < 16; i++) rows[i] = t[i];
}
#endif

// Transposes sixteen rows of `words` words into `words` vectors of sixteen.
static inline void transpose_page(const uint32_t *const rows[PAGE], int words, uint32_t *page) {
    int word = 0;
#if defined(__AVX512F__)
    for (; word < words; word += 16) {
        int count = words - word < 16 ? words - word : 16;
        __mmask16 present = (__mmask16)((1u << count) - 1);
        __m512i block[16];
        for (int token = 0; token < PAGE; token++)
            block[token] = _mm512_maskz_loadu_epi32(present, rows[token] + word);
        transpose16(block);
        for (int i = 0; i < count; i++) _mm512_storeu_si512(page + (word + i) * PAGE, block[i]);
    }
#else
    for (; word < words; word++)
        for (int token = 0; token < PAGE; token++) memcpy(page + word * PAGE + token, rows[token] + word, 4);
#endif
}

// Interleaves two rows of bf16: word d is element d of the first row and element d of the second.
static inline void interleave(const bf16 *first, const bf16 *second, int dims, bf16 *words) {
    int dim = 0;
#if defined(__AVX512BW__)
    for (; dim + 16 <= dims; dim += 16) {
        __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(first + dim)));
        __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(second + dim)));
        _mm512_storeu_si512(words + 2 * dim, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
#endif
    for (; dim < dims; dim++) {
        words[2 * dim] = first[dim];
        words[2 * dim + 1] = second[dim];
    }
}

// Sets `begins` to the rows of PAGE tokens; rows narrower than `dims` are copied to `scratch` and padded with zeros.
template <int W>
static inline void pad_rows(Rows<W> from, int head_dim, int dims, typename Of<W>::element *scratch,
                            const typename Of<W>::element *begins[PAGE]) {
    for (int token = 0; token < PAGE; token++) {
        const typename Of<W>::element *row = from.rows + token * from.stride;
        begins[token] = row;
        if (head_dim == dims) continue;
        typename Of<W>::element *copy = scratch + token * dims;
        memcpy(copy, row, sizeof *row * head_dim);
        memset(copy + head_dim, 0, sizeof *row * (dims - head_dim));
        begins[token] = copy;
    }
}

template <int W>
static inline void write_page(Rows<W> keys, Rows<W> values, int head_dim, void *key_page, void *value_page) {
    typedef typename Of<W>::element element;
    int dims = padded_dims(head_dim);
    alignas(64) element scratch[PAGE * MAX_DIMS];
    const element *rows[PAGE];
    pad_rows<W>(keys, head_dim, dims, scratch, rows);
    transpose_page((const uint32_t *const *)rows, dims / W, (uint32_t *)key_page);
    pad_rows<W>(values, head_dim, dims, scratch, rows);
    element *page = (element *)value_page;
    for (int word = 0; word < PAGE / W; word++) {
        if constexpr (W == 2)
            interleave(rows[2 * word], rows[2 * word + 1], dims, page + word * dims * 2);
        else
            memcpy(page + word * dims, rows[word], sizeof(float) * dims);
    }
}

// Writes slot `place` of a page with one token, and no byte of another: a word holds the values of two tokens in bf16, and
// threads write neighbouring tokens at the same time.
template <int W>
static inline void write_token(const typename Of<W>::element *key, const typename Of<W>::element *value, int head_dim,
                               int place, uint32_t *key_page, uint32_t *value_page) {
    for (int dim = 0; dim < head_dim; dim += W) {
        uint32_t word = 0;
        memcpy(&word, key + dim, dim + W <= head_dim ? 4 : 2);
        key_page[dim / W * PAGE + place] = word;
    }
    uint32_t *words = value_page + place / W * padded_dims(head_dim);
    if constexpr (W == 1) {
        memcpy(words, value, sizeof(float) * head_dim);
    } else {
        int dim = 0, half = place % W;
#if defined(__AVX512BW__)
        for (; dim + 16 <= head_dim; dim += 16) {
            __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value + dim)));
            _mm512_mask_storeu_epi16(words + dim, 0x55555555u << half, half ? _mm512_slli_epi32(wide, 16) : wide);
        }
#endif
        bf16 *halves = (bf16 *)words;
        for (; dim < head_dim; dim++) halves[W * dim + half] = value[dim];
    }
}

template <int W>
static inline void read_token(const void *key_page, const void *value_page, int head_dim, int place,
                              typename Of<W>::element *key, typename Of<W>::element *value) {
    typedef typename Of<W>::element element;
    const element *keys = (const element *)key_page, *values = (const element *)value_page;
    int dims = padded_dims(head_dim);
    for (int dim = 0; dim < head_dim; dim++) {
        key[dim] = keys[(dim / W * PAGE + place) * W + dim % W];
        value[dim] = values[(place / W * dims + dim) * W + place % W];
    }
}

}  // namespace pages
