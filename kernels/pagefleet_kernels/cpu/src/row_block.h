// Attention of a block of query rows that share one sequence and one KV head: flash attention over absolute positions.
//
//   positions   0 ............ 64 ............ 128 ....        512 ...
//   spans       |---- 64 -----|---- 64 -------| ...            rescale points: one running maximum and sum per span
//   splits      |------------------ 512 -----------------------|---- units of parallel work, folded in order
//
// One row, one arithmetic: spans and splits lie at absolute positions, a row's sums run token by token in order, and a
// row's state is touched only by spans in which it sees a key. So a row comes out bit for bit the same alone (decode)
// and among others (prefill), whoever computes which split.
#pragma once

#include <limits>

#include "microkernel.h"

namespace pagefleet {

constexpr int kSplit = 512;         // tokens
constexpr int kBlockRows = 96;      // rows of a block at most; a multiple of every kMaxRows
constexpr int kStreamingRows = 16;  // up to so many rows a block waits for memory, not for arithmetic
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline float exp2_scalar(float x) {
    float lanes[kLanes];
    store(lanes, exp2(set1(x)));
    return lanes[0];
}

// How scores are made of dot products; in units of log2. Without a cap the scale is left to the exponential's fma.
struct ScoreRule {
    float scale;      // of what apply() returns
    float cap_scale;  // of the dot product inside the cap
    bool capped;

    ScoreRule(float raw_scale, float softcap)
        : scale((softcap > 0.0f ? softcap : raw_scale) * kLog2E),
          cap_scale(softcap > 0.0f ? raw_scale / softcap : 0.0f),
          capped(softcap > 0.0f) {}

    Vec apply(Vec dot) const { return capped ? tanh(dot * set1(cap_scale)) : dot; }
};

// Softmax so far of a number of rows: maximum (log2 units), sum per lane, weighted values; floats in one array.
struct States {
    float* max;     // [rows]
    float* sums;    // [rows][16]
    float* values;  // [rows][v_pad]

    static size_t floats(int rows, int v_pad) { return static_cast<size_t>(rows) * (1 + kLanes + v_pad); }

    States(float* base, int rows)
        : max(base), sums(base + rows), values(base + static_cast<size_t>(rows) * (1 + kLanes)) {}

    void clear(int rows, int v_pad) const {
        for (int r = 0; r < rows; ++r) max[r] = kMinusInfinity;
        std::memset(sums, 0, static_cast<size_t>(rows) * kLanes * sizeof(float));
        std::memset(values, 0, static_cast<size_t>(rows) * v_pad * sizeof(float));
    }
};

struct RowBlock {
    int num_rows = 0;
    const char* query[kBlockRows];
    int low[kBlockRows], high[kBlockRows];  // the row sees keys at positions [low, high); none when high <= low
    int first = 0, last = 0;                // the union of those ranges
    int joint_low = 0, joint_high = std::numeric_limits<int>::max();  // what every row sees

    void add(const char* q, int row_low, int row_high) {
        query[num_rows] = q;
        low[num_rows] = row_low;
        high[num_rows] = row_high;
        joint_low = row_low > joint_low ? row_low : joint_low;
        joint_high = row_high < joint_high ? row_high : joint_high;
        if (row_high > row_low) {
            first = last == 0 || row_low < first ? row_low : first;
            last = row_high > last ? row_high : last;
        }
        ++num_rows;
    }
    bool all_see(int position, int count) const { return joint_low <= position && joint_high >= position + count; }
    int first_split() const { return first / kSplit; }
    int last_split() const { return (last + kSplit - 1) / kSplit; }
    bool in_split(int row, int split) const {
        return low[row] < (split + 1) * kSplit && high[row] > split * kSplit && high[row] > low[row];
    }
};

// Reads one sequence's keys and values of one head through its block table.
struct PagedTiles {
    const uint32_t* kv;
    const Layout* layout;
    const int32_t* table;
    int block_size, head;

