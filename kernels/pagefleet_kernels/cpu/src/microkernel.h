// The one inner loop: acc[r][c] += sum over steps of a[r][step] * b[c][step], lanes wide.
//
// A lane's sum runs over the steps in order in one accumulator, whatever R and C are: how rows are grouped never shows
// in the bits.
#pragma once

#include "layout.h"

namespace pagefleet {

// Accumulators that fit in the register file beside the operands.
#if defined(__AVX512F__)
constexpr int kMaxRows = 6;
constexpr int kMaxColumns = 4;
#else
constexpr int kMaxRows = 4;
constexpr int kMaxColumns = 1;
#endif

// What is streamed from memory is read once: with Ahead, each step asks for C lines of what comes one span later, those at
// ahead[c], ahead_stride words further with each step, so that memory is never waited for and never asked in bursts.
template <class T, bool Ahead, int R, int C>
inline __attribute__((always_inline)) void accumulate(Vec (&acc)[R][C], const char* const* a,
                                                      const uint32_t* const* b, const uint32_t* const* ahead,
                                                      size_t b_stride, int begin, int end, size_t ahead_stride = 0) {
    using E = Element<T>;
    for (int step = begin; step < end; ++step) {
        typename E::Lanes columns[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) columns[c] = E::load_lanes(b[c] + static_cast<size_t>(step) * b_stride);
        if constexpr (Ahead) {
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                _mm_prefetch(reinterpret_cast<const char*>(ahead[c] + static_cast<size_t>(step - begin) * ahead_stride),
                             _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            typename E::Scalar row = E::broadcast(a[r] + static_cast<size_t>(step) * 4);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = E::step(acc[r][c], row, columns[c]);
        }
    }
}

constexpr int kSpan = 64;                  // tokens: see row_block.h
constexpr int kSpanTiles = kSpan / kTile;  // tiles

// The K tiles, or the V tiles, of one span; null where no row sees a key. `ahead` is what memory is asked for meanwhile,
// and is read by prefetches only: the span's V tiles beside its K tiles, the next span's K tiles beside its V tiles. That is
// half a span ahead: 8 KiB with heads of 64, 16 KiB with heads of 128, of the 32 or 48 KiB of a first level.
struct Tiles {
    const uint32_t* now[kSpanTiles] = {};
    const uint32_t* ahead[kSpanTiles] = {};
    size_t ahead_words = 0;  // of each tile
};

// Dot products of R rows with the keys of the C tiles from `first` on. The tiles ahead are asked for in the order in which
// they will be read, one after the other.
template <class T, bool Ahead, int R, int C>
inline __attribute__((always_inline)) void accumulate_keys(Vec (&acc)[R][C], const char* const* q, const Tiles& k,
                                                           int first, int k_words) {
    constexpr size_t kStep = static_cast<size_t>(C) * kTile;  // words of C lines
    const uint32_t* const* now = k.now + first;
    if constexpr (!Ahead) {
        accumulate<T, false, R, C>(acc, q, now, now, kTile, 0, k_words);
        return;
    }
    const int steps = static_cast<int>((k.ahead_words + kStep - 1) / kStep);
    for (int part = 0; part < C; ++part) {
        const int begin = k_words * part / C, end = k_words * (part + 1) / C;
        const int middle = begin + steps < end ? begin + steps : end;
        const uint32_t* ahead[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) ahead[c] = k.ahead[first + part] + c * kTile;
        accumulate<T, Ahead, R, C>(acc, q, now, ahead, kTile, begin, middle, kStep);
        accumulate<T, false, R, C>(acc, q, now, now, kTile, middle, end);
    }
}

// Scores: out[r][tile * 16 + token] = q[r] . k[token] for the tiles [first, last) of K.
template <class T, bool Ahead, int R, int C>
inline void score_tiles(float* const* out, const char* const* q, const Tiles& k, int first, int k_words) {
    Vec acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = set1(0.0f);
    accumulate_keys<T, Ahead, R, C>(acc, q, k, first, k_words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out[r] + (first + c) * kTile, acc[r][c]);
}

template <class T, bool Ahead, int R>
inline void score_rows(float* const* out, const char* const* q, const Tiles& k, int first, int last, int k_words) {
    while (first < last) {
        int columns = last - first < kMaxColumns ? last - first : kMaxColumns;
        switch (columns) {
#if defined(__AVX512F__)
            case 4: score_tiles<T, Ahead, R, 4>(out, q, k, first, k_words); break;
            case 3: score_tiles<T, Ahead, R, 3>(out, q, k, first, k_words); break;
            case 2: score_tiles<T, Ahead, R, 2>(out, q, k, first, k_words); break;
#endif
            default: score_tiles<T, Ahead, R, 1>(out, q, k, first, k_words);
        }
        first += columns;
    }
}

// Values: acc[r][...] += p[r] . V over the rows [begin, end) of one span's V tiles; row i lies in tile i / kTileRows.
template <class T, bool Ahead, int R, int C>
inline void add_values(float* const* acc, const char* const* p, const Tiles& v, int column, int begin, int end,
                       int v_pad) {
    constexpr int kTileRows = kTile / Element<T>::per_word;
    Vec sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = load(acc[r] + column + c * kLanes);
    for (int row = begin; row < end;) {
        const int tile = row / kTileRows, first = row % kTileRows;
        const int stop = end - tile * kTileRows < kTileRows ? end - tile * kTileRows : kTileRows;
        const uint32_t *b[C], *ahead[C];
        const char* a[R];
        // Keys are read from all tiles of a span in turn, and so asked for if as many lines are read here at a time.
        constexpr bool kInTurn = C == kSpanTiles;
        const size_t line = static_cast<size_t>(column / kLanes * kTileRows + (kInTurn ? tile * kTileRows + first : first));
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            b[c] = v.now[tile] + column + c * kLanes;
            ahead[c] = kInTurn ? v.ahead[c] + line * kTile : v.ahead[tile] + (line + static_cast<size_t>(c)) * kTile;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) a[r] = p[r] + static_cast<size_t>(tile) * kTileRows * 4;
        const size_t b_stride = static_cast<size_t>(v_pad), ahead_stride = static_cast<size_t>(kInTurn ? 1 : C) * kTile;
        if (first == 0 && stop == kTileRows)
            accumulate<T, Ahead, R, C>(sums, a, b, ahead, b_stride, 0, kTileRows, ahead_stride);
        else
            accumulate<T, Ahead, R, C>(sums, a, b, ahead, b_stride, first, stop, ahead_stride);
        row = tile * kTileRows + stop;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(acc[r] + column + c * kLanes, sums[r][c]);
}

template <class T, bool Ahead, int R>
inline void value_rows(float* const* acc, const char* const* p, const Tiles& v, int begin, int end,
                       int v_pad) {
    if (begin >= end) return;
    for (int column = 0; column < v_pad;) {
        int columns = (v_pad - column) / kLanes < kMaxColumns ? (v_pad - column) / kLanes : kMaxColumns;
        switch (columns) {
#if defined(__AVX512F__)
            case 4: add_values<T, Ahead, R, 4>(acc, p, v, column, begin, end, v_pad); break;
            case 3: add_values<T, Ahead, R, 3>(acc, p, v, column, begin, end, v_pad); break;
            case 2: add_values<T, Ahead, R, 2>(acc, p, v, column, begin, end, v_pad); break;
#endif
            default: add_values<T, Ahead, R, 1>(acc, p, v, column, begin, end, v_pad);
        }
        column += columns * kLanes;
    }
}

// One V row of which only the tokens under word_mask count: the others may hold anything, NaN included.
template <class T>
inline void value_edge(float* acc, const char* p, const Tiles& v, int row, uint32_t word_mask, int v_pad) {
    using E = Element<T>;
    constexpr int v_rows = kTile / E::per_word;
    const uint32_t* words = v.now[row / v_rows] + static_cast<size_t>(row % v_rows) * v_pad;
    typename E::Scalar weight = E::broadcast(p + static_cast<size_t>(row) * 4);
    for (int column = 0; column < v_pad; column += kLanes) {
        typename E::Lanes lanes = E::keep(E::load_lanes(words + column), word_mask);
        store(acc + column, E::step(load(acc + column), weight, lanes));
    }
}

}  // namespace pagefleet
