// Linears with weights in their own scales: x [rows, K] times w[n, k] = scale[n, g] * level[n, k] + minimum[n, g], where
// g = k / group and a level is a small integer: one of 16 (four bits a weight), or any of a signed byte.
//
// Levels are exact in bf16, so nothing is rounded that the format has not rounded itself: a group's dot product of x and
// levels is summed as in linear.h, then total = scale * dot + total and total = minimum * (sum of the group's x) + total,
// group by group, in float32. As there, a row's result depends neither on the rows beside it nor on threads.
//
// A panel of outputs lies in one piece, group by group: scales [kPanel], minimums [kPanel] if there are any (both float16
// or both float), then the levels of each pair of k's in turn (see pack_panel). A group is unpacked once, in L1, for all
// rows of a chunk.
#pragma once

#include <type_traits>
#include <vector>

#include "linear.h"

namespace pagefleet {

constexpr int kMaxGroup = 32;  // elements of K
constexpr int kPair = 2;       // elements of K that lie side by side

// Mirrored field by field in calls.py.
struct GroupedLinearCall {
    const void* x;         // [num_rows, in_features], row stride below, last dimension contiguous
    void* out;             // [num_rows, out_features], contiguous
    const void* weight;    // packed
    const void* bias;      // [out_features] or null
    int64_t x_row_stride;  // elements
    int32_t num_rows, in_features, out_features;
    int32_t num_threads;   // at most
    int32_t wide_out;      // out is float, whatever x is
    int32_t group;         // elements of K that share a scale: even, divides in_features, at most kMaxGroup
    int32_t bits;          // 4: nibbles that name a level; 8: the level itself
    int32_t wide_scales;   // scales and minimums are float, else float16
    int32_t has_minimums;
    int8_t levels[16];     // of nibbles
};

// Mirrored field by field in calls.py.
struct PackGroupedCall {
    const uint8_t* codes;  // [num_outputs, in_features]: which of the 16 levels, or the level as a signed byte
    const void* scales;    // [num_outputs, in_features / group]
    const void* minimums;  // likewise or null
    void* packed;          // the panels of these outputs
    int32_t num_outputs, in_features, group, bits, wide_scales, num_threads;
};

inline size_t scale_bytes(bool wide) { return wide ? 4 : 2; }

// Of one panel of one group.
inline size_t group_bytes(int group, int bits, bool wide_scales, bool has_minimums) {
    size_t scales = kPanel * scale_bytes(wide_scales) * (has_minimums ? 2 : 1);
    return scales + static_cast<size_t>(kPanel * group * bits / 8);
}

// Where output `column` of a panel has its code of element k of the group, in codes of that size. Nibbles: byte-pairs of
// one output and one pair of k's, whose four nibbles belong to outputs 16 apart; with 16 outputs in a panel the nibbles of
// a pair share a byte. Bytes: the four of a quad of k's side by side, 16 outputs after another.
inline size_t code_place(int bits, int column, int k) {
    const size_t lane = static_cast<size_t>(column % kLanes), tile = static_cast<size_t>(column / kLanes);
    const size_t pair = static_cast<size_t>(k / kPair), parity = static_cast<size_t>(k % kPair);
    if (bits == 8) return (pair / 2 * kMaxColumns + tile) * kLanes * 4 + lane * 4 + pair % 2 * 2 + parity;
    return pair * kPanel * kPair + (lane * kPair + parity) * kMaxColumns + tile;
}

inline void pack_grouped_panel(const PackGroupedCall& call, int panel) {
    const int groups = call.in_features / call.group;
    const size_t bytes = group_bytes(call.group, call.bits, call.wide_scales != 0, call.minimums != nullptr);
    const size_t scale = scale_bytes(call.wide_scales != 0);
    const int columns = std::min(kPanel, call.num_outputs - panel * kPanel);
    char* at = static_cast<char*>(call.packed) + static_cast<size_t>(panel) * static_cast<size_t>(groups) * bytes;
    std::memset(at, 0, static_cast<size_t>(groups) * bytes);
    for (int group = 0; group < groups; ++group, at += bytes) {
        char* place = at;
        for (const void* source : {call.scales, call.minimums}) {
            if (source == nullptr) continue;
            for (int column = 0; column < columns; ++column) {
                size_t from = (static_cast<size_t>(panel) * kPanel + column) * groups + group;
                std::memcpy(place + column * scale, static_cast<const char*>(source) + from * scale, scale);
            }
            place += kPanel * scale;
        }
        uint8_t* levels = reinterpret_cast<uint8_t*>(place);
        for (int column = 0; column < columns; ++column) {
            const uint8_t* codes = call.codes + (static_cast<size_t>(panel) * kPanel + column) * call.in_features +
                                   static_cast<size_t>(group) * call.group;
            for (int k = 0; k < call.group; ++k) {
                const size_t place_in = code_place(call.bits, column, k);
                if (call.bits == 8)
                    levels[place_in] = codes[k];
                else
                    levels[place_in / 2] |= static_cast<uint8_t>((codes[k] & 15) << (place_in % 2 * 4));
            }
        }
    }
}

inline void pack_grouped(const PackGroupedCall& call) {
    auto pack_panel = [&](int panel) { pack_grouped_panel(call, panel); };
    parallel_for(call.num_threads, (call.num_outputs + kPanel - 1) / kPanel, pack_panel);
}

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

// R rows of one group: total[r] [kPanel] += scale * (x . levels) + minimum * sum of x.
template <class T, int R>
inline void grouped_rows(float* total, const char* const* x, const float* sums, size_t sums_stride,
                         const uint32_t* words, int num_words, const Vec (&scales)[kMaxColumns], const Vec* minimums) {
    Vec acc[R][kMaxColumns];
    const uint32_t* b[kMaxColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kMaxColumns; ++c) b[c] = words + c * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kMaxColumns; ++c) acc[r][c] = set1(0.0f);
    accumulate<T, false, R, kMaxColumns>(acc, x, b, b, kPanel, 0, num_words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        Vec sum = set1(minimums == nullptr ? 0.0f : sums[static_cast<size_t>(r) * sums_stride]);
#pragma GCC unroll 8
        for (int c = 0; c < kMaxColumns; ++c) {
            float* place = total + r * kPanel + c * kLanes;
            Vec next = fma(scales[c], acc[r][c], load(place));
            store(place, minimums == nullptr ? next : fma(minimums[c], sum, next));
        }
    }
}