    const uint32_t* tile(int position) const {
        int block = position / block_size;
        return kv + layout->tile_offset(table[block], head, position % block_size / kTile);
    }
};

// K tiles that the same thread is likely to read when a unit is over, each with its V tile behind it; null: none.
struct Upcoming {
    const uint32_t* k[kSpanTiles] = {};
};

// Raises the maximum in use of a row to that of `highest`, and rescales sum and values, if that exceeds it by more than
// kSlack: until then weights grow to 2^kSlack, which costs no precision, and most spans need no rescaling. It depends
// on the row's own scores alone.
constexpr float kSlack = 8.0f;

inline void raise_max(Vec highest, float scale, float& max, float* sums, float* values, int v_pad) {
    float span_max = reduce_max(highest) * scale;
    if (!(span_max > max + kSlack) && max != kMinusInfinity) return;
    Vec factor = exp2(set1(max == kMinusInfinity ? kMinusInfinity : max - span_max));
    store(sums, load(sums) * factor);
    for (int d = 0; d < v_pad; d += kLanes) store(values + d, load(values + d) * factor);
    max = span_max;
}

inline Vec highest_of(const Vec (&s)[kSpanTiles]) {
    static_assert(kSpanTiles == 4, "a tree over four tiles");
    return max(max(s[0], s[1]), max(s[2], s[3]));
}

// Weights of one row over one span, of which only the keys [low, high) count; others weigh exactly zero. Updates
// maximum and sums and rescales values.
template <class T>
inline void softmax_span(const ScoreRule& rule, const float* scores, T* weights, int low, int high, float& max,
                         float* sums, float* values, int v_pad) {
    Vec s[kSpanTiles];
    uint32_t seen[kSpanTiles];
#pragma GCC unroll 4
    for (int i = 0; i < kSpanTiles; ++i) {
        seen[i] = lane_mask(low - i * kTile, high - i * kTile);
        s[i] = select(seen[i], rule.apply(load(scores + i * kTile)), set1(kMinusInfinity));
    }
    raise_max(highest_of(s), rule.scale, max, sums, values, v_pad);
    const Vec base = set1(max == kMinusInfinity ? 0.0f : -max), scale = set1(rule.scale);
    Vec sum = load(sums);
#pragma GCC unroll 4
    for (int i = 0; i < kSpanTiles; i += 2) {
        Vec a = select(seen[i], Element<T>::weight(fma(s[i], scale, base)), set1(0.0f));
        Vec b = select(seen[i + 1], Element<T>::weight(fma(s[i + 1], scale, base)), set1(0.0f));
        sum = Element<T>::store_weights(weights + i * kTile, a, b, sum);
    }
    store(sums, sum);
}

// R rows of a block, from `row` on, over one span of which all of them see every key: what attend_span does, with the
// scores kept in registers.
template <class T, bool Ahead, int R>
void attend_whole_span(const RowBlock& block, int row, const ScoreRule& rule, const Layout& layout, const Tiles& k,
                       const Tiles& v, const States& states) {
    alignas(64) T weights[R][kSpan];
    Vec s[R][kSpanTiles];
#pragma GCC unroll 4
    for (int c = 0; c < kSpanTiles; c += kMaxColumns) {
        Vec acc[R][kMaxColumns];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < kMaxColumns; ++i) acc[r][i] = set1(0.0f);
        accumulate_keys<T, Ahead, R, kMaxColumns>(acc, block.query + row, k, c, layout.k_words);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < kMaxColumns; ++i) s[r][c + i] = acc[r][i];
    }
    if (__builtin_expect(rule.capped, 0))
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < kSpanTiles; ++i) s[r][i] = rule.apply(s[r][i]);

    float* max = states.max + row;
    float* sums = states.sums + static_cast<size_t>(row) * kLanes;
    float* values = states.values + static_cast<size_t>(row) * layout.v_pad;
    const Vec scale = set1(rule.scale);
    uint32_t within = 0xffffu;  // one branch for all rows: maxima hardly ever move
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) within &= at_least(set1(max[r] + kSlack), highest_of(s[r]) * scale);
    if (__builtin_expect(within != 0xffffu, 0)) {
        Vec highest[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) highest[r] = highest_of(s[r]);
        for (int r = 0; r < R; ++r)
            raise_max(highest[r], rule.scale, max[r], sums + r * kLanes, values + r * layout.v_pad, layout.v_pad);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const Vec base = set1(max[r] == kMinusInfinity ? 0.0f : -max[r]);
        Vec sum = load(sums + r * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kSpanTiles; i += 2) {
            Vec a = Element<T>::weight(fma(s[r][i], scale, base));
            Vec b = Element<T>::weight(fma(s[r][i + 1], scale, base));
            sum = Element<T>::store_weights(weights[r] + i * kTile, a, b, sum);
        }
        store(sums + r * kLanes, sum);
    }

    const char* weight_rows[R];
    float* value_rows_of[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        weight_rows[r] = reinterpret_cast<const char*>(weights[r]);
        value_rows_of[r] = values + r * layout.v_pad;
    }
    value_rows<T, Ahead, R>(value_rows_of, weight_rows, v, 0, kSpan / Element<T>::per_word, layout.v_pad);
}

