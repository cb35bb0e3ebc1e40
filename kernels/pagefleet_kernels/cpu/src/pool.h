// A thread pool that sleeps when idle. One job at a time; a caller that finds it busy works alone. A job is handed over
// and ended without a lock or a system call, unless a thread sleeps.
//
// A job is a queue of items for each thread; each item writes only what is its own, so which thread computes it never
// shows in the results. A thread takes the items of its own queue front to back, which lets it read memory in one stream;
// one that is through takes the second half of the longest queue that is left. So a thread that the kernel descheduled,
// or that still sleeps, delays one item, not its share.
#pragma once

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "ahead.h"

namespace pagefleet {

class Pool {
   public:
    static constexpr int kMaxThreads = 256;

    // Item `index` of the queue of thread `owner`, computed by thread `self`.
    using Function = void (*)(void* context, int self, int owner, int index);

    // The process's pool. Never destroyed: its threads sleep until the process ends. A forked child gets a new one,
    // since threads do not survive a fork.
    static Pool& instance() {
        static std::atomic<Pool*> current{nullptr};
        Pool* pool = current.load(std::memory_order_acquire);
        if (pool != nullptr) return *pool;
        [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
        auto fresh = std::make_unique<Pool>();
        if (!current.compare_exchange_strong(pool, fresh.get())) return *pool;
        return *fresh.release();
    }

    // While one lives, workers look for the next job for a moment before they sleep: jobs follow each other closely.
    class Hot {
       public:
        explicit Hot(Pool& pool) : pool_(pool) { ++pool_.hot_; }
        ~Hot() { --pool_.hot_; }
        Hot(const Hot&) = delete;
        Hot& operator=(const Hot&) = delete;

       private:
        Pool& pool_;
    };

    // A thread that is awake joins a job at once: smaller jobs are worth one.
    bool is_hot() const { return hot_.load(std::memory_order_relaxed) > 0; }

    // All items of num_threads (<= kMaxThreads) queues of queue_length (< 2^28) each, on at most as many threads, this
    // one (0) included. The only exception that an item may throw is bad_alloc; it reaches the caller when all are over.
    void run(int num_threads, int queue_length, Function function, void* context) {
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (num_threads <= 1 || !turn.try_lock()) {
            for (int owner = 0; owner < num_threads; ++owner)
                for (int index = 0; index < queue_length; ++index) function(context, 0, owner, index);
            return;
        }
        for (int owner = 0; owner < num_threads; ++owner)
            queues_[owner].items.store(Items{owner, 0, queue_length}.word(), std::memory_order_relaxed);
        while (num_workers_ < num_threads - 1 && start_worker()) {
        }
        function_ = function;
        context_ = context;
        num_queues_ = num_threads;
        gate_ = Gate{++job_, num_threads, 0}.word();
        if (sleepers_ > 0) notify(wake_);
        take_items(0);
        gate_.fetch_and(~Gate::kThreads);  // whoever comes now finds nothing to do
        auto is_over = [this] { return Gate::of(gate_).active == 0; };
        spin(is_over);
        if (!is_over()) {
            std::unique_lock<std::mutex> hold(mutex_);
            is_waiting_ = true;
            done_.wait(hold, is_over);
            is_waiting_ = false;
        }
        if (out_of_memory_.exchange(false)) throw std::bad_alloc();
    }

   private:
    // Turns that a thread waits before it sleeps, some 20 ns each: in a program for the next op, else for a next call, in
    // which case it lets others have the core every now and then.
    static constexpr int kHotSpins = 4000, kSpins = 1000, kTurnsAYield = 64;

    // Which job runs, how many threads may join it (0: none any more) and how many workers are in it, in one word.
    struct Gate {
        uint32_t job;
        int threads, active;

        static constexpr uint64_t kThreads = 0xffff0000u;

        static Gate of(uint64_t word) {
            return {static_cast<uint32_t>(word >> 32), static_cast<int>(word >> 16 & 0xffff), static_cast<int>(word & 0xffff)};
        }
        uint64_t word() const {
            return static_cast<uint64_t>(job) << 32 | static_cast<uint64_t>(threads) << 16 | static_cast<uint64_t>(active);
        }
    };

    // The items [begin, end) of an owner's queue, in one word.
    struct Items {
        int owner, begin, end;

        static Items of(uint64_t word) {
            return {static_cast<int>(word >> 56), static_cast<int>(word >> 28 & 0xfffffff), static_cast<int>(word & 0xfffffff)};
        }
        uint64_t word() const {
            return static_cast<uint64_t>(owner) << 56 | static_cast<uint64_t>(begin) << 28 | static_cast<uint64_t>(end);
        }
    };

    // What a thread will do next. Others take from its end.
    struct alignas(64) Queue {
        std::atomic<uint64_t> items{0};
    };

    template <class Condition>
    void spin(Condition condition) const {
        Ahead& ahead = Ahead::own();
        for (int turn = 1; !condition(); ++turn) {
            const bool hot = is_hot();
            if (turn > (hot ? kHotSpins : kSpins)) return;
            if (!ahead.ask(4)) _mm_pause();
            if (!hot && turn % kTurnsAYield == 0) sched_yield();
        }
    }

    // Whoever waits has announced it before it looked at the gate, and looks under the lock.
    void notify(std::condition_variable& waiting) {
        { std::lock_guard<std::mutex> hold(mutex_); }
        waiting.notify_all();
    }

    // False when the system grants no further thread: the job then runs on those there are.
    bool start_worker() {
        try {
            std::thread([this, self = num_workers_ + 1] { work(self); }).detach();
        } catch (const std::system_error&) {
            return false;
        }
        ++num_workers_;
        return true;
    }

    void work(int self) {
        uint32_t last = 0;
        auto is_wanted = [&](const Gate& gate) { return gate.job != last && gate.threads > self; };
        auto look = [&] { return is_wanted(Gate::of(gate_)); };
        for (;;) {
            spin(look);
            if (!look()) {
                std::unique_lock<std::mutex> hold(mutex_);
                ++sleepers_;
                wake_.wait(hold, look);
                --sleepers_;
            }
            uint64_t word = gate_;
            const Gate gate = Gate::of(word);
            if (!is_wanted(gate) || !gate_.compare_exchange_strong(word, word + 1)) continue;
            last = gate.job;
            take_items(self);
            if (Gate::of(gate_.fetch_sub(1)).active == 1 && is_waiting_) notify(done_);
        }
    }

    void take_items(int self) {
        Items item;
        while (take(self, item)) {
            try {
                function_(context_, self, item.owner, item.begin);
            } catch (const std::bad_alloc&) {
                out_of_memory_.store(true);
            }
        }
    }

    bool take(int self, Items& item) {
        std::atomic<uint64_t>& own = queues_[self].items;
        do {
            uint64_t word = own.load(std::memory_order_relaxed);
            for (item = Items::of(word); item.begin < item.end; item = Items::of(word))
                if (own.compare_exchange_weak(word, Items{item.owner, item.begin + 1, item.end}.word())) return true;
        } while (steal(own));
        return false;
    }

    // An item is never put back into a queue that it has left, so a word that has not changed means what it meant.
    bool steal(std::atomic<uint64_t>& own) {
        for (;;) {
            Queue* longest = nullptr;
            uint64_t word = 0;
            int most = 0;
            for (int index = 0; index < num_queues_; ++index) {
                const uint64_t seen = queues_[index].items.load(std::memory_order_relaxed);
                const Items items = Items::of(seen);
                if (items.end - items.begin > most) most = items.end - items.begin, longest = &queues_[index], word = seen;
            }
            if (longest == nullptr) return false;
            const Items items = Items::of(word);
            const int middle = items.begin + most / 2;
            if (!longest->items.compare_exchange_strong(word, Items{items.owner, items.begin, middle}.word())) continue;
            own.store(Items{items.owner, middle, items.end}.word());
            return true;
        }
    }

    std::mutex turn_;   // held by the caller whose job is running
    std::mutex mutex_;  // of the two below
    std::condition_variable wake_, done_;
    Function function_ = nullptr;
    void* context_ = nullptr;
    int num_queues_ = 0;
    uint32_t job_ = 0;
    Queue queues_[kMaxThreads];
    alignas(64) std::atomic<uint64_t> gate_{0};
    std::atomic<int> sleepers_{0};         // workers that wait for wake_, or are about to
    std::atomic<bool> is_waiting_{false};  // the caller, for done_
    std::atomic<int> hot_{0};              // Hot objects alive
    int num_workers_ = 0;
    std::atomic<bool> out_of_memory_{false};  // some item of the job
};

// Threads for `work` elements, of which each thread shall have `worth` at least, or fewer where threads are awake.
inline int threads_for(int num_threads, int64_t work, int64_t worth) {
    constexpr int kAwake = 8;
    if (Pool::instance().is_hot()) worth /= kAwake;
    const int most = std::max(1, std::min(num_threads, Pool::kMaxThreads));
    return static_cast<int>(std::min<int64_t>(most, work / worth + 1));
}

// body(self, owner, index) for every item of num_threads queues.
template <class Body>
void run_queues(int num_threads, int queue_length, Body& body) {
    Pool::instance().run(
        num_threads, queue_length,
        [](void* context, int self, int owner, int index) { (*static_cast<Body*>(context))(self, owner, index); }, &body);
}

// body(unit) for every unit, dealt out to the threads in turn.
template <class Body>
void parallel_for(int num_threads, int num_units, Body& body) {
    const int threads = std::max(1, std::min({num_threads, num_units, Pool::kMaxThreads}));
    auto item = [&](int, int owner, int index) {
        const int unit = index * threads + owner;
        if (unit < num_units) body(unit);
    };
    run_queues(threads, (num_units + threads - 1) / threads, item);
}

}  // namespace pagefleet
