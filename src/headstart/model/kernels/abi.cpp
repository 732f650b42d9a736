#include "amx.h"

// Incremented with every change of a signature.
EXPORT int headstart_abi() { return 2; }

// One operation on tiles for each of `count` [16, 16] of c: c += a [16, 32] times b [16 pairs, 16 columns, 2] in bf16, or of
// `byte_bits` 7 or 8, with a sign or without one in a, a [16, 64] times b [16 quadruples, 16 columns, 4] in int8 with int32
// sums. Returns 0, without any change, in a variant without tiles.
EXPORT int headstart_tile_dot([[maybe_unused]] const bf16 *a, [[maybe_unused]] const bf16 *b, [[maybe_unused]] float *c,
                              [[maybe_unused]] long count, [[maybe_unused]] int byte_bits) {
#if defined(AMX_TILES)
    amx::Shapes shapes;
    for (int t = 0; t < 3; t++) shapes.set(t, amx::ROWS, 64);
    amx::Tiles tiles;
    tiles.configure(shapes);
    for (long i = 0; i < count; i++, a += 512, b += 512, c += 256) {
        tiles.load<0>(c, 64), tiles.load<1>(a, 64), tiles.load<2>(b, 64);
        if (byte_bits == 7) tiles.dot_bytes<0, 1, 2, int8_t>();
        else if (byte_bits == 8) tiles.dot_bytes<0, 1, 2, uint8_t>();
        else tiles.dot<0, 1, 2>();
        tiles.store<0>(c, 64);
    }
    tiles.release();
    return 1;
#else
    return 0;
#endif
}

// Reads `size` bytes with `threads` threads and returns their sum. Benchmarks compare the speed of kernels with it.
EXPORT uint64_t headstart_read(const uint64_t *data, long size, int threads) {
    uint64_t sum = 0;
    long words = size / 8;
#pragma omp parallel for simd num_threads(threads) schedule(static) reduction(+ : sum)
    for (long i = 0; i < words; i++) sum += data[i];
    return sum;
}