// R rows of a block, from `row` on, over one span.
template <class T, bool Ahead, int R>
inline void attend_span(const RowBlock& block, int row, const ScoreRule& rule, const Layout& layout, int span,
                        const Tiles& k, const Tiles& v, const States& states) {
    constexpr int kPerWord = Element<T>::per_word;
    alignas(64) float scores[R][kSpan];
    alignas(64) T weights[R][kSpan];
    int low[R], high[R], begin[R], end[R];
    int span_low = kSpan, span_high = 0, joint_begin = 0, joint_end = kSpan;
    for (int r = 0; r < R; ++r) {
        low[r] = block.low[row + r] > span ? block.low[row + r] - span : 0;
        high[r] = block.high[row + r] < span + kSpan ? block.high[row + r] - span : kSpan;
        if (low[r] >= high[r]) low[r] = high[r] = 0;  // sees nothing here: its state stays as it is
        begin[r] = (low[r] + kPerWord - 1) / kPerWord;
        end[r] = high[r] / kPerWord;
        joint_begin = begin[r] > joint_begin ? begin[r] : joint_begin;
        joint_end = end[r] < joint_end ? end[r] : joint_end;
        if (low[r] < high[r]) {
            span_low = low[r] < span_low ? low[r] : span_low;
            span_high = high[r] > span_high ? high[r] : span_high;
        }
    }
    if (span_low >= span_high) return;

    float* score_rows_of[R];
    const char* weight_rows[R];
    float* values[R];
    for (int r = 0; r < R; ++r) {
        score_rows_of[r] = scores[r];
        weight_rows[r] = reinterpret_cast<const char*>(weights[r]);
        values[r] = states.values + static_cast<size_t>(row + r) * layout.v_pad;
    }
    score_rows<T, Ahead, R>(score_rows_of, block.query + row, k, span_low / kTile, (span_high + kTile - 1) / kTile,
                            layout.k_words);
    for (int r = 0; r < R; ++r) {
        if (low[r] >= high[r]) continue;
        softmax_span<T>(rule, scores[r], weights[r], low[r], high[r], states.max[row + r],
                        states.sums + static_cast<size_t>(row + r) * kLanes, values[r], layout.v_pad);
    }

    // Words in which every row sees every token go together; before and after them each row takes its own, in order.
    if (joint_begin > joint_end) joint_begin = joint_end;
    for (int r = 0; r < R; ++r) {
        if (low[r] >= high[r]) continue;
        if (low[r] % kPerWord != 0)
            value_edge<T>(values[r], weight_rows[r], v, low[r] / kPerWord, 0xffff0000u,
                          layout.v_pad);
        int stop = end[r] < joint_begin ? end[r] : joint_begin;
        value_rows<T, false, 1>(values + r, weight_rows + r, v, begin[r], stop, layout.v_pad);
    }
    value_rows<T, Ahead, R>(values, weight_rows, v, joint_begin, joint_end, layout.v_pad);
    for (int r = 0; r < R; ++r) {
        if (low[r] >= high[r]) continue;
        int start = begin[r] > joint_end ? begin[r] : joint_end;
        value_rows<T, false, 1>(values + r, weight_rows + r, v, start, end[r], layout.v_pad);
        if (high[r] % kPerWord != 0)
            value_edge<T>(values[r], weight_rows[r], v, high[r] / kPerWord, 0x0000ffffu,
                          layout.v_pad);
    }
}

template <class T, bool Ahead, int R>
inline void attend_some(const RowBlock& block, int row, const ScoreRule& rule, const Layout& layout, int span,
                        bool whole, const Tiles& k, const Tiles& v, const States& states) {
    if (whole)
        attend_whole_span<T, Ahead, R>(block, row, rule, layout, k, v, states);
    else
        attend_span<T, Ahead, R>(block, row, rule, layout, span, k, v, states);
}

template <class T, bool Ahead>
inline void attend_rows(int count, const RowBlock& block, int row, const ScoreRule& rule, const Layout& layout,
                        int span, bool whole, const Tiles& k, const Tiles& v, const States& states) {
    switch (count) {
#if defined(__AVX512F__)
        case 6: return attend_some<T, Ahead, 6>(block, row, rule, layout, span, whole, k, v, states);
        case 5: return attend_some<T, Ahead, 5>(block, row, rule, layout, span, whole, k, v, states);
#endif
        case 4: return attend_some<T, Ahead, 4>(block, row, rule, layout, span, whole, k, v, states);
        case 3: return attend_some<T, Ahead, 3>(block, row, rule, layout, span, whole, k, v, states);
        case 2: return attend_some<T, Ahead, 2>(block, row, rule, layout, span, whole, k, v, states);
        default: return attend_some<T, Ahead, 1>(block, row, rule, layout, span, whole, k, v, states);
    }
}