// Sums of each group of a row of x, in order of lanes.
template <class T>
inline void sum_groups(const T* x, int groups, int group, float* sums) {
    for (int g = 0; g < groups; ++g, x += group) {
        Vec sum = set1(0.0f);
        for (int k = 0; k < group; k += kLanes) sum = sum + load_part(x + k, std::min(kLanes, group - k));
        sums[g] = reduce_add(sum);
    }
}

// Totals of rows [first_row, last_row) [kPanel] -> out, from output `column` on.
template <class T>
inline void write_rows(const GroupedLinearCall& call, const float* totals, int first_row, int last_row, int column) {
    const int width = std::min(kPanel, call.out_features - column);
    for (int row = first_row; row < last_row; ++row, totals += kPanel) {
        const size_t at = static_cast<size_t>(row) * static_cast<size_t>(call.out_features) + column;
        for (int first = 0; first < width; first += kLanes) {
            const int n = std::min(kLanes, width - first);
            Vec sum = load(totals + first);
            if (call.bias != nullptr) sum = sum + load_part(static_cast<const T*>(call.bias) + column + first, n);
            if (call.wide_out != 0)
                store_part(static_cast<float*>(call.out) + at + first, sum, n);
            else
                store_part(static_cast<T*>(call.out) + at + first, sum, n);
        }
    }
}

#if defined(__AVX512BF16__)
// The same for a few rows: what is unpacked stays in registers, and so do the totals.
constexpr int kFewRows = 4;

