// Linears: x [rows, K] times a packed weight [N, K], plus a bias -> [rows, N].
//
// The weight lies in panels of as many outputs as the microkernel takes at once (64, with AVX2 16), words as in
// layout.h: [panels][k_words][outputs], the last panel padded with zeros: it is read in one stream. An output is summed
// over K in order, in chunks of fixed size whose sums are added in order (one accumulator over a long K would drift),
// then the bias, then one rounding (none with wide_out): a row's result depends neither on the rows beside it nor on
// threads.
//
// While the rows of one panel are computed, the next panel is asked for line by line, in even steps: memory then works
// while the arithmetic does, which is worth a fifth of the time at 32 rows. Few rows wait for memory anyway.
#pragma once

#include <algorithm>

#include "microkernel.h"
#include "pool.h"

namespace pagefleet {

constexpr int kPanel = kMaxColumns * kLanes;  // outputs
constexpr int kChunkWords = 256;              // of K

// Mirrored field by field in calls.py.
struct LinearCall {
    const void* x;         // [num_rows, in_features], row stride below, last dimension contiguous
    void* out;             // [num_rows, out_features], contiguous
    const void* weight;    // packed
    const void* bias;      // [out_features] or null
    int64_t x_row_stride;  // elements
    int32_t num_rows, in_features, out_features;
    int32_t num_threads;  // at most
    int32_t wide_out;     // out is float, whatever x is
};

// weight [N, K], rows contiguous -> packed [panels * kPanel * K]; K is a multiple of the elements of a word.
template <class T>
void pack_linear(const T* weight, int64_t row_stride, int out_features, int in_features, T* packed, int num_threads) {
    constexpr int kPerWord = Element<T>::per_word;
    auto pack_panel = [&](int panel) {
        T* words = packed + static_cast<size_t>(panel) * kPanel * in_features;
        std::memset(static_cast<void*>(words), 0, sizeof(T) * kPanel * in_features);
        int columns = std::min(kPanel, out_features - panel * kPanel);
        for (int column = 0; column < columns; ++column) {
            const T* row = weight + (static_cast<int64_t>(panel) * kPanel + column) * row_stride;
            for (int k = 0; k < in_features; k += kPerWord)
                std::memcpy(words + static_cast<size_t>(k) * kPanel + column * kPerWord, row + k, 4);
        }
    };
    parallel_for(num_threads, (out_features + kPanel - 1) / kPanel, pack_panel);
}

// What is asked for ahead: lines [next, end), one every so many steps of K. Nothing when next == end.
struct LinesAhead {
    const uint32_t* next;
    const uint32_t* end;
    int steps;
};

// R rows from `row` on, the outputs [column, column + kPanel) of one panel.
template <class T, int R>
inline void linear_panel(const LinearCall& call, const char* const* x, const uint32_t* panel, LinesAhead& ahead,
                         int row, int column) {
    Vec total[R][kMaxColumns];
    const uint32_t* b[kMaxColumns];
    const int k_words = call.in_features / Element<T>::per_word;
#pragma GCC unroll 8
    for (int c = 0; c < kMaxColumns; ++c) b[c] = panel + c * kLanes;
    for (int begin = 0; begin < k_words; begin += kChunkWords) {
        Vec acc[R][kMaxColumns];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < kMaxColumns; ++c) acc[r][c] = set1(0.0f);
        const int end = std::min(begin + kChunkWords, k_words);
        int at = begin;
        for (; at < end && ahead.next < ahead.end; at += ahead.steps) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead.next), _MM_HINT_T1);
            ahead.next += kLanes;
            accumulate<T, false, R, kMaxColumns>(acc, x, b, b, kPanel, at, std::min(end, at + ahead.steps));
        }
        accumulate<T, false, R, kMaxColumns>(acc, x, b, b, kPanel, std::min(at, end), end);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < kMaxColumns; ++c) total[r][c] = begin == 0 ? acc[r][c] : total[r][c] + acc[r][c];
    }
#pragma GCC unroll 8
    for (int c = 0; c < kMaxColumns; ++c) {
        int first = column + c * kLanes;
        int n = std::min(kLanes, call.out_features - first);
        if (n <= 0) return;
        Vec bias = call.bias == nullptr ? set1(0.0f) : load_part(static_cast<const T*>(call.bias) + first, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            Vec sum = call.bias == nullptr ? total[r][c] : total[r][c] + bias;
            size_t at = static_cast<size_t>(row + r) * call.out_features + first;
            if (call.wide_out != 0)
                store_part(static_cast<float*>(call.out) + at, sum, n);
            else
                store_part(static_cast<T*>(call.out) + at, sum, n);
        }
    }
}

