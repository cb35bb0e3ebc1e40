// How K and V of one layer lie in memory.
//
// Everything is 32-bit words: one float, or two bf16 that a dot-product step takes together. A tile is 16 tokens of one
// KV head, K first:
//
//   K tile  [k_words][16 tokens]      word i of a token = K[i] (float) or K[2i], K[2i + 1] (bf16)
//   V tile  [v_rows][v_pad]           row i = V of token i (float) or of tokens 2i, 2i + 1 interleaved (bf16)
//
// v_pad is the V width rounded up to 16. The whole: [num_blocks][kv heads][block_size / 16][tile].
#pragma once

#include "simd.h"

namespace pagefleet {

constexpr int kTile = 16;  // tokens

// One element type: how many elements share a word, and one step of a dot product over 16 lanes.
template <class T>
struct Element;

template <>
struct Element<float> {
    static constexpr int per_word = 1;
    using Lanes = Vec;
    using Scalar = Vec;
    static Lanes load_lanes(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
    static Scalar broadcast(const void* p) {
        float x;
        std::memcpy(&x, p, 4);
        return set1(x);
    }
    static Vec step(Vec acc, Scalar a, Lanes b) { return fma(a, b, acc); }
    // Words hold one token each: there is nothing to cut.
    static Lanes keep(Lanes b, uint32_t) { return b; }
    // 2^x, as exact as a weight can be.
    static Vec weight(Vec x) { return exp2(x); }
    // Store 32 softmax weights; returns sum plus them.
    static Vec store_weights(float* p, Vec a, Vec b, Vec sum) {
        store(p, a);
        store(p + kLanes, b);
        return sum + a + b;
    }
};

template <>
struct Element<Bf16> {
    static constexpr int per_word = 2;
#if defined(__AVX512BF16__)
    using Lanes = __m512i;
    using Scalar = __m512i;
    static Lanes load_lanes(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static Scalar broadcast(const void* p) {
        int word;
        std::memcpy(&word, p, 4);
        return _mm512_set1_epi32(word);
    }
    static Vec step(Vec acc, Scalar a, Lanes b) {
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)a, (__m512bh)b)};
    }
    static Lanes keep(Lanes b, uint32_t word_mask) {
        return _mm512_and_si512(b, _mm512_set1_epi32(static_cast<int>(word_mask)));
    }
    // 2^f on [0, 1) by a minimax cubic: a relative error of 8e-5, against 2e-3 of the rounding that follows.
    static Vec weight(Vec x) {
        Vec f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
        Vec p = set1(0.07802452147006989f);
        p = fma(p, f, set1(0.22606715559959412f));
        p = fma(p, f, set1(0.6958335638046265f));
        p = fma(p, f, set1(0.9999251961708069f));
        return {_mm512_scalef_ps(p.v, x.v)};
    }
    // The sum is of the weights as stored: rounding one then changes numerator and denominator alike.
    static Vec store_weights(Bf16* p, Vec a, Vec b, Vec sum) {
        __m512i packed = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
        _mm512_storeu_si512(p, packed);
        const __m512i ones = _mm512_set1_epi32(0x3f803f80);
        return step(sum, packed, ones);
    }
#else
    struct Lanes {
        __m256i lo, hi;
    };
    struct Scalar {
        __m256 even, odd;
    };
    static Lanes load_lanes(const uint32_t* p) {
        const __m256i* q = reinterpret_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    static Scalar broadcast(const void* p) {
        uint32_t word;
        std::memcpy(&word, p, 4);
        __m256i both = _mm256_set1_epi32(static_cast<int>(word));
        return {even(both), odd(both)};
    }
    static Vec step(Vec acc, Scalar a, Lanes b) {
        acc = {_mm256_fmadd_ps(a.even, even(b.lo), acc.lo), _mm256_fmadd_ps(a.even, even(b.hi), acc.hi)};
        return {_mm256_fmadd_ps(a.odd, odd(b.lo), acc.lo), _mm256_fmadd_ps(a.odd, odd(b.hi), acc.hi)};
    }
    static Lanes keep(Lanes b, uint32_t word_mask) {
        __m256i mask = _mm256_set1_epi32(static_cast<int>(word_mask));
        return {_mm256_and_si256(b.lo, mask), _mm256_and_si256(b.hi, mask)};
    }
    static Vec weight(Vec x) { return exp2(x); }
    static Vec store_weights(Bf16* p, Vec a, Vec b, Vec sum) {
        store(p, a);
        store(p + kLanes, b);
        return sum + load(p) + load(p + kLanes);
    }

   private:
    static __m256 even(__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
    static __m256 odd(__m256i words) {
        return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
#endif
};

struct Layout {
    int num_kv_heads, head_dim, v_head_dim;
    int tiles_per_block;
    int k_words;  // words of one token's K
    int v_rows;   // rows of a V tile: kTile / per_word
    int v_pad;    // words of a V row

    Layout(int kv_heads, int k_dim, int v_dim, int block_size, int per_word)
        : num_kv_heads(kv_heads),
          head_dim(k_dim),
          v_head_dim(v_dim),
          tiles_per_block(block_size / kTile),
          k_words(k_dim / per_word),
          v_rows(kTile / per_word),
          v_pad((v_dim + kLanes - 1) / kLanes * kLanes) {}

    size_t k_tile_words() const { return static_cast<size_t>(k_words) * kTile; }
    size_t tile_words() const { return k_tile_words() + static_cast<size_t>(v_rows) * v_pad; }
    size_t block_words() const { return tile_words() * tiles_per_block * num_kv_heads; }

    // The K tile; its V tile follows k_tile_words() later.
    size_t tile_offset(int64_t block, int head, int tile_in_block) const {
        return static_cast<size_t>(block) * block_words() +
               (static_cast<size_t>(head) * tiles_per_block + tile_in_block) * tile_words();
    }
};

}  // namespace pagefleet