template <int Bits, int R>
inline void grouped_few(const GroupedLinearCall& call, const Levels& levels, const char* panel, const float* sums,
                        const char* const* x, float* totals) {
    using E = Element<Bf16>;
    const int groups = call.in_features / call.group;
    const bool wide = call.wide_scales != 0, has_minimums = call.has_minimums != 0;
    const size_t bytes = group_bytes(call.group, Bits, wide, has_minimums);
    const size_t scales_bytes = kPanel * scale_bytes(wide);
    const Vec unit = set1(1.0f / excess(Bits));
    Vec total[R][kMaxColumns];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kMaxColumns; ++c) total[r][c] = set1(0.0f);
    int step = 0;
    for (int group = 0; group < groups; ++group, panel += bytes) {
        const char* place = panel + scales_bytes * (has_minimums ? 2 : 1);
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(place);
        Vec acc[R][kMaxColumns];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < kMaxColumns; ++c) acc[r][c] = set1(0.0f);
        for (int pair = 0; pair < call.group / kPair; pair += 2) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, ++step) {
                Words words[kMaxColumns];
                unpack_pair<Bits>(levels, codes, pair + half, words);
                _mm_prefetch(reinterpret_cast<const char*>(codes) + 4096 + (pair + half) * 16 * Bits, _MM_HINT_T0);
                if constexpr (Bits == 8)
                    _mm_prefetch(reinterpret_cast<const char*>(codes) + 4160 + (pair + half) * 16 * Bits, _MM_HINT_T0);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    E::Scalar row = E::broadcast(x[r] + static_cast<size_t>(step) * 4);
#pragma GCC unroll 8
                    for (int c = 0; c < kMaxColumns; ++c) acc[r][c] = E::step(acc[r][c], row, words[c]);
                }
            }
        }
        Vec scales[kMaxColumns];
        load_scales(panel, wide, scales);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < kMaxColumns; ++c) total[r][c] = fma(scales[c] * unit, acc[r][c], total[r][c]);
        if (!has_minimums) continue;
        load_scales(panel + scales_bytes, wide, scales);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < kMaxColumns; ++c)
                total[r][c] = fma(scales[c], set1(sums[static_cast<size_t>(r) * groups + group]), total[r][c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kMaxColumns; ++c) store(totals + r * kPanel + c * kLanes, total[r][c]);
}

template <int Bits>
inline bool grouped_few(const GroupedLinearCall& call, const Levels& levels, const char* panel, const float* sums,
                        int first_row, int last_row, float* totals, Bf16) {
    const char* x[kFewRows];
    if (last_row - first_row > kFewRows) return false;
    for (int row = first_row; row < last_row; ++row)
        x[row - first_row] = reinterpret_cast<const char*>(static_cast<const Bf16*>(call.x) + row * call.x_row_stride);
    sums += call.has_minimums != 0 ? static_cast<size_t>(first_row) * (call.in_features / call.group) : 0;
    switch (last_row - first_row) {
        case 4: grouped_few<Bits, 4>(call, levels, panel, sums, x, totals); break;
        case 3: grouped_few<Bits, 3>(call, levels, panel, sums, x, totals); break;
        case 2: grouped_few<Bits, 2>(call, levels, panel, sums, x, totals); break;
        default: grouped_few<Bits, 1>(call, levels, panel, sums, x, totals);
    }
    return true;
}
#endif

// Rows [first_row, last_row), at most kRowChunk, of the panel whose first output is `column`.
template <class T>
inline void grouped_panel(const GroupedLinearCall& call, const Levels& levels, const char* panel, const float* sums,
                          int first_row, int last_row, int column, float* totals) {
    constexpr int kWords = kMaxGroup / Element<T>::per_word;
    alignas(64) uint32_t words[kWords * kPanel];
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, Bf16>) {
        const bool few = call.bits == 4
                             ? grouped_few<4>(call, levels, panel, sums, first_row, last_row, totals, Bf16{})
                             : grouped_few<8>(call, levels, panel, sums, first_row, last_row, totals, Bf16{});
        if (few) return write_rows<T>(call, totals, first_row, last_row, column);
    }
