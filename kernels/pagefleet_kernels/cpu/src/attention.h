// One call of paged attention: what it is given, its checks, and the division of its work.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "pool.h"
#include "row_block.h"
#include "status.h"

namespace pagefleet {

// Mirrored field by field in calls.py.
struct AttentionCall {
    const void* query;            // [num_rows, num_q_heads, head_dim], strides below, last dimension contiguous
    void* out;                    // [num_rows, num_q_heads, v_head_dim], contiguous
    const void* kv;               // see layout.h
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* seq_lens;      // [num_seqs]
    const int32_t* block_tables;  // [num_seqs, max_blocks], row stride below
    const float* sinks;           // [num_q_heads] or null
    int64_t query_row_stride;     // elements
    int64_t query_head_stride;    // elements
    int64_t table_stride;         // elements
    int32_t num_rows, num_seqs, num_q_heads, num_kv_heads, head_dim, v_head_dim;
    int32_t num_blocks, block_size, max_blocks;
    int32_t window;       // 0: none
    int32_t num_threads;  // at most
    float scale;
    float softcap;  // 0: none
};

// Every table entry that will be read, and that the rows tile [0, num_rows). Sets `where` to the offending sequence.
inline Status check(const AttentionCall& call, int32_t* where) {
    *where = 0;
    if (call.query_starts[0] != 0 || call.query_starts[call.num_seqs] != call.num_rows) return kBadStarts;
    for (int seq = 0; seq < call.num_seqs; ++seq) {
        *where = seq;
        int rows = call.query_starts[seq + 1] - call.query_starts[seq];
        int len = call.seq_lens[seq];
        if (rows < 0) return kBadStarts;
        if (rows == 0 || len <= 0) continue;
        if (len > static_cast<int64_t>(call.max_blocks) * call.block_size) return kTableTooShort;
        int first_row = len - rows > 0 ? len - rows : 0;
        int first = call.window > 0 && first_row - call.window + 1 > 0 ? first_row - call.window + 1 : 0;
        const int32_t* table = call.block_tables + seq * call.table_stride;
        for (int block = first / call.block_size; block * call.block_size < len; ++block)
            if (table[block] < 0 || table[block] >= call.num_blocks) return kBadBlock;
    }
    return kOk;
}

// A block of rows; when its splits are shared out, their states lie in a scratch array, one after the other.
struct Work {
    int seq, kv_head;
    int first_row, num_rows;  // rows of this sequence and KV head: token * group + head in group
    size_t scratch = 0;       // offset in floats
    int shared = -1;          // which of the shared ones it is; -1: none
};

// What a thread takes at once.
struct Unit {
    int work;
    int split;  // of a shared block; -1: the whole block
    int64_t cost;
};

// The division of a call's work, which serves any number of layers.
template <class T>
class Attention {
   public:
    explicit Attention(const AttentionCall& call)
        : call_(call),
          layout_(call.num_kv_heads, call.head_dim, call.v_head_dim, call.block_size, Element<T>::per_word),
          rule_(call.scale, call.softcap),
          group_(call.num_q_heads / call.num_kv_heads) {
        plan();
    }

    // Turn to the next layer's call on the same sequences, which has been checked with this one. False: it is another.
    bool turn_to(const AttentionCall& call) {
        auto same = [&](auto field) { return call.*field == call_.*field; };
        using C = AttentionCall;
        if (!(same(&C::query_starts) && same(&C::seq_lens) && same(&C::block_tables) && same(&C::table_stride) &&
              same(&C::num_rows) && same(&C::num_seqs) && same(&C::num_q_heads) && same(&C::num_kv_heads) &&
              same(&C::head_dim) && same(&C::v_head_dim) && same(&C::num_blocks) && same(&C::block_size) &&
              same(&C::max_blocks) && same(&C::window) && same(&C::num_threads)))
            return false;
        call_ = call;
        rule_ = ScoreRule(call.scale, call.softcap);
        return true;
    }

    void run() {
        for (size_t index = 0; index < splits_left_.size(); ++index) splits_left_[index] = splits_of_[index];
        auto compute = [this](int index) { this->compute(index); };
        parallel_for(num_threads_, static_cast<int>(units_.size()), compute);
    }

