// How weights in their own scales lie in memory, and how they get there.
//
// A panel of outputs lies in one piece, group by group: scales [kPanel], minimums [kPanel] if there are any (both float16
// or both float), then the levels of each pair of k's in turn (see code_place).
#pragma once

#include "linear.h"

namespace pagefleet {

constexpr int kMaxGroup = 32;  // elements of K
constexpr int kPair = 2;       // elements of K that lie side by side

// Mirrored field by field in calls.py.
struct GroupedLinearCall {
    LinearCall linear;    // of the packed weight
    int32_t group;        // elements of K that share a scale: even, divides in_features, at most kMaxGroup
    int32_t bits;         // 4: nibbles that name a level; 8: the level itself
    int32_t wide_scales;  // scales and minimums are float, else float16
    int32_t has_minimums;
    int8_t levels[16];  // of nibbles
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

}  // namespace pagefleet
