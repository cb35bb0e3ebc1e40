// Asking for weights before they are needed, so that memory works while the arithmetic does.
//
// In a step every weight is read once, in an order that is known: a thread reads its own panels of a linear front to
// back, then those of the next linear. So each thread has a cursor that runs along this order, some way ahead of what is
// computed: in even steps while it computes, and as fast as memory goes while it waits for other threads. A prefetch of an
// address that is mapped no more does nothing.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pagefleet {

// How the panels of a linear are divided: as many whole ones for each thread, one after the other; those that are left are
// cut by rows, and the pieces dealt out in turn.
struct Panels {
    const char* weight = nullptr;
    size_t panel_bytes = 0;
    int threads = 1;
    int whole = 0;  // of each thread
    int rest = 0;   // left over
    int parts = 1;  // of each that is left over

    struct Piece {
        int panel;  // -1: none
        int part;   // -1: all rows
    };

    int queue_length() const { return whole + (rest * parts + threads - 1) / threads; }

    Piece piece(int owner, int index) const {
        if (index < whole) return {owner * whole + index, -1};
        const int at = (index - whole) * threads + owner;
        if (at >= rest * parts) return {-1, -1};
        return {threads * whole + at / parts, at % parts};
    }
};

// Lines [next, end) of memory to ask for.
struct Lines {
    const char* next = nullptr;
    const char* end = nullptr;

    void ask() {
        _mm_prefetch(next, _MM_HINT_T0);
        next += 64;
    }
};

// Positions are bytes from the start of the thread's own panels of `now`, those of `next` behind them.
class Ahead {
   public:
    // The calling thread's.
    static Ahead& own() {
        static thread_local Ahead ahead;
        return ahead;
    }

    // A linear begins: `now` is read by this thread, then `next`, of the next linear, if there is one.
    void begin(int thread, const Panels& now, const Panels& next) {
        const int length = now_.queue_length();
        if (panel_ > length && next_.weight == now.weight && thread == thread_) {
            panel_ -= length;
            asked_ -= static_cast<int64_t>(now_.panel_bytes) * length;
        } else {
            panel_ = 0;
            asked_ = 0;
            line_ = end_ = nullptr;
        }
        now_ = now;
        next_ = next;
        thread_ = thread;
        read_ = 0;
    }

    bool has_begun(const Panels& now) const { return now_.weight == now.weight; }

    // What lies before `read` has been computed; nothing before `skip_to` needs to be asked for any more.
    void reading(int64_t read, int64_t skip_to) {
        read_ = read;
        while (asked_ < skip_to && (line_ != end_ || next_panel())) {
            const int64_t skipped = std::min<int64_t>(skip_to - asked_, end_ - line_);
            line_ += skipped;
            asked_ += skipped;
        }
    }

    // The next lines, as many as lie side by side and as may be asked for now.
    Lines next() {
        const int64_t left = kMost - (asked_ - read_);
        if (left <= 0 || (line_ == end_ && !next_panel())) return {};
        return {line_, line_ + std::min<int64_t>(left, end_ - line_)};
    }

    // What next() gave, and what is left of it.
    void asked(const Lines& left) {
        const char* line = std::min(left.next, end_);
        asked_ += line - line_;
        line_ = line;
    }

    // Ask for a few lines. False when enough is asked for.
    bool ask(int count) {
        Lines lines = next();
        if (lines.next == lines.end) return false;
        for (; count > 0 && lines.next < lines.end; --count) lines.ask();
        asked(lines);
        return true;
    }

   private:
    static constexpr int64_t kMost = 128 << 10;  // bytes: they and what is computed must fit into the second level

    // Go on to the next panel that this thread reads. False when there is none.
    bool next_panel() {
        const int length = now_.queue_length();
        while (panel_ < length + next_.queue_length()) {
            const Panels& panels = panel_ < length ? now_ : next_;
            const Panels::Piece piece = panels.piece(thread_, panel_ < length ? panel_ : panel_ - length);
            ++panel_;
            if (piece.panel < 0) {
                asked_ += static_cast<int64_t>(panels.panel_bytes);
                continue;
            }
            line_ = panels.weight + static_cast<size_t>(piece.panel) * panels.panel_bytes;
            end_ = line_ + panels.panel_bytes;
            return true;
        }
        return false;
    }

    Panels now_, next_;
    int thread_ = 0;
    int panel_ = 0;               // index of the one after that which is asked for
    const char* line_ = nullptr;  // to be asked for next
    const char* end_ = nullptr;   // of its panel
    int64_t asked_ = 0, read_ = 0;
};

}  // namespace pagefleet
