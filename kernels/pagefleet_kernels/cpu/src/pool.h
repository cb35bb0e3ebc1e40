// A thread pool that sleeps when idle. One job at a time; a caller that finds it busy works alone.
//
// A job is a number of units; each unit writes only what is its own, so which thread takes which unit never shows in
// the results. Units are taken from a shared counter: a thread that the kernel descheduled delays one unit, not its
// fixed share.
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

namespace pagefleet {

class Pool {
   public:
    using Function = void (*)(void* context, int unit);

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

    // function(context, unit) for every unit in [0, num_units), on at most num_threads threads, this one included.
    // The only exception that a unit may throw is bad_alloc; it reaches the caller when all units are over.
    void run(int num_threads, int num_units, Function function, void* context) {
        if (num_threads > num_units) num_threads = num_units;
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (num_threads <= 1 || !turn.try_lock()) {
            for (int unit = 0; unit < num_units; ++unit) function(context, unit);
            return;
        }
        {
            std::lock_guard<std::mutex> hold(mutex_);
            while (num_workers_ < num_threads - 1 && num_workers_ < kMaxWorkers && start_worker()) {
            }
            function_ = function;
            context_ = context;
            num_units_ = num_units;
            next_.store(0, std::memory_order_relaxed);
            seats_ = num_threads - 1;
        }
        wake_.notify_all();
        take_units();
        {
            std::lock_guard<std::mutex> hold(mutex_);
            seats_ = 0;  // whoever wakes up now finds nothing to do
        }
        spin([this] { return active_ == 0; });
        {
            std::unique_lock<std::mutex> hold(mutex_);
            done_.wait(hold, [this] { return active_ == 0; });
        }
        if (out_of_memory_.exchange(false)) throw std::bad_alloc();
    }

   private:
    static constexpr int kMaxWorkers = 255;
    static constexpr int kSpins = 4000;  // pauses: some ten microseconds

    template <class Condition>
    void spin(Condition condition) const {
        for (int turn = 0; turn < kSpins && !condition(); ++turn) _mm_pause();
    }

    // False when the system grants no further thread: the job then runs on those there are.
    bool start_worker() {
        try {
            std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {
            return false;
        }
        ++num_workers_;
        return true;
    }

    void work() {
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            wake_.wait(hold, [this] { return seats_ > 0; });
            --seats_;
            ++active_;
            hold.unlock();
            take_units();
            hold.lock();
            if (--active_ == 0) done_.notify_one();
            hold.unlock();
            spin([this] { return seats_ > 0 || !is_hot(); });
            hold.lock();
        }
    }

    void take_units() {
        for (;;) {
            int unit = next_.fetch_add(1, std::memory_order_relaxed);
            if (unit >= num_units_) return;
            try {
                function_(context_, unit);
            } catch (const std::bad_alloc&) {
                out_of_memory_.store(true);
            }
        }
    }

    std::mutex turn_;  // held by the caller whose job is running
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Function function_ = nullptr;
    void* context_ = nullptr;
    int num_units_ = 0;
    std::atomic<int> seats_{0};   // workers that may still join the job; written under mutex_
    std::atomic<int> active_{0};  // workers in the job; likewise
    std::atomic<int> hot_{0};     // Hot objects alive
    int num_workers_ = 0;
    std::atomic<int> next_{0};
    std::atomic<bool> out_of_memory_{false};  // some unit of the job
};

// Threads for `work` elements, of which each thread shall have `worth` at least, or fewer where threads are awake.
inline int threads_for(int num_threads, int64_t work, int64_t worth) {
    constexpr int kAwake = 8;
    if (Pool::instance().is_hot()) worth /= kAwake;
    return static_cast<int>(std::min<int64_t>(num_threads, work / worth + 1));
}

// body(unit) for every unit.
template <class Body>
void parallel_for(int num_threads, int num_units, Body& body) {
    Pool::instance().run(
        num_threads, num_units, [](void* context, int unit) { (*static_cast<Body*>(context))(unit); }, &body);
}

}  // namespace pagefleet