// One line in `stride` words of [begin, end).
inline void ask(const uint32_t* tile, size_t begin, size_t end, size_t stride) {
    for (size_t at = begin; at < end; at += stride) _mm_prefetch(reinterpret_cast<const char*>(tile + at), _MM_HINT_T0);
}

// One split of a block of rows, from a clear state. Of each page that is two spans ahead one line is asked for: blocks lie
// anywhere, and translating a new page's address takes as long as a read.
template <class T>
void attend_split(const RowBlock& block, int split, const ScoreRule& rule, const PagedTiles& tiles,
                  const Upcoming& next, const States& states) {
    const Layout& layout = *tiles.layout;
    states.clear(block.num_rows, layout.v_pad);
    constexpr size_t kPageWords = 4096 / 4;
    const bool streaming = block.num_rows <= kStreamingRows;
    const size_t v_words = layout.tile_words() - layout.k_tile_words();
    const int begin = block.first > split * kSplit ? block.first : split * kSplit;
    const int end = block.last < (split + 1) * kSplit ? block.last : (split + 1) * kSplit;
    for (int span = begin / kSpan * kSpan; span < end; span += kSpan) {
        const bool whole = block.all_see(span, kSpan);
        Tiles k, v;
        k.ahead_words = v_words;
        for (int i = 0; i < kSpanTiles; ++i) {
            int position = span + i * kTile;
            v.ahead[i] = tiles.kv;
            if (position + kTile <= begin || position >= end) continue;
            k.now[i] = tiles.tile(position);
            v.now[i] = k.ahead[i] = k.now[i] + layout.k_tile_words();
            v.ahead[i] = k.now[i];
            if (!streaming) continue;
            auto later = [&](int spans) {
                const int there = position + spans * kSpan;
                return there < block.last ? tiles.tile(there) : next.k[i];
            };
            if (const uint32_t* tile = later(1)) {
                v.ahead[i] = tile;
                ask(tile, v_words, layout.k_tile_words(), kTile);  // more than what is asked for along V
            }
            if (const uint32_t* tile = later(2)) ask(tile, 0, layout.tile_words(), kPageWords);
        }
        for (int row = 0; row < block.num_rows; row += kMaxRows) {
            int count = block.num_rows - row < kMaxRows ? block.num_rows - row : kMaxRows;
            if (row == 0 && streaming)
                attend_rows<T, true>(count, block, row, rule, layout, span, whole, k, v, states);
            else
                attend_rows<T, false>(count, block, row, rule, layout, span, whole, k, v, states);
        }
    }
}

// Fold one split's state of a row into what the splits before it gave.
inline void fold(const States& total, const States& part, int row, int v_pad) {
    float* total_values = total.values + static_cast<size_t>(row) * v_pad;
    const float* part_values = part.values + static_cast<size_t>(row) * v_pad;
    float* total_sums = total.sums + static_cast<size_t>(row) * kLanes;
    const float* part_sums = part.sums + static_cast<size_t>(row) * kLanes;
    float new_max = part.max[row] > total.max[row] ? part.max[row] : total.max[row];
    float base = new_max == kMinusInfinity ? 0.0f : new_max;
    Vec old_factor = exp2(set1(total.max[row] - base));
    Vec new_factor = exp2(set1(part.max[row] - base));
    store(total_sums, fma(load(part_sums), new_factor, load(total_sums) * old_factor));
    for (int d = 0; d < v_pad; d += kLanes)
        store(total_values + d, fma(load(part_values + d), new_factor, load(total_values + d) * old_factor));
    total.max[row] = new_max;
}

// A row's result: values / sum, the sink in the sum.
template <class T>
inline void finish(const States& states, int row, const float* sink, T* out, int v_head_dim, int v_pad) {
    float sum = reduce_add(load(states.sums + static_cast<size_t>(row) * kLanes));
    float factor = 1.0f;
    if (sink != nullptr) {
        float level = *sink * kLog2E;
        float new_max = level > states.max[row] ? level : states.max[row];
        factor = exp2_scalar(states.max[row] - new_max);
        sum = sum * factor + exp2_scalar(level - new_max);
    }
    Vec scale = set1(factor / sum);
    const float* values = states.values + static_cast<size_t>(row) * v_pad;
    for (int d = 0; d < v_head_dim; d += kLanes) {
        int n = v_head_dim - d < kLanes ? v_head_dim - d : kLanes;
        store_part(out + d, load(values + d) * scale, n);
    }
}

}  // namespace pagefleet
