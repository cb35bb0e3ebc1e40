// Tokens from logits, each row on its own: the largest, or one drawn among what min-p, top-k and top-p leave.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace pagefleet {

// Mirrored field by field in calls.py.
struct SampleCall {
    const void* logits;        // [num_rows, vocabulary], row stride below
    const float* temperature;  // [num_rows]; 0: the largest logit, the lowest id among equals
    const int32_t* top_k;      // [num_rows]; 0: all
    const float* top_p;        // [num_rows]; 1: all
    const float* min_p;        // [num_rows]; 0: all
    const double* uniform;     // [num_rows], in [0, 1)
    int64_t* tokens;           // [num_rows]
    int64_t row_stride;
    int32_t num_rows, vocabulary;
    int32_t num_threads;
};

// Index of the first NaN, else of the first largest.
template <class T>
int argmax(const T* row, int count) {
    Vec highest = set1(-std::numeric_limits<float>::infinity());
    for (int i = 0; i < count; i += kLanes) {
        int n = std::min(kLanes, count - i);
        Vec x = load_part(row + i, n);
        uint32_t nan = nan_lanes(x);
        if (nan != 0) return i + __builtin_ctz(nan);
        highest = max(highest, n == kLanes ? x : select(lane_mask(0, n), x, highest));
    }
    Vec target = set1(reduce_max(highest));
    for (int i = 0; i < count; i += kLanes) {
        int n = std::min(kLanes, count - i);
        uint32_t hit = at_least(load_part(row + i, n), target) & lane_mask(0, n);
        if (hit != 0) return i + __builtin_ctz(hit);
    }
    return 0;
}

struct Candidate {
    float weight;
    int id;
    // Likelier first; among equals the lower id.
    bool operator<(const Candidate& other) const {
        return weight != other.weight ? weight > other.weight : id < other.id;
    }
};

// How many of the likeliest candidates it takes until their weights reach `target`; at least one. Reorders them so that
// those come first. Halves the range at every step: linear time.
inline size_t nucleus(std::vector<Candidate>& candidates, double target) {
    constexpr size_t kSmall = 64;
    size_t low = 0, high = candidates.size();
    double mass = 0.0;  // of the candidates before `low`, which all belong
    auto at = [&](size_t index) { return candidates.begin() + static_cast<std::ptrdiff_t>(index); };
    while (high - low > kSmall) {
        size_t middle = low + (high - low) / 2;
        std::nth_element(at(low), at(middle), at(high));
        double part = 0.0;
        for (size_t i = low; i < middle; ++i) part += candidates[i].weight;
        if (mass + part >= target) {
            high = middle;
        } else {
            mass += part;
            low = middle;
        }
    }
    std::sort(at(low), at(high));
    for (size_t i = low; i < high; ++i) {
        mass += candidates[i].weight;
        if (mass >= target) return i + 1;
    }
    return std::max<size_t>(high, 1);
}

// Weights exp((logit - largest) / temperature) of a row, in `weights`; zero for what top-k and min-p drop.
template <class T>
void weigh(const T* row, int count, float largest, float temperature, int top_k, float min_p,
           std::vector<float>& weights, std::vector<float>& scratch) {
    weights.resize(static_cast<size_t>(count));
    float lowest = -std::numeric_limits<float>::infinity();
    if (top_k > 0 && top_k < count) {
        scratch.resize(static_cast<size_t>(count));
        for (int i = 0; i < count; ++i) scratch[static_cast<size_t>(i)] = to_float(row[i]);
        std::nth_element(scratch.begin(), scratch.begin() + (top_k - 1), scratch.end(), std::greater<float>());
        lowest = scratch[static_cast<size_t>(top_k - 1)];  // its equals are all kept
    }
    Vec scale = set1(kLog2E / temperature), base = set1(largest);
    for (int i = 0; i < count; i += kLanes) {
        int n = std::min(kLanes, count - i);
        Vec x = load_part(row + i, n);
        Vec w = exp2((x - base) * scale);
        uint32_t kept = at_least(x, set1(lowest)) & at_least(w, set1(min_p));
        store_part(weights.data() + i, select(kept, w, set1(0.0f)), n);
    }
}

inline double total_of(const std::vector<float>& weights) {
    double total = 0.0;
    for (size_t i = 0; i < weights.size(); i += kLanes) {
        int n = static_cast<int>(std::min<size_t>(kLanes, weights.size() - i));
        total += reduce_add(load_part(weights.data() + i, n));
    }
    return total;
}

template <class T>
int draw(const T* row, int count, float temperature, int top_k, float top_p, float min_p, double uniform) {
    static thread_local std::vector<float> weights, scratch;
    static thread_local std::vector<Candidate> candidates;
    int best = argmax(row, count);
    float largest = to_float(row[best]);
    if (!(largest - largest == 0.0f)) return best;  // NaN or infinite: there is nothing to draw from
    weigh(row, count, largest, temperature, top_k, min_p, weights, scratch);
    double total = total_of(weights);
    if (top_p < 1.0f) {
        // What weighs less than this, taken together, cannot be needed to reach top_p.
        float floor = static_cast<float>((1.0 - top_p) * total / count * 0.999);
        candidates.clear();
        for (int i = 0; i < count; ++i)
            if (weights[static_cast<size_t>(i)] > 0.0f && weights[static_cast<size_t>(i)] >= floor)
                candidates.push_back({weights[static_cast<size_t>(i)], i});
        size_t kept = nucleus(candidates, top_p * total);
        std::fill(weights.begin(), weights.end(), 0.0f);
        for (size_t i = 0; i < kept; ++i) weights[static_cast<size_t>(candidates[i].id)] = candidates[i].weight;
        total = total_of(weights);
    }
    // The token at which the running sum, in id order, passes its share.
    double target = uniform * total, sum = 0.0;
    for (int i = 0; i < count; i += kLanes) {
        int n = std::min(kLanes, count - i);
        double part = reduce_add(load_part(weights.data() + i, n));
        if (sum + part <= target) {
            sum += part;
            continue;
        }
        for (int j = i; j < i + n; ++j) {
            float w = weights[static_cast<size_t>(j)];
            sum += w;
            if (w > 0.0f && sum > target) return j;
        }
    }
    // Rounding left the sum a hair short: the last one kept.
    int last = count - 1;
    while (weights[static_cast<size_t>(last)] == 0.0f) --last;
    return last;
}

template <class T>
void sample(const SampleCall& call) {
    auto one = [&](int row) {
        const T* logits = static_cast<const T*>(call.logits) + row * call.row_stride;
        call.tokens[row] = call.temperature[row] == 0.0f
                               ? argmax(logits, call.vocabulary)
                               : draw(logits, call.vocabulary, call.temperature[row], call.top_k[row], call.top_p[row],
                                      call.min_p[row], call.uniform[row]);
    };
    parallel_for(call.num_threads, call.num_rows, one);
}

}  // namespace pagefleet
