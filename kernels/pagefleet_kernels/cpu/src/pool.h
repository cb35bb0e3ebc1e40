// A thread pool that sleeps when idle. One job at a time; a caller that finds it busy works alone.
//
// A job is a queue of items for each thread; each item writes only what is its own, so which thread computes it never
// shows in the results. A thread takes the items of its own queue front to back, which lets it read memory in one stream;
// one that is through takes the second half of the longest queue that is left. So a thread that the kernel descheduled,
// or that still sleeps, delays one item, not its share.
#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
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
        static std::mutex guard;
        static Pool* pool = nullptr;
        static pid_t owner = 0;
        std::lock_guard<std::mutex> hold(guard);
        if (pool == nullptr || owner != getpid()) {
            pool = new Pool;
            owner = getpid();
        }
        return *pool;
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
        {
            std::lock_guard<std::mutex> hold(mutex_);
            while (num_workers_ < num_threads - 1 && start_worker()) {
            }
            function_ = function;
            context_ = context;
            num_queues_ = num_threads;
            job_ = (job_ / kJob + 1) * kJob + static_cast<uint64_t>(num_threads);
        }
        wake_.notify_all();
        take_items(0);
        {
            std::lock_guard<std::mutex> hold(mutex_);
            job_ = job_ / kJob * kJob;  // whoever wakes up now finds nothing to do
        }
        spin([this] { return active_ == 0; });
        {
            std::unique_lock<std::mutex> hold(mutex_);
            done_.wait(hold, [this] { return active_ == 0; });
        }
        if (out_of_memory_.exchange(false)) throw std::bad_alloc();
    }

   private:
    static constexpr int kSpins = 4000;      // pauses: some ten microseconds
    static constexpr uint64_t kJob = 1024;  // job_: number of the job * kJob + threads that may still join it

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
        for (int turn = 0; turn < kSpins && !condition(); ++turn)
            if (!ahead.ask(4)) _mm_pause();
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
        uint64_t done = 0;
        auto wanted = [&] {
            const uint64_t job = job_;
            return job / kJob != done && job % kJob > static_cast<uint64_t>(self);
        };
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            wake_.wait(hold, wanted);
            done = job_ / kJob;
            ++active_;
            hold.unlock();
            take_items(self);
            hold.lock();
            if (--active_ == 0) done_.notify_one();
            hold.unlock();
            spin([&] { return wanted() || !is_hot(); });
            hold.lock();
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

    std::mutex turn_;  // held by the caller whose job is running
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Function function_ = nullptr;
    void* context_ = nullptr;
    int num_queues_ = 0;
    Queue queues_[kMaxThreads];
    std::atomic<uint64_t> job_{0};  // written under mutex_
    std::atomic<int> active_{0};    // workers in the job; likewise
    std::atomic<int> hot_{0};       // Hot objects alive
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
