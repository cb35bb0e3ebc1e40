// Linears with weights in their own scales: x [rows, K] times w[n, k] = scale[n, g] * level[n, k] + minimum[n, g], where
// g = k / group and a level is a small integer: one of 16 (four bits a weight), or any of a signed byte.
//
// Levels are exact in bf16, so nothing is rounded that the format has not rounded itself: a group's dot product of x and
// levels is summed as in linear.h, then total = scale * dot + total and total = minimum * (sum of the group's x) + total,
// group by group, in float32. As there, a row's result depends neither on the rows beside it nor on threads.
//
// A group is unpacked once, in L1, for all rows of a chunk; for few rows in registers.
#pragma once

#include <type_traits>
#include <vector>

#include "grouped_levels.h"

namespace pagefleet {

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

#if defined(__AVX512BF16__)
// The same for a few rows: what is unpacked stays in registers, and so do the totals.
constexpr int kFewRows = 4;

template <int Bits, int R>
inline void grouped_few(const GroupedLinearCall& call, const Levels& levels, const char* panel, const float* sums,
                        const char* const* x, float* totals) {
    using E = Element<Bf16>;
    const int groups = call.linear.in_features / call.group;
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
        x[row - first_row] = reinterpret_cast<const char*>(static_cast<const Bf16*>(call.linear.x) + row * call.linear.x_row_stride);
    sums += call.has_minimums != 0 ? static_cast<size_t>(first_row) * (call.linear.in_features / call.group) : 0;
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
        if (few) return write_rows<T>(call.linear, totals, first_row, last_row, column);
    }
#endif
    const int groups = call.linear.in_features / call.group, num_words = call.group / Element<T>::per_word;
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
                x[r] = reinterpret_cast<const char*>(static_cast<const T*>(call.linear.x) + (row + r) * call.linear.x_row_stride +
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
    write_rows<T>(call.linear, totals, first_row, last_row, column);
}

inline Panels panels_of(const GroupedLinearCall& call) {
    constexpr int64_t kWorthAThread = 1 << 18;
    const size_t groups = static_cast<size_t>(call.linear.in_features / call.group);
    return divide_panels(call.linear, groups * group_bytes(call.group, call.bits, call.wide_scales != 0, call.has_minimums != 0),
                         kWorthAThread);
}

// next: the weights that are wanted after these, or nothing. May throw bad_alloc.
template <class T>
void grouped_linear(const GroupedLinearCall& call, const Panels& next) {
    thread_local std::vector<float> sums;
    const int groups = call.linear.in_features / call.group;
    const Panels panels = panels_of(call);
    if (call.has_minimums != 0) {
        constexpr int kRowsAtOnce = 32;
        sums.resize(static_cast<size_t>(call.linear.num_rows) * static_cast<size_t>(groups));
        float* of_call = sums.data();
        auto sum_rows = [&](int unit) {
            for (int row = unit * kRowsAtOnce; row < std::min(call.linear.num_rows, (unit + 1) * kRowsAtOnce); ++row)
                sum_groups(static_cast<const T*>(call.linear.x) + row * call.linear.x_row_stride, groups, call.group,
                           of_call + static_cast<size_t>(row) * static_cast<size_t>(groups));
        };
        parallel_for(call.linear.num_rows > kRowsAtOnce ? panels.threads : 1,
                     (call.linear.num_rows + kRowsAtOnce - 1) / kRowsAtOnce, sum_rows);
    }
    const float* row_sums = sums.data();
    const Levels levels(call.levels);
    run_panels(panels, next, call.linear.num_rows,
               [&](const char* words, int panel, int first_row, int last_row, int64_t read) {
                   alignas(64) float totals[kRowChunk * kPanel];
                   if (read >= 0) Ahead::own().reading(read, read + static_cast<int64_t>(panels.panel_bytes));
                   for (int row = first_row; row < last_row; row += kRowChunk)
                       grouped_panel<T>(call, levels, words, row_sums, row, std::min(last_row, row + kRowChunk),
                                        panel * kPanel, totals);
               });
}

}  // namespace pagefleet
