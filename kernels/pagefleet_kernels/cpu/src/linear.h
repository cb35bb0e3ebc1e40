// Linears: x [rows, K] times a packed weight [N, K], plus a bias -> [rows, N].
//
// The weight lies in panels of as many outputs as the microkernel takes at once (64, with AVX2 16), words as in
// layout.h: [panels][k_words][outputs], the last panel padded with zeros: it is read in one stream. An output is summed
// over K in order, in chunks of fixed size whose sums are added in order (one accumulator over a long K would drift),
// then the bias, then one rounding (none with wide_out): a row's result depends neither on the rows beside it nor on
// threads.
//
// A panel is gone through chunk by chunk, all rows of a chunk before the next one: a chunk stays near, however long K is.
// Meanwhile the weights that come later are asked for line by line, in even steps: see ahead.h.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "microkernel.h"
#include "pool.h"

namespace pagefleet {

constexpr int kPanel = kMaxColumns * kLanes;  // outputs
constexpr int kChunkWords = 256;              // of K
constexpr int kRowChunk = 16 * kMaxRows;      // rows whose sums are held at once

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

// Who asks for weights ahead while a panel is computed, and how fast: `lines` lines every `words` words of K.
struct Pace {
    Ahead* ahead;  // or null
    int words, lines;
};

// R rows times words [begin, end) of K of a panel, added to totals [R][kPanel].
template <class T, int R>
inline void linear_chunk(const char* const* x, const uint32_t* panel, int begin, int end, float* totals,
                         const Pace& pace) {
    Vec acc[R][kMaxColumns];
    const uint32_t* b[kMaxColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kMaxColumns; ++c) b[c] = panel + c * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kMaxColumns; ++c) acc[r][c] = set1(0.0f);
    int at = begin;
    while (pace.ahead != nullptr && at < end) {
        Lines wanted = pace.ahead->next();
        if (wanted.next == wanted.end) break;
        for (; at < end && wanted.next < wanted.end; at += pace.words) {
            for (int line = 0; line < pace.lines; ++line) wanted.ask();
            accumulate<T, false, R, kMaxColumns>(acc, x, b, b, kPanel, at, std::min(end, at + pace.words));
        }
        pace.ahead->asked(wanted);
    }
    accumulate<T, false, R, kMaxColumns>(acc, x, b, b, kPanel, std::min(at, end), end);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kMaxColumns; ++c) {
            float* total = totals + r * kPanel + c * kLanes;
            store(total, begin == 0 ? acc[r][c] : load(total) + acc[r][c]);
        }
}

