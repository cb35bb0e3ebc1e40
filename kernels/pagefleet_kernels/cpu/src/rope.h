// Rotary embedding of query and key heads, with their RMS norms where a model has them, and the KV write: one pass.
#pragma once

#include <cmath>
#include <vector>

#include "kv_write.h"

namespace pagefleet {

// Mirrored field by field in calls.py.
struct RopeCall {
    WriteCall write;           // keys as they come out of the projection
    const void* query;         // [num_tokens, num_q_heads, head_dim], strides below, last dimension contiguous
    void* turned;              // [num_tokens, num_q_heads, head_dim], contiguous
    const void* query_norm;    // [head_dim] or null
    const void* key_norm;      // [head_dim] or null
    const int64_t* positions;  // [num_tokens]
    const float* table;        // [num_positions, rotary_dim]: cosines, then sines, of rotary_dim / 2 angles
    int64_t query_row_stride, query_head_stride;  // elements
    int32_t num_q_heads, rotary_dim, num_positions;
    int32_t interleaved;  // 0: element i turns with i + rotary_dim / 2; 1: with its neighbour
    float epsilon;
    float norm_offset;  // 1 for models that store the norms' weights - 1
};

inline Status check(const RopeCall& call, int32_t* where) {
    for (int token = 0; token < call.write.num_tokens; ++token) {
        *where = token;
        if (call.positions[token] < 0 || call.positions[token] >= call.num_positions) return kBadPosition;
    }
    return check(call.write, where);
}

// One head in float, through `buffer`: norm, rotation, one rounding.
template <class T>
void turn_head(const RopeCall& call, int token, const T* in, const T* norm, T* out, float* buffer) {
    const int head_dim = call.write.head_dim, half = call.rotary_dim / 2;
    Vec squares = set1(0.0f);
    for (int d = 0; d < head_dim; d += kLanes) {
        int n = std::min(kLanes, head_dim - d);
        Vec x = load_part(in + d, n);
        store_part(buffer + d, x, n);
        squares = fma(x, x, squares);
    }
    if (norm != nullptr) {
        Vec scale = set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(head_dim) + call.epsilon));
        for (int d = 0; d < head_dim; d += kLanes) {
            int n = std::min(kLanes, head_dim - d);
            store_part(buffer + d, load_part(buffer + d, n) * scale * (load_part(norm + d, n) + set1(call.norm_offset)), n);
        }
    }
    const float* cosines = call.table + call.positions[token] * call.rotary_dim;
    const float* sines = cosines + half;
    if (call.interleaved != 0) {
        for (int d = 0; d < half; ++d) {
            float a = buffer[2 * d], b = buffer[2 * d + 1];
            buffer[2 * d] = a * cosines[d] - b * sines[d];
            buffer[2 * d + 1] = b * cosines[d] + a * sines[d];
        }
    } else {
        for (int d = 0; d < half; d += kLanes) {
            int n = std::min(kLanes, half - d);
            Vec a = load_part(buffer + d, n), b = load_part(buffer + half + d, n);
            Vec c = load_part(cosines + d, n), s = load_part(sines + d, n);
            store_part(buffer + d, a * c - b * s, n);
            store_part(buffer + half + d, b * c + a * s, n);
        }
    }
    for (int d = 0; d < head_dim; d += kLanes) {
        int n = std::min(kLanes, head_dim - d);
        store_part(out + d, load_part(buffer + d, n), n);
    }
}

template <class T>
void rope_write_kv(const RopeCall& call) {
    constexpr int64_t kWorthAThread = 1 << 16;  // elements
    constexpr int kTokensPerUnit = 8;
    const WriteCall& write = call.write;
    const Layout layout(write.num_kv_heads, write.head_dim, write.v_head_dim, write.block_size, Element<T>::per_word);
    auto turn_queries = [&](int first, float* buffer) {
        for (int token = first; token < std::min(first + kTokensPerUnit, write.num_tokens); ++token)
            for (int head = 0; head < call.num_q_heads; ++head)
                turn_head(call, token,
                          static_cast<const T*>(call.query) + token * call.query_row_stride +
                              head * call.query_head_stride,
                          static_cast<const T*>(call.query_norm),
                          static_cast<T*>(call.turned) +
                              (static_cast<size_t>(token) * call.num_q_heads + head) * write.head_dim,
                          buffer);
    };
    // One head at a time, as in write_kv.
    auto turn_keys = [&](int head, float* buffer, T* turned) {
        for (int token = 0; token < write.num_tokens; ++token) {
            if (write.slots[token] < 0) continue;
            turn_head(call, token,
                      static_cast<const T*>(write.key) + token * write.key_row_stride + head * write.key_head_stride,
                      static_cast<const T*>(call.key_norm), turned, buffer);
            store_token(layout, write.kv, write.slots[token], head, turned,
                        static_cast<const T*>(write.value) + token * write.value_row_stride +
                            head * write.value_head_stride);
        }
    };
    auto unit = [&](int index) {
        static thread_local std::vector<float> buffer;
        static thread_local std::vector<T> turned;
        buffer.resize(static_cast<size_t>(write.head_dim));
        turned.resize(static_cast<size_t>(write.head_dim));
        if (index < write.num_kv_heads)
            turn_keys(index, buffer.data(), turned.data());
        else
            turn_queries((index - write.num_kv_heads) * kTokensPerUnit, buffer.data());
    };
    int64_t elements = static_cast<int64_t>(write.num_tokens) * (call.num_q_heads + 2 * write.num_kv_heads) *
                       write.head_dim;
    int threads = threads_for(write.num_threads, elements, kWorthAThread);
    parallel_for(threads, write.num_kv_heads + (write.num_tokens + kTokensPerUnit - 1) / kTokensPerUnit, unit);
}

}  // namespace pagefleet
