#include "common.h"

// Incremented with every change of a signature.
EXPORT int headstart_abi() { return 1; }

// Reads `size` bytes with `threads` threads and returns their sum. Benchmarks compare the speed of kernels with it.
EXPORT uint64_t headstart_read(const uint64_t *data, long size, int threads) {
    uint64_t sum = 0;
    long words = size / 8;
#pragma omp parallel for simd num_threads(threads) schedule(static) reduction(+ : sum)
    for (long i = 0; i < words; i++) sum += data[i];
    return sum;
}