   private:
    // Multiply-adds below which waking another thread costs more than it gives.
    static constexpr int64_t kWorthAThread = 1 << 20;
    static constexpr int kUnitsPerThread = 4;
    static constexpr int kLinesAUnit = 32;  // of the weights that come next: see ahead.h

    // How work is divided decides speed only: see row_block.h.
    void plan() {
        int64_t total = 0;
        for (int seq = 0; seq < call_.num_seqs; ++seq) {
            int rows = (call_.query_starts[seq + 1] - call_.query_starts[seq]) * group_;
            for (int head = 0; head < call_.num_kv_heads; ++head)
                for (int row = 0; row < rows; row += kBlockRows) {
                    works_.push_back({seq, head, row, std::min(kBlockRows, rows - row)});
                    total += cost(rows_of(works_.back()));
                }
        }
        num_threads_ = threads_for(call_.num_threads, total, kWorthAThread);
        bool share = num_threads_ > 1 && works_.size() < static_cast<size_t>(num_threads_) * kUnitsPerThread;
        size_t scratch = 0;
        for (size_t index = 0; index < works_.size(); ++index) {
            Work& work = works_[index];
            RowBlock block = rows_of(work);
            int splits = block.last_split() - block.first_split();
            if (!share || splits < 2) {
                units_.push_back({static_cast<int>(index), -1, cost(block)});
                continue;
            }
            work.shared = static_cast<int>(splits_of_.size());
            work.scratch = scratch;
            scratch += static_cast<size_t>(splits) * States::floats(work.num_rows, layout_.v_pad);
            splits_of_.push_back(splits);
            for (int split = block.first_split(); split < block.last_split(); ++split)
                units_.push_back({static_cast<int>(index), split, cost(block) / splits});
        }
        scratch_.resize(scratch);
        splits_left_ = std::vector<std::atomic<int>>(splits_of_.size());
        auto is_dearer = [](const Unit& a, const Unit& b) { return a.cost > b.cost; };
        if (num_threads_ > 1 && !std::is_sorted(units_.begin(), units_.end(), is_dearer))
            std::stable_sort(units_.begin(), units_.end(), is_dearer);
    }

    int64_t cost(const RowBlock& block) const {
        return static_cast<int64_t>(block.num_rows) * (block.last - block.first) * (call_.head_dim + call_.v_head_dim);
    }

    RowBlock rows_of(const Work& work) const {
        RowBlock block;
        int first_token = call_.query_starts[work.seq];
        int tokens = call_.query_starts[work.seq + 1] - first_token;
        int token = work.first_row / group_, in_group = work.first_row % group_;
        for (int row = 0; row < work.num_rows; ++row) {
            int head = work.kv_head * group_ + in_group;
            int high = call_.seq_lens[work.seq] - tokens + token + 1;
            int low = call_.window > 0 && high > call_.window ? high - call_.window : 0;
            const T* query = static_cast<const T*>(call_.query) + (first_token + token) * call_.query_row_stride +
                             head * call_.query_head_stride;
            block.add(reinterpret_cast<const char*>(query), low, high);
            if (++in_group == group_) in_group = 0, ++token;
        }
        return block;
    }

    PagedTiles tiles_of(const Work& work) const {
        return {static_cast<const uint32_t*>(call_.kv), &layout_, call_.block_tables + work.seq * call_.table_stride,
                call_.block_size, work.kv_head};
    }

    // The first keys and values of the unit that this thread is likely to take next; null where there are none.
    Upcoming upcoming(int index) const {
        Upcoming next;
        const size_t other = static_cast<size_t>(index) + static_cast<size_t>(num_threads_);
        if (other >= units_.size()) return next;
        const Unit& unit = units_[other];
        const Work& work = works_[unit.work];
        if (work.num_rows > kStreamingRows) return next;
        RowBlock block = rows_of(work);
        int begin = unit.split < 0 ? block.first : std::max(block.first, unit.split * kSplit);
        PagedTiles tiles = tiles_of(work);
        int position = begin / kTile * kTile;
        for (int i = 0; i < kSpanTiles && position + i * kTile < block.last; ++i)
            next.k[i] = tiles.tile(position + i * kTile);
        return next;
    }

