// Storing rows of K and V in the paged layout, and copying whole blocks.
#pragma once

#include <algorithm>

#include "layout.h"
#include "pool.h"
#include "status.h"

namespace pagefleet {

// Mirrored field by field in calls.py.
struct WriteCall {
    const void* key;       // [num_tokens, num_kv_heads, head_dim], strides below, last dimension contiguous
    const void* value;     // [num_tokens, num_kv_heads, v_head_dim], likewise
    void* kv;              // see layout.h
    const int64_t* slots;  // [num_tokens]; -1: skip
    int64_t key_row_stride, key_head_stride;      // elements
    int64_t value_row_stride, value_head_stride;  // elements
    int32_t num_tokens, num_kv_heads, head_dim, v_head_dim;
    int32_t num_blocks, block_size;
    int32_t num_threads;  // at most
};

inline Status check(const WriteCall& call, int32_t* where) {
    int64_t slots = static_cast<int64_t>(call.num_blocks) * call.block_size;
    for (int token = 0; token < call.num_tokens; ++token) {
        *where = token;
        if (call.slots[token] < -1 || call.slots[token] >= slots) return kBadSlot;
    }
    return kOk;
}

// One token's key and value of one head, to its slot.
template <class T>
void store_token(const Layout& layout, void* kv, int64_t slot, int head, const T* key, const T* value) {
    constexpr int kPerWord = Element<T>::per_word;
    const int block_size = layout.tiles_per_block * kTile;
    const int offset = static_cast<int>(slot % block_size), in_tile = offset % kTile;
    T* tile = reinterpret_cast<T*>(static_cast<uint32_t*>(kv) +
                                   layout.tile_offset(slot / block_size, head, offset / kTile));
    T* k = tile + in_tile * kPerWord;
    for (int word = 0; word < layout.k_words; ++word)
        std::memcpy(k + static_cast<size_t>(word) * kTile * kPerWord, key + word * kPerWord, 4);
    T* v = tile + (layout.k_tile_words() + static_cast<size_t>(in_tile / kPerWord) * layout.v_pad) * kPerWord +
           in_tile % kPerWord;
    for (int d = 0; d < layout.v_head_dim; ++d) v[d * kPerWord] = value[d];
}

template <class T>
void write_kv(const WriteCall& call) {
    constexpr int64_t kWorthAThread = 1 << 16;  // elements
    const Layout layout(call.num_kv_heads, call.head_dim, call.v_head_dim, call.block_size, Element<T>::per_word);
    // One head at a time: two tokens that share a word are then written by one thread.
    auto write_head = [&](int head) {
        for (int token = 0; token < call.num_tokens; ++token)
            if (call.slots[token] >= 0)
                store_token(layout, call.kv, call.slots[token], head,
                            static_cast<const T*>(call.key) + token * call.key_row_stride + head * call.key_head_stride,
                            static_cast<const T*>(call.value) + token * call.value_row_stride +
                                head * call.value_head_stride);
    };
    int64_t elements = static_cast<int64_t>(call.num_tokens) * call.num_kv_heads * (call.head_dim + call.v_head_dim);
    int threads = threads_for(call.num_threads, elements, kWorthAThread);
    parallel_for(threads, call.num_kv_heads, write_head);
}

}  // namespace pagefleet
