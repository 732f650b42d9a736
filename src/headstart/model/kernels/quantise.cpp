// Rounding of bf16 weights to 4 bits: blocks of Q4_1, with an fp16 scale and minimum for each 32 inputs of an output.
//
// The range of a block is tried in several widths, since a narrower one serves most weights better than the one from
// the least to the greatest. For the integers of each, scale and minimum are also fitted by least squares. The
// candidate with the least sum of squared errors is stored.
#include "common.h"

namespace {

constexpr int SIZE = 32, BLOCK_BYTES = 20;
constexpr float WIDTHS[] = {1.0f, 0.95f, 0.9f, 0.85f};  // mirrored by quantise.py

struct Candidate {
    uint16_t scale, least;  // fp16
    float whole[SIZE], error;
};

inline uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// Rounds the values to scale * whole + least, with the integers of `best` or new ones, and keeps the better result.
inline void attempt(const float *values, float scale, float least, bool keep_integers, Candidate &best) {
    Candidate next{to_half(scale), to_half(least), {0}, 0};
    float step = _cvtsh_ss(next.scale), from = _cvtsh_ss(next.least), inverse = step > 0 ? 1.0f / step : 0.0f, sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < SIZE; i++) {
        float near = rintf((values[i] - from) * inverse);
        near = keep_integers ? best.whole[i] : near < 0.0f ? 0.0f : near > 15.0f ? 15.0f : near;
        float off = near * step + from - values[i];
        next.whole[i] = near, sum += off * off;
    }
    next.error = sum;
    if (sum < best.error) best = next;
}

void round_block(const float *values, uint8_t *out) {
    float least = values[0], greatest = values[0], mean = 0;
    for (int i = 0; i < SIZE; i++) {
        least = values[i] < least ? values[i] : least;
        greatest = values[i] > greatest ? values[i] : greatest;
        mean += values[i] / SIZE;
    }
    Candidate best{0x7e00, 0, {0}, INFINITY};  // NaN, if a weight is: then no candidate has an error
    for (float width : WIDTHS) {
        float middle = (least + greatest) * 0.5f, reach = (greatest - least) * 0.5f * width;
        Candidate tried{0x7e00, 0, {0}, INFINITY};
        attempt(values, reach * 2.0f / 15.0f, middle - reach, false, tried);
        float average = 0, both = 0, square = 0;
        for (int i = 0; i < SIZE; i++) average += tried.whole[i] / SIZE;
        for (int i = 0; i < SIZE; i++) {
            both += (tried.whole[i] - average) * (values[i] - mean);
            square += (tried.whole[i] - average) * (tried.whole[i] - average);
        }
        if (square > 0) attempt(values, both / square, mean - both / square * average, true, tried);
        if (tried.error < best.error) best = tried;
    }
    memcpy(out, &best.scale, 2);
    memcpy(out + 2, &best.least, 2);
    for (int i = 0; i < 16; i++) out[4 + i] = (uint8_t)((int)best.whole[i] | (int)best.whole[16 + i] << 4);
}

}  // namespace

// Rounds weight [rows, in_features] to blocks [rows, in_features / 32, 20]; in_features is a multiple of 32.
EXPORT void headstart_quantise_q4_1(const bf16 *weight, uint8_t *blocks, long rows, long in_features, int threads) {
    long count = in_features / SIZE;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        for (long b = 0; b < count; b++) {
            float values[SIZE];
            for (int i = 0; i < SIZE; i++) values[i] = to_float(weight[row * in_features + b * SIZE + i]);
            round_block(values, blocks + (row * count + b) * BLOCK_BYTES);
        }
    }
}