    void compute(int index) {
        Ahead::own().ask(kLinesAUnit);
        const Unit& unit = units_[index];
        const Work& work = works_[unit.work];
        RowBlock block = rows_of(work);
        Upcoming next;
        if (work.num_rows <= kStreamingRows) next = upcoming(index);
        size_t floats = States::floats(work.num_rows, layout_.v_pad);
        if (unit.split >= 0) {
            float* base = scratch_.data() + work.scratch + (unit.split - block.first_split()) * floats;
            attend_split<T>(block, unit.split, rule_, tiles_of(work), next, States(base, work.num_rows));
            // Whoever computes the last of them folds all, in order.
            if (splits_left_[static_cast<size_t>(work.shared)].fetch_sub(1) == 1) combine(work, block);
            return;
        }
        static thread_local std::vector<float> own;
        if (own.size() < 2 * floats) own.resize(2 * floats);
        States total(own.data(), work.num_rows);
        States part(own.data() + floats, work.num_rows);
        Folder folder(*this, block, total);
        for (int split = block.first_split(); split < block.last_split(); ++split) {
            const States& into = folder.next_state(split, part);
            attend_split<T>(block, split, rule_, tiles_of(work), next, into);
            folder.take(split, into);
        }
        finish_all(work, block, total);
    }

    void combine(const Work& work, const RowBlock& block) {
        size_t floats = States::floats(work.num_rows, layout_.v_pad);
        float* base = scratch_.data() + work.scratch;
        States total(base, work.num_rows);
        Folder folder(*this, block, total);
        for (int split = block.first_split(); split < block.last_split(); ++split, base += floats)
            folder.take(split, States(base, work.num_rows));
        finish_all(work, block, total);
    }

    // A block's splits in order. Each row starts with its own first split, whose state is taken as it is.
    class Folder {
       public:
        Folder(const Attention& owner, const RowBlock& block, const States& total)
            : v_pad_(owner.layout_.v_pad), block_(block), total_(total) {}

        // The first split of a block is computed in place.
        const States& next_state(int split, const States& part) const {
            return split == block_.first_split() ? total_ : part;
        }

        void take(int split, const States& part) {
            if (split == block_.first_split()) return;
            for (int row = 0; row < block_.num_rows; ++row) {
                if (!block_.in_split(row, split)) continue;
                if (block_.low[row] / kSplit < split) {
                    fold(total_, part, row, v_pad_);
                    continue;
                }
                total_.max[row] = part.max[row];
                std::memcpy(total_.sums + row * kLanes, part.sums + row * kLanes, kLanes * sizeof(float));
                std::memcpy(total_.values + static_cast<size_t>(row) * v_pad_,
                            part.values + static_cast<size_t>(row) * v_pad_, v_pad_ * sizeof(float));
            }
        }

       private:
        int v_pad_;
        const RowBlock& block_;
        const States& total_;
    };

    void finish_all(const Work& work, const RowBlock& block, const States& states) {
        int first_token = call_.query_starts[work.seq];
        for (int row = 0; row < work.num_rows; ++row) {
            int token = first_token + (work.first_row + row) / group_;
            int head = work.kv_head * group_ + (work.first_row + row) % group_;
            T* out = static_cast<T*>(call_.out) +
                     (static_cast<size_t>(token) * call_.num_q_heads + head) * call_.v_head_dim;
            if (block.high[row] <= block.low[row])
                std::memset(static_cast<void*>(out), 0, sizeof(T) * call_.v_head_dim);
            else
                finish<T>(states, row, call_.sinks == nullptr ? nullptr : call_.sinks + head, out, call_.v_head_dim,
                          layout_.v_pad);
        }
    }

    AttentionCall call_;
    Layout layout_;
    ScoreRule rule_;
    int group_;
    int num_threads_ = 1;
    std::vector<Work> works_;
    std::vector<Unit> units_;
    std::vector<float> scratch_;
    std::vector<int> splits_of_;                 // of each shared work
    std::vector<std::atomic<int>> splits_left_;  // likewise, in the run
};

}  // namespace pagefleet