// The rows [first_row, last_row) of one panel; next_panel: what is read after it, or null.
template <class T>
inline void linear_rows(const LinearCall& call, const uint32_t* panel, const uint32_t* next_panel, int first_row,
                        int last_row, int column) {
    constexpr int kLinesAStep = kPanel / kLanes;
    const int groups = (last_row - first_row + kMaxRows - 1) / kMaxRows;
    const int k_words = call.in_features / Element<T>::per_word;
    LinesAhead ahead{nullptr, nullptr, std::max(1, groups / kLinesAStep)};
    if (next_panel != nullptr && groups * 2 > kLinesAStep) {
        ahead.next = next_panel;
        ahead.end = next_panel + static_cast<size_t>(k_words) * kPanel;
    }
    for (int row = first_row; row < last_row; row += kMaxRows) {
        const int count = std::min(kMaxRows, last_row - row);
        const char* x[kMaxRows];
        for (int r = 0; r < count; ++r)
            x[r] = reinterpret_cast<const char*>(static_cast<const T*>(call.x) + (row + r) * call.x_row_stride);
        switch (count) {
#if defined(__AVX512F__)
            case 6: linear_panel<T, 6>(call, x, panel, ahead, row, column); break;
            case 5: linear_panel<T, 5>(call, x, panel, ahead, row, column); break;
#endif
            case 4: linear_panel<T, 4>(call, x, panel, ahead, row, column); break;
            case 3: linear_panel<T, 3>(call, x, panel, ahead, row, column); break;
            case 2: linear_panel<T, 2>(call, x, panel, ahead, row, column); break;
            default: linear_panel<T, 1>(call, x, panel, ahead, row, column);
        }
    }
}

// run_panel(panel, first_row, last_row) for all panels and rows, each once. A unit of work is a run of panels; those that
// are left when every thread has got as many are cut by rows, a part a thread.
template <class Run>
inline void run_panels(int threads, int num_panels, int num_rows, const Run& run_panel) {
    constexpr int kUnitsPerThread = 8;
    const int whole_panels = num_panels / threads * threads;
    const int panels_per_unit = std::max(1, whole_panels / (threads * kUnitsPerThread));
    const int whole_units = (whole_panels + panels_per_unit - 1) / panels_per_unit;
    const int groups = (num_rows + kMaxRows - 1) / kMaxRows;
    const int rows_per_part = std::max(1, (groups + threads - 1) / threads) * kMaxRows;
    const int parts = (num_rows + rows_per_part - 1) / rows_per_part;
    auto compute = [&](int unit) {
        if (unit >= whole_units) {
            const int part = (unit - whole_units) % parts;
            run_panel(whole_panels + (unit - whole_units) / parts, part * rows_per_part,
                      std::min(num_rows, (part + 1) * rows_per_part));
            return;
        }
        const int end = std::min(whole_panels, (unit + 1) * panels_per_unit);
        for (int panel = unit * panels_per_unit; panel < end; ++panel) run_panel(panel, 0, num_rows);
    };
    parallel_for(threads, whole_units + (num_panels - whole_panels) * parts, compute);
}

template <class T>
void linear(const LinearCall& call) {
    constexpr int64_t kWorthAThread = 1 << 19;  // multiply-adds
    const int num_panels = (call.out_features + kPanel - 1) / kPanel;
    const size_t panel_words = static_cast<size_t>(call.in_features) / Element<T>::per_word * kPanel;
    const int64_t work = static_cast<int64_t>(call.num_rows) * call.in_features * call.out_features;
    run_panels(threads_for(call.num_threads, work, kWorthAThread), num_panels, call.num_rows,
               [&](int panel, int first_row, int last_row) {
                   const uint32_t* words = static_cast<const uint32_t*>(call.weight) + panel * panel_words;
                   linear_rows<T>(call, words, panel + 1 < num_panels ? words + panel_words : nullptr, first_row,
                                  last_row, panel * kPanel);
               });
}

}  // namespace pagefleet
