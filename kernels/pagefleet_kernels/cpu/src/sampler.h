// Tokens from logits, each row on its own: the largest, or one drawn among what top-k, top-p and min-p leave, in
// this order.
#pragma once

#include <algorithm>
#include <functional>
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

// Floats in rising order as unsigned integers, and back: halving a range of keys always ends.
inline uint32_t key_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
inline float value_of(uint32_t key) {
    uint32_t bits = (key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// What the values >= some bound amount to: how many they are, and their sum or again their number.
struct Above {
    double amount;
    int count;
};

// Values >= low amount to at least a target, values >= high do not.
struct Bracket {
    float low, high;
    Above at_low, at_high;

    // Halve until few values lie in [low, high), or one: true then, all of them are equal.
    template <class Measure>
    bool narrow(const Measure& measure, double target) {
        constexpr int kFew = 128;
        while (at_low.count - at_high.count > kFew) {
            uint32_t a = key_of(low), b = key_of(high);
            if (b - a <= 1) return true;
            float middle = value_of(a + (b - a) / 2);
            Above found = measure(middle);
            if (found.amount >= target) {
                low = middle;
                at_low = found;
            } else {
                high = middle;
                at_high = found;
            }
        }
        return false;
    }
};

// The k-th largest of a row whose largest is `largest`; 0 < k <= count.
template <class T>
float kth_largest(const T* row, int count, float largest, int k, std::vector<float>& between) {
    auto measure = [&](float bound) {
        int found = 0;
        for (int i = 0; i < count; i += kLanes) {
            int n = std::min(kLanes, count - i);
            found += __builtin_popcount(at_least(load_part(row + i, n), set1(bound)) & lane_mask(0, n));
        }
        return Above{static_cast<double>(found), found};
    };
    const float infinity = std::numeric_limits<float>::infinity();
    Bracket bracket{largest, infinity, measure(largest), {0.0, 0}};
    // Down from the largest in growing steps.
    for (float step = 1.0f; bracket.at_low.count < k; step *= 2.0f) {
        bracket.high = bracket.low;
        bracket.at_high = bracket.at_low;
        bracket.low = step < 1e6f ? largest - step : -infinity;
        bracket.at_low = measure(bracket.low);
    }
    if (bracket.narrow(measure, k)) return bracket.low;
    between.clear();
    for (int i = 0; i < count; ++i) {
        float x = to_float(row[i]);
        if (x >= bracket.low && x < bracket.high) between.push_back(x);
    }
    auto wanted = between.begin() + (k - bracket.at_high.count - 1);
    std::nth_element(between.begin(), wanted, between.end(), std::greater<float>());
    return *wanted;
}

// Weights of a row, padded with zeros to whole blocks.
class Weights {
   public:
    // exp((logit - largest) / temperature); zero for logits below `lowest`.
    template <class T>
    void set(const T* row, int count, float largest, float temperature, float lowest) {
        count_ = count;
        values_.assign(static_cast<size_t>((count + kBlock - 1) / kBlock * kBlock), 0.0f);
        Vec scale = set1(kLog2E / temperature), base = set1(largest);
        for (int i = 0; i < count; i += kLanes) {
            int n = std::min(kLanes, count - i);
            Vec x = load_part(row + i, n);
            Vec w = exp2((x - base) * scale);
            uint32_t kept = at_least(x, set1(lowest));
            store_part(values_.data() + i, select(kept, w, set1(0.0f)), n);
        }
    }

    double total() const {
        double sum = 0.0;
        for (int i = 0; i < static_cast<int>(values_.size()); i += kBlock) sum += block_sum(i);
        return sum;
    }

    // Zero all but the likeliest, lower ids first among equals, that it takes to reach `share` of the total; at least
    // one stays.
    void keep_nucleus(double share) {
        double all = total(), target = share * all;
        // What weighs less than this, taken together, cannot be needed.
        float floor = static_cast<float>((1.0 - share) * all / count_ * 0.999);
        auto measure = [this](float bound) { return above(bound); };
        Bracket bracket{floor, 2.0f, above(floor), {0.0, 0}};  // the largest weight is 1
        bool equal = bracket.narrow(measure, target);
        candidates_.clear();
        for (int i = 0; i < count_; ++i) {
            float& w = values_[static_cast<size_t>(i)];
            if (w >= bracket.high) continue;
            if (w >= bracket.low && w > 0.0f) candidates_.push_back({w, i});
            w = 0.0f;
        }
        if (!equal) std::sort(candidates_.begin(), candidates_.end());
        double mass = bracket.at_high.amount;
        for (const Candidate& candidate : candidates_) {
            if (mass >= target && mass > 0.0) break;
            values_[static_cast<size_t>(candidate.id)] = candidate.weight;
            mass += candidate.weight;
        }
    }

    // Zero what weighs less than min_p; the largest, 1, stays.
    void keep_likely(float min_p) {
        for (size_t i = 0; i < values_.size(); i += kLanes) {
            Vec w = load(values_.data() + i);
            store(values_.data() + i, select(at_least(w, set1(min_p)), w, set1(0.0f)));
        }
    }

    // The first token at which the running sum, in id order, passes `share` of the total.
    int pick(double share) const {
        double target = share * total(), sum = 0.0;
        for (int i = 0; i < count_; i += kBlock) {
            double part = block_sum(i);
            if (sum + part <= target) {
                sum += part;
                continue;
            }
            for (int j = i; j < i + kBlock && j < count_; ++j) {
                float w = values_[static_cast<size_t>(j)];
                sum += w;
                if (w > 0.0f && sum > target) return j;
            }
        }
        // Rounding left the sum a hair short: the last one kept. (Numbers that make no sense may have kept none.)
        int last = count_ - 1;
        while (last > 0 && values_[static_cast<size_t>(last)] == 0.0f) --last;
        return last;
    }

   private:
    static constexpr int kBlock = 8 * kLanes;

    struct Candidate {
        float weight;
        int id;
        // Likelier first; among equals the lower id.
        bool operator<(const Candidate& other) const {
            return weight != other.weight ? weight > other.weight : id < other.id;
        }
    };

    // In the order of above().
    double block_sum(int start) const {
        Vec sum = set1(0.0f);
        for (int i = start; i < start + kBlock; i += kLanes) sum = sum + load(values_.data() + i);
        return reduce_add(sum);
    }

    // Sum and number of weights >= bound. Rounding never makes a lower bound's sum smaller.
    Above above(float bound) const {
        Above found{0.0, 0};
        for (size_t start = 0; start < values_.size(); start += kBlock) {
            Vec sum = set1(0.0f);
            for (size_t i = start; i < start + kBlock; i += kLanes) {
                Vec w = load(values_.data() + i);
                uint32_t kept = at_least(w, set1(bound));
                sum = sum + select(kept, w, set1(0.0f));
                found.count += __builtin_popcount(kept);
            }
            found.amount += reduce_add(sum);
        }
        return found;
    }

    int count_ = 0;
    std::vector<float> values_;
    std::vector<Candidate> candidates_;
};

template <class T>
int draw(const T* row, int count, float temperature, int top_k, float top_p, float min_p, double uniform) {
    static thread_local Weights weights;
    static thread_local std::vector<float> scratch;
    int best = argmax(row, count);
    float largest = to_float(row[best]);
    if (!(largest - largest == 0.0f)) return best;  // NaN or infinite: there is nothing to draw from
    if (!(temperature >= std::numeric_limits<float>::min())) return best;  // so weights lie in [0, 1]
    float lowest = -std::numeric_limits<float>::infinity();
    if (top_k > 0 && top_k < count) lowest = kth_largest(row, count, largest, top_k, scratch);
    weights.set(row, count, largest, temperature, lowest);
    if (top_p < 1.0f) weights.keep_nucleus(top_p);
    if (min_p > 0.0f) weights.keep_likely(min_p);
    return weights.pick(uniform);
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
