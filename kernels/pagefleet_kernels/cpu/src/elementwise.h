// Row-wise neighbours of attention: add + norm, activation. Each row on its own, computed in float, rounded once.
#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "simd.h"

namespace pagefleet {

constexpr int kRowsPerUnit = 8;

// body(row) for every row; threads only where there is work for them.
template <class Body>
void for_rows(int num_threads, int num_rows, int64_t elements_per_row, Body& body) {
    constexpr int64_t kWorthAThread = 1 << 16;  // elements
    auto unit = [&](int index) {
        int last = std::min(num_rows, (index + 1) * kRowsPerUnit);
        for (int row = index * kRowsPerUnit; row < last; ++row) body(row);
    };
    parallel_for(threads_for(num_threads, num_rows * elements_per_row, kWorthAThread),
                 (num_rows + kRowsPerUnit - 1) / kRowsPerUnit, unit);
}

// body(d, n) for every Vec of a row: n elements from d on, n known to the compiler but for the last.
template <class Body>
inline __attribute__((always_inline)) void for_vecs(int width, Body body) {
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) body(d, kLanes);
    if (d < width) body(d, width - d);
}

// Mirrored field by field in calls.py.
struct NormCall {
    const void* x;       // [num_rows, width], row stride below
    void* residual;      // [num_rows, width], contiguous, or null: x is added to it, rounded, and normalised
    const void* weight;  // [width]
    const void* bias;    // [width] or null
    void* out;           // [num_rows, width], contiguous; null: only the sum is wanted
    int64_t x_row_stride;
    int32_t num_rows, width;
    int32_t num_threads;
    int32_t centred;  // 0: RMS norm; 1: the mean is taken off first (LayerNorm)
    float epsilon;
    float weight_offset;  // 1 for models that store weight - 1
    float x_scale;        // of x before it is added
};

// out = (h - m) / sqrt(mean((h - m)^2) + epsilon) * (weight + offset) + bias, h = residual + x * x_scale, m its mean
// where centred, else 0.
template <class T>
void add_norm(const NormCall& call) {
    const float count = static_cast<float>(call.width);
    auto norm = [&](int row) {
        const T* x = static_cast<const T*>(call.x) + row * call.x_row_stride;
        T* residual = call.residual == nullptr ? nullptr : static_cast<T*>(call.residual) + int64_t{row} * call.width;
        Vec squares = set1(0.0f), other_squares = set1(0.0f), total = set1(0.0f);  // of every second Vec
        for_vecs(call.width, [&](int d, int n) __attribute__((always_inline)) {
            Vec h = load_part(x + d, n);
            if (residual != nullptr) {
                store_part(residual + d, load_part(residual + d, n) + h * set1(call.x_scale), n);
                h = load_part(residual + d, n);
            }
            Vec sum = fma(h, h, squares);
            squares = other_squares;
            other_squares = sum;
            total = total + h;
        });
        if (call.out == nullptr) return;
        const T* h = residual == nullptr ? x : residual;
        float mean = 0.0f, variance = reduce_add(squares + other_squares) / count;
        if (call.centred != 0) {
            mean = reduce_add(total) / count;
            variance = 0.0f;
            for (int d = 0; d < call.width; ++d) {
                float difference = to_float(h[d]) - mean;
                variance += difference * difference;
            }
            variance /= count;
        }
        T* out = static_cast<T*>(call.out) + int64_t{row} * call.width;
        Vec scale = set1(1.0f / std::sqrt(variance + call.epsilon));
        Vec offset = set1(call.weight_offset), centre = set1(mean);
        for_vecs(call.width, [&](int d, int n) __attribute__((always_inline)) {
            Vec weight = load_part(static_cast<const T*>(call.weight) + d, n) + offset;
            Vec y = (load_part(h + d, n) - centre) * scale * weight;
            if (call.bias != nullptr) y = y + load_part(static_cast<const T*>(call.bias) + d, n);
            store_part(out + d, y, n);
        });
    };
    for_rows(call.num_threads, call.num_rows, call.width, norm);
}

// Mirrored field by field in calls.py.
struct GateCall {
    const void* gate_up;  // [num_rows, 2 * width], row stride below: gates, then ups; [num_rows, width] when not gated
    void* out;            // [num_rows, width], contiguous
    int64_t row_stride;
    int32_t num_rows, width;
    int32_t activation;  // 0: x * sigmoid(x); 1: GELU, tanh form
    int32_t gated;       // 0: there are no ups
    int32_t num_threads;
};

inline Vec silu(Vec x) { return x / (set1(1.0f) + exp2(x * set1(-kLog2E))); }

// x / 2 * (1 + tanh(u)) = x * sigmoid(2u), which does not cancel where tanh is near -1.
inline Vec gelu_tanh(Vec x) {
    Vec u = set1(0.79788456080286536f) * x * fma(set1(0.044715f), x * x, set1(1.0f));
    return x / (set1(1.0f) + exp2(u * set1(-2.0f * kLog2E)));
}

// out = activation(gate) * up, or activation(gate).
template <class T>
void gate(const GateCall& call) {
    auto one = [&](int row) {
        const T* gates = static_cast<const T*>(call.gate_up) + row * call.row_stride;
        T* out = static_cast<T*>(call.out) + int64_t{row} * call.width;
        for_vecs(call.width, [&](int d, int n) __attribute__((always_inline)) {
            Vec x = load_part(gates + d, n);
            Vec activated = call.activation == 0 ? silu(x) : gelu_tanh(x);
            if (call.gated != 0) activated = activated * load_part(gates + call.width + d, n);
            store_part(out + d, activated, n);
        });
    };
    for_rows(call.num_threads, call.num_rows, call.width, one);
}

}  // namespace pagefleet