// Totals of rows [first_row, last_row) [kPanel] -> out, from output `column` on.
template <class T>
inline void write_rows(const LinearCall& call, const float* totals, int first_row, int last_row, int column) {
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

// The rows [first_row, last_row) of one panel. read: its position in the thread's own panels, see ahead.h; -1: it is
// another's.
template <class T>
inline void linear_rows(const LinearCall& call, const uint32_t* panel, int first_row, int last_row, int column,
                        int64_t read) {
    constexpr int kLinesAWord = kPanel / kLanes;
    constexpr int64_t kWordBytes = kPanel * 4;
    constexpr int64_t kNearPanel = 512 << 10;  // bytes that stay in the second level
    constexpr int64_t kNear = 8192;  // bytes: what a single group of rows reads itself before a prefetch could come
    alignas(64) float totals[kRowChunk * kPanel];
    const int groups = (last_row - first_row + kMaxRows - 1) / kMaxRows;
    const int k_words = call.in_features / Element<T>::per_word;
    Pace pace{read < 0 ? nullptr : &Ahead::own(), std::max(1, groups / kLinesAWord),
              (kLinesAWord + groups - 1) / std::max(1, groups)};
    // Many rows hide the second level's latency, and are quicker with a few of them at a time through a whole panel; so are
    // fewer where the second of two chunks would be short: it costs their sums' way through memory as a long one does.
    const int many_rows = k_words <= kChunkWords * 3 / 2 ? 4 * kMaxRows : kRowChunk;
    const bool whole = last_row - first_row > many_rows && k_words * kWordBytes <= kNearPanel;
    const int span = whole ? k_words : kChunkWords;
    for (int block = first_row; block < last_row; block += kRowChunk) {
        const int block_end = std::min(last_row, block + kRowChunk);
        for (int begin = 0; begin < k_words; begin += span) {
            const int end = std::min(begin + span, k_words);
            if (pace.ahead != nullptr && block == first_row) {
                const int64_t here = read + begin * kWordBytes, there = read + end * kWordBytes;
                pace.ahead->reading(whole ? there : here, groups > 1 ? there : here + kNear);
            }
            for (int row = block; row < block_end; row += kMaxRows) {
                const int count = std::min(kMaxRows, block_end - row);
                const char* x[kMaxRows];
                for (int r = 0; r < count; ++r)
                    x[r] = reinterpret_cast<const char*>(static_cast<const T*>(call.x) + (row + r) * call.x_row_stride);
                float* sums = totals + static_cast<size_t>(row - block) * kPanel;
                for (int at = begin; at < end; at += kChunkWords) {
                    const int stop = std::min(at + kChunkWords, end);
                    switch (count) {
#if defined(__AVX512F__)
                        case 6: linear_chunk<T, 6>(x, panel, at, stop, sums, pace); break;
                        case 5: linear_chunk<T, 5>(x, panel, at, stop, sums, pace); break;
#endif
                        case 4: linear_chunk<T, 4>(x, panel, at, stop, sums, pace); break;
                        case 3: linear_chunk<T, 3>(x, panel, at, stop, sums, pace); break;
                        case 2: linear_chunk<T, 2>(x, panel, at, stop, sums, pace); break;
                        default: linear_chunk<T, 1>(x, panel, at, stop, sums, pace);
                    }
                }
                if (end == k_words) write_rows<T>(call, sums, row, row + count, column);
            }
        }
    }
}

// worth_a_thread: multiply-adds.
inline Panels divide_panels(const LinearCall& call, size_t panel_bytes, int64_t worth_a_thread) {
    const int num_panels = (call.out_features + kPanel - 1) / kPanel;
    const int groups = std::max(1, (call.num_rows + kMaxRows - 1) / kMaxRows);
    const int64_t work = static_cast<int64_t>(call.num_rows) * call.in_features * call.out_features;
    const int threads = threads_for(call.num_threads, work, worth_a_thread);
    return {static_cast<const char*>(call.weight), panel_bytes,          threads,
            num_panels / threads,                  num_panels % threads, std::min(threads, groups)};
}

// run_panel(words of the panel, its number, first_row, last_row, read) for all panels and rows, each once. next: what is
// read after these, or nothing.
template <class Run>
inline void run_panels(const Panels& panels, const Panels& next, int num_rows, const Run& run_panel) {
    const int groups = (num_rows + kMaxRows - 1) / kMaxRows;
    const int rows_per_part = (groups + panels.parts - 1) / panels.parts * kMaxRows;
    auto compute = [&](int self, int owner, int index) {
        Ahead& ahead = Ahead::own();
        if (owner == self && (index == 0 || !ahead.has_begun(panels))) ahead.begin(self, panels, next);
        const Panels::Piece piece = panels.piece(owner, index);
        if (piece.panel < 0) return;
        const int64_t read = owner == self ? static_cast<int64_t>(panels.panel_bytes) * index : -1;
        const char* words = panels.weight + static_cast<size_t>(piece.panel) * panels.panel_bytes;
        const int first = piece.part < 0 ? 0 : std::min(num_rows, piece.part * rows_per_part);
        run_panel(words, piece.panel, first, piece.part < 0 ? num_rows : std::min(num_rows, first + rows_per_part), read);
    };
    run_queues(panels.threads, panels.queue_length(), compute);
}

template <class T>
Panels panels_of(const LinearCall& call) {
    constexpr int64_t kWorthAThread = 1 << 19;
    return divide_panels(call, static_cast<size_t>(call.in_features) * sizeof(T) * kPanel, kWorthAThread);
}

// next: the weights that are wanted after these, or nothing.
template <class T>
void linear(const LinearCall& call, const Panels& next) {
    run_panels(panels_of<T>(call), next, call.num_rows,
               [&](const char* words, int panel, int first_row, int last_row, int64_t read) {
                   linear_rows<T>(call, reinterpret_cast<const uint32_t*>(words), first_row, last_row, panel * kPanel,
                                  read);
               });
}

}  // namespace pagefleet