#endif
    const int groups = call.in_features / call.group, num_words = call.group / Element<T>::per_word;
    const bool wide = call.wide_scales != 0, has_minimums = call.has_minimums != 0;
    const size_t bytes = group_bytes(call.group, call.bits, wide, has_minimums);
    const size_t scales_bytes = kPanel * scale_bytes(wide);
    const Vec unit = set1(1.0f / excess(call.bits));
    std::memset(totals, 0, sizeof(float) * static_cast<size_t>(last_row - first_row) * kPanel);
    for (int group = 0; group < groups; ++group, panel += bytes) {
        for (size_t line = 0; line < bytes; line += 64) _mm_prefetch(panel + 4 * bytes + line, _MM_HINT_T0);
        Vec scales[kMaxColumns], minimums[kMaxColumns];
        load_scales(panel, wide, scales);
        for (Vec& scale : scales) scale = scale * unit;
        if (has_minimums) load_scales(panel + scales_bytes, wide, minimums);
        const Vec* offsets = has_minimums ? minimums : nullptr;
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(panel + scales_bytes * (has_minimums ? 2 : 1));
        if (call.bits == 4)
            unpack_group<T, 4>(levels, codes, call.group, words);
        else
            unpack_group<T, 8>(levels, codes, call.group, words);
        for (int row = first_row; row < last_row; row += kMaxRows) {
            const int count = std::min(kMaxRows, last_row - row);
            const char* x[kMaxRows];
            for (int r = 0; r < count; ++r)
                x[r] = reinterpret_cast<const char*>(static_cast<const T*>(call.x) + (row + r) * call.x_row_stride +
                                                     static_cast<int64_t>(group) * call.group);
            const size_t stride = static_cast<size_t>(groups);
            const float* s = has_minimums ? sums + static_cast<size_t>(row) * stride + group : nullptr;
            float* total = totals + static_cast<size_t>(row - first_row) * kPanel;
            switch (count) {
#if defined(__AVX512F__)
                case 6: grouped_rows<T, 6>(total, x, s, stride, words, num_words, scales, offsets); break;
                case 5: grouped_rows<T, 5>(total, x, s, stride, words, num_words, scales, offsets); break;
#endif
                case 4: grouped_rows<T, 4>(total, x, s, stride, words, num_words, scales, offsets); break;
                case 3: grouped_rows<T, 3>(total, x, s, stride, words, num_words, scales, offsets); break;
                case 2: grouped_rows<T, 2>(total, x, s, stride, words, num_words, scales, offsets); break;
                default: grouped_rows<T, 1>(total, x, s, stride, words, num_words, scales, offsets);
            }
        }
    }
    write_rows<T>(call, totals, first_row, last_row, column);
}

// May throw bad_alloc.
template <class T>
void grouped_linear(const GroupedLinearCall& call) {
    constexpr int64_t kWorthAThread = 1 << 18;  // multiply-adds
    constexpr int kUnitsPerThread = 8;
    constexpr int kRowChunk = 16 * kMaxRows;
    thread_local std::vector<float> sums;
    const int groups = call.in_features / call.group;
    const int num_panels = (call.out_features + kPanel - 1) / kPanel;
    const size_t panel_bytes =
        static_cast<size_t>(groups) * group_bytes(call.group, call.bits, call.wide_scales != 0, call.has_minimums != 0);
    const int64_t work = static_cast<int64_t>(call.num_rows) * call.in_features * call.out_features;
    const int threads = threads_for(call.num_threads, work, kWorthAThread);
    if (call.has_minimums != 0) {
        constexpr int kRowsAtOnce = 32;
        sums.resize(static_cast<size_t>(call.num_rows) * static_cast<size_t>(groups));
        float* of_call = sums.data();
        auto sum_rows = [&](int unit) {
            for (int row = unit * kRowsAtOnce; row < std::min(call.num_rows, (unit + 1) * kRowsAtOnce); ++row)
                sum_groups(static_cast<const T*>(call.x) + row * call.x_row_stride, groups, call.group,
                           of_call + static_cast<size_t>(row) * static_cast<size_t>(groups));
        };
        parallel_for(call.num_rows > kRowsAtOnce ? threads : 1, (call.num_rows + kRowsAtOnce - 1) / kRowsAtOnce,
                     sum_rows);
    }
    const float* row_sums = sums.data();
    // A unit is a run of panels; where there are few panels, a chunk of the rows as well.
    const int panels_per_unit = std::max(1, num_panels / (threads * kUnitsPerThread));
    const int panel_units = (num_panels + panels_per_unit - 1) / panels_per_unit;
    const bool by_rows = threads > 1 && panel_units < threads * kUnitsPerThread / 2;
    const int rows_per_unit = by_rows ? kRowChunk : std::max(1, call.num_rows);
    const int row_units = (call.num_rows + rows_per_unit - 1) / rows_per_unit;
    auto compute = [&](int unit) {
        alignas(64) float totals[kRowChunk * kPanel];
        const Levels levels(call.levels);
        const int first = unit % panel_units * panels_per_unit, last = std::min(num_panels, first + panels_per_unit);
        const int begin = unit / panel_units * rows_per_unit, end = std::min(call.num_rows, begin + rows_per_unit);
        for (int panel = first; panel < last; ++panel)
            for (int row = begin; row < end; row += kRowChunk)
                grouped_panel<T>(call, levels,
                                 static_cast<const char*>(call.weight) + static_cast<size_t>(panel) * panel_bytes,
                                 row_sums, row, std::min(end, row + kRowChunk), panel * kPanel, totals);
    };
    parallel_for(threads, panel_units * row_units, compute);
}

}  // namespace pagefleet
