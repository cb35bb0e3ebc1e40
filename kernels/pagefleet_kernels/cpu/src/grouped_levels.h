// Turns codes and scales of grouped_layout.h into numbers, sixteen outputs at a time.
#pragma once

#include "grouped_layout.h"

namespace pagefleet {

inline Vec load_half(const char* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#else
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
#endif
}

inline void load_scales(const char* p, bool wide, Vec (&scales)[kMaxColumns]) {
    for (int c = 0; c < kMaxColumns; ++c)
        scales[c] = wide ? load(reinterpret_cast<const float*>(p) + c * kLanes) : load_half(p + c * kLanes * 2);
}

// What the words of a group are too large by: bytes are turned into floats where they stand in their 32 bits.
inline float excess(int bits) { return bits == 8 ? 0x1p24f : 1.0f; }

#if defined(__AVX512F__)

using Words = __m512i;  // 16 pairs of bf16

struct Levels {
    __m512i bf16;  // twice over: what selects one has five bits, the highest of them another nibble's

    explicit Levels(const int8_t* levels) {
        uint16_t table[32];
        for (int i = 0; i < 32; ++i) table[i] = to_bf16(static_cast<float>(levels[i % 16])).bits;
        bf16 = _mm512_loadu_si512(table);
    }
};

// The levels of pair `step` of tiles 0 .. kMaxColumns - 1.
template <int Bits>
inline __attribute__((always_inline)) void unpack_pair(const Levels& levels, const uint8_t* codes, int step,
                                                       Words (&words)[kMaxColumns]) {
    if constexpr (Bits == 4) {
        __m512i nibbles = _mm512_loadu_si512(codes + static_cast<size_t>(step) * 64);
        words[0] = _mm512_permutexvar_epi16(nibbles, levels.bf16);
        words[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(nibbles, 4), levels.bf16);
        words[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(nibbles, 8), levels.bf16);
        words[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(nibbles, 12), levels.bf16);
    } else {
        const __m512i top = _mm512_set1_epi32(static_cast<int>(0xff000000u));
#pragma GCC unroll 4
        for (int c = 0; c < kMaxColumns; ++c) {
            __m512i quad = _mm512_loadu_si512(codes + (static_cast<size_t>(step / 2) * kMaxColumns + c) * 64);
            __m512i even = step % 2 == 0 ? _mm512_slli_epi32(quad, 24) : _mm512_slli_epi32(quad, 8);
            __m512i odd = step % 2 == 0 ? _mm512_slli_epi32(quad, 16) : quad;
            __m512 low = _mm512_cvtepi32_ps(step % 2 == 0 ? even : _mm512_and_si512(even, top));
            __m512 high = _mm512_cvtepi32_ps(_mm512_and_si512(odd, top));
            // A float of eight bits: its low half is zero.
            words[c] = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
        }
    }
}

inline void store_pair(uint32_t* row, Words words, Bf16) { _mm512_storeu_si512(row, words); }
inline void store_pair(uint32_t* row, Words words, float) {
    _mm512_storeu_si512(row, _mm512_slli_epi32(words, 16));
    _mm512_storeu_si512(row + kPanel, _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#else

struct Words {
    Vec even, odd;
};

struct Levels {
    __m256 low, high;

    explicit Levels(const int8_t* levels) {
        float table[16];
        for (int i = 0; i < 16; ++i) table[i] = static_cast<float>(levels[i]);
        low = _mm256_loadu_ps(table);
        high = _mm256_loadu_ps(table + 8);
    }

    // The levels that the lowest four bits of each lane name.
    __m256 of(__m256i codes) const {
        __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), upper);
    }
};

template <int Bits>
inline void unpack_pair(const Levels& levels, const uint8_t* codes, int step, Words (&words)[kMaxColumns]) {
    auto eight = [&](int first, __m256& even, __m256& odd) {
        if constexpr (Bits == 4) {
            const void* from = codes + step * kLanes + first;
            __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
            even = levels.of(pairs);
            odd = levels.of(_mm256_srli_epi32(pairs, 4));
        } else {
            const __m256i top = _mm256_set1_epi32(static_cast<int>(0xff000000u));
            const void* from = codes + (step / 2 * kLanes + first) * 4;
            __m256i quad = _mm256_loadu_si256(static_cast<const __m256i*>(from));
            if (step % 2 == 0) quad = _mm256_slli_epi32(quad, 16);
            even = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32(quad, 8), top));
            odd = _mm256_cvtepi32_ps(_mm256_and_si256(quad, top));
        }
    };
    eight(0, words[0].even.lo, words[0].odd.lo);
    eight(8, words[0].even.hi, words[0].odd.hi);
}

inline void store_pair(uint32_t* row, const Words& words, Bf16) {
    auto join = [](__m256 even, __m256 odd) {
        return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
    };
    __m256i* place = reinterpret_cast<__m256i*>(row);
    _mm256_storeu_si256(place, join(words.even.lo, words.odd.lo));
    _mm256_storeu_si256(place + 1, join(words.even.hi, words.odd.hi));
}
inline void store_pair(uint32_t* row, const Words& words, float) {
    store(reinterpret_cast<float*>(row), words.even);
    store(reinterpret_cast<float*>(row + kPanel), words.odd);
}

#endif

// A group of the panel as the microkernel takes it.
template <class T, int Bits>
inline void unpack_group(const Levels& levels, const uint8_t* codes, int group, uint32_t* words) {
    constexpr int kStepWords = kPair / Element<T>::per_word * kPanel;
    for (int step = 0; step < group / kPair; step += 2) {
        Words lanes[kMaxColumns];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            unpack_pair<Bits>(levels, codes, step + half, lanes);
#pragma GCC unroll 4
            for (int c = 0; c < kMaxColumns; ++c) store_pair(words + (step + half) * kStepWords + c * kLanes, lanes[c], T{});
        }
    }
}

}  // namespace pagefleet
