// The structures of a sampling call, mirrored by sampling.py.
#pragma once

#include "common.h"

namespace {

struct Edits {  // of the logits of one row, applied in this order; ids are in bounds and unique per list
    const int64_t *repeated;  // divided by `repetition`, or multiplied if below 0
    const int64_t *penalised;
    const float *penalties;   // subtracted from `penalised`
    const int64_t *biased;
    const float *biases;      // added to `biased`
    const int64_t *banned;    // set to -inf, unless no other token is left
    const uint32_t *allowed;  // bit i % 32 of word i / 32: token i is allowed; others are set to -inf. Null: all are
    int64_t num_repeated, num_penalised, num_biased, num_banned;
    float repetition;
};

struct Row {
    double uniform;     // in [0, 1): the random number of the draw
    int64_t top_k;      // 0: no limit
    const Edits *edits;  // or null
    int64_t *top_ids;       // [num_top], filled in, most likely first
    float *top_logprobs;    // [num_top], filled in
    int64_t token;      // filled in; with `is_given`, the token whose log-probability is requested
    float temperature;  // 0: the best token, no draw
    float top_p, min_p;  // 1 and 0: no limit
    float best;         // filled in: the greatest logit before edits; if not finite, nothing else is computed
    float logprob;      // filled in, if requested
    int32_t num_top;    // number of alternatives to return; -1: no log-probability either
    int32_t is_given;
};

}  // namespace
