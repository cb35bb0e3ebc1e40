// A list of calls that is run in one go: a model's step without the way back to the caller between its ops.
#pragma once

#include <optional>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "linear_q.h"
#include "rope.h"

namespace pagefleet {

// Mirrored in calls.py.
enum OpKind : int32_t { kLinear = 0, kNorm = 1, kRope = 2, kAttention = 3, kGate = 4, kGroupedLinear = 5 };

// Mirrored field by field in calls.py.
struct Op {
    const void* call;  // of the kind's struct
    int32_t kind;
};

// What the first linear in [first, end) reads.
template <class T>
Panels weights_of(const Op* first, const Op* end) {
    for (const Op* op = first; op < end; ++op) {
        if (op->kind == kLinear) return panels_of<T>(*static_cast<const LinearCall*>(op->call));
        if (op->kind == kGroupedLinear) return panels_of(*static_cast<const GroupedLinearCall*>(op->call));
    }
    return {};
}

// Threads wait for the next op for a moment instead of falling asleep. May throw bad_alloc.
template <class T>
Status run_program(const Op* ops, int num_ops, int32_t* where) {
    Pool::Hot hot(Pool::instance());
    std::optional<Attention<T>> attention;  // of the layers so far
    for (int index = 0; index < num_ops; ++index) {
        const Op& op = ops[index];
        switch (op.kind) {
            case kLinear:
                linear<T>(*static_cast<const LinearCall*>(op.call), weights_of<T>(&op + 1, ops + num_ops));
                break;
            case kGroupedLinear:
                grouped_linear<T>(*static_cast<const GroupedLinearCall*>(op.call), weights_of<T>(&op + 1, ops + num_ops));
                break;
            case kNorm: add_norm<T>(*static_cast<const NormCall*>(op.call)); break;
            case kGate: gate<T>(*static_cast<const GateCall*>(op.call)); break;
            case kRope: {
                const auto& call = *static_cast<const RopeCall*>(op.call);
                Status status = check(call, where);
                if (status != kOk) return status;
                rope_write_kv<T>(call);
                break;
            }
            case kAttention: {
                const auto& call = *static_cast<const AttentionCall*>(op.call);
                if (!attention.has_value() || !attention->turn_to(call)) {
                    Status status = check(call, where);
                    if (status != kOk) return status;
                    attention.emplace(call);
                }
                attention->run();
                break;
            }
        }
    }
    return kOk;
}

}  // namespace pagefleet
