// The C interface that library.py calls. Nothing here throws. Calls whose values decide what memory is touched check
// them first, return a Status and say in `where` at which element they stopped.
#include <sys/mman.h>

#include <new>

#include "attention.h"
#include "elementwise.h"
#include "kv_write.h"
#include "linear.h"
#include "linear_q.h"
#include "program.h"
#include "rope.h"
#include "sampler.h"

using namespace pagefleet;

namespace {

constexpr int32_t kFloat32 = 0;

// run(T{}) with T the type that `dtype` names.
template <class Run>
int32_t typed(int32_t dtype, Run run) {
    try {
        if (dtype == kFloat32)
            run(float{});
        else
            run(Bf16{});
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kOk;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t pagefleet_attention(const AttentionCall* call, int32_t dtype, int32_t* where) {
    Status status = check(*call, where);
    if (status != kOk) return status;
    return typed(dtype, [&](auto type) { Attention<decltype(type)>(*call).run(); });
}

int32_t pagefleet_write_kv(const WriteCall* call, int32_t dtype, int32_t* where) {
    Status status = check(*call, where);
    if (status != kOk) return status;
    return typed(dtype, [&](auto type) { write_kv<decltype(type)>(*call); });
}

// pairs [num_pairs][2]: (source, destination) blocks of block_bytes each.
int32_t pagefleet_copy_blocks(void* kv, const int64_t* pairs, int64_t num_pairs, int64_t num_blocks,
                              int64_t block_bytes, int32_t* where) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        int64_t source = pairs[2 * pair], destination = pairs[2 * pair + 1];
        *where = static_cast<int32_t>(pair);
        if (source < 0 || source >= num_blocks || destination < 0 || destination >= num_blocks) return kBadBlock;
        char* base = static_cast<char*>(kv);
        if (source == destination) continue;
        std::memcpy(base + destination * block_bytes, base + source * block_bytes, static_cast<size_t>(block_bytes));
    }
    return kOk;
}

int32_t pagefleet_linear(const LinearCall* call, int32_t dtype, int32_t*) {
    return typed(dtype, [&](auto type) { linear<decltype(type)>(*call, {}); });
}

int32_t pagefleet_pack_linear(const void* weight, int64_t row_stride, int32_t out_features, int32_t in_features,
                              void* packed, int32_t num_threads, int32_t dtype, int32_t*) {
    return typed(dtype, [&](auto type) {
        using T = decltype(type);
        pack_linear(static_cast<const T*>(weight), row_stride, out_features, in_features, static_cast<T*>(packed),
                    num_threads);
    });
}

int32_t pagefleet_grouped_linear(const GroupedLinearCall* call, int32_t dtype, int32_t*) {
    return typed(dtype, [&](auto type) { grouped_linear<decltype(type)>(*call, {}); });
}

int32_t pagefleet_pack_grouped(const PackGroupedCall* call, int32_t*) {
    pack_grouped(*call);
    return kOk;
}

int32_t pagefleet_add_norm(const NormCall* call, int32_t dtype, int32_t*) {
    return typed(dtype, [&](auto type) { add_norm<decltype(type)>(*call); });
}

int32_t pagefleet_rope_write_kv(const RopeCall* call, int32_t dtype, int32_t* where) {
    Status status = check(*call, where);
    if (status != kOk) return status;
    return typed(dtype, [&](auto type) { rope_write_kv<decltype(type)>(*call); });
}

int32_t pagefleet_gate(const GateCall* call, int32_t dtype, int32_t*) {
    return typed(dtype, [&](auto type) { gate<decltype(type)>(*call); });
}

// ops [num_ops], one after another; stops at the first that is refused.
int32_t pagefleet_run_program(const Op* ops, int32_t num_ops, int32_t dtype, int32_t* where) {
    Status status = kOk;
    int32_t memory = typed(dtype, [&](auto type) { status = run_program<decltype(type)>(ops, num_ops, where); });
    return status != kOk ? status : memory;
}

int32_t pagefleet_sample(const SampleCall* call, int32_t dtype, int32_t*) {
    return typed(dtype, [&](auto type) { sample<decltype(type)>(*call); });
}

// The hash of the sources that this library was built from.
const char* pagefleet_source_key() { return PAGEFLEET_SOURCE_KEY; }

// Ask for huge pages for the whole ones inside [start, start + bytes), before the memory is touched. A hint only.
void pagefleet_advise_huge_pages(void* start, int64_t bytes) {
    constexpr uintptr_t kHuge = 2u << 20;
    uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + kHuge - 1) & ~(kHuge - 1);
    uintptr_t end = (reinterpret_cast<uintptr_t>(start) + static_cast<uintptr_t>(bytes)) & ~(kHuge - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // extern "C"
#pragma GCC visibility pop
