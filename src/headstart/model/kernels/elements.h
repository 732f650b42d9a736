// The elements of a row as a product reads them: normalised first if the layer has a norm.
#pragma once

#include "linear.h"

namespace {

// Returns the factor of a row's normalisation, or 1.
template <class Element>
inline float row_factor(const Linear &linear, const Element *x) {
    return linear.norm ? inverse_rms(x, linear.in_features, linear.eps) : 1.0f;
}

// Returns x[i], normalised if the layer has a norm, and rounded to bf16 like the rows between two layers.
inline float element(const bf16 *x, const bf16 *norm, float factor, long i) {
    return norm ? to_float(to_bf16(to_float(x[i]) * factor * to_float(norm[i]))) : to_float(x[i]);
}

}  // namespace
