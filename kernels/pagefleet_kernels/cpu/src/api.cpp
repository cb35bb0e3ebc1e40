// The C interface that library.py calls. Nothing here throws; a call returns a Status and says where it stopped.
#include <sys/mman.h>

#include <new>

#include "attention.h"
#include "kv_write.h"
#include "linear.h"

using namespace pagefleet;

namespace {

constexpr int32_t kFloat32 = 0;

template <class Call, class Float, class Brain>
int32_t checked(const Call& call, int32_t dtype, int32_t* where, Float run_float, Brain run_bf16) {
    Status status = check(call, where);
    if (status != kOk) return status;
    try {
        dtype == kFloat32 ? run_float() : run_bf16();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kOk;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t pagefleet_attention(const AttentionCall* call, int32_t dtype, int32_t* where) {
    return checked(
        *call, dtype, where, [&] { Attention<float>(*call).run(); }, [&] { Attention<Bf16>(*call).run(); });
}

int32_t pagefleet_write_kv(const WriteCall* call, int32_t dtype, int32_t* where) {
    return checked(
        *call, dtype, where, [&] { write_kv<float>(*call); }, [&] { write_kv<Bf16>(*call); });
}

// pairs [num_pairs][2]: (source, destination) blocks of block_bytes each.
int32_t pagefleet_copy_blocks(void* kv, const int64_t* pairs, int64_t num_pairs, int64_t num_blocks,
                              int64_t block_bytes, int32_t* where) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        int64_t source = pairs[2 * pair], destination = pairs[2 * pair + 1];
        *where = static_cast<int32_t>(pair);
        if (source < 0 || source >= num_blocks || destination < 0 || destination >= num_blocks) return kBadBlock;
        char* base = static_cast<char*>(kv);
        if (source != destination) std::memcpy(base + destination * block_bytes, base + source * block_bytes, block_bytes);
    }
    return kOk;
}

// The caller has checked shapes: nothing here depends on values.
void pagefleet_linear(const LinearCall* call, int32_t dtype) {
    dtype == kFloat32 ? linear<float>(*call) : linear<Bf16>(*call);
}

void pagefleet_pack_linear(const void* weight, int64_t row_stride, int32_t out_features, int32_t in_features,
                           void* packed, int32_t num_threads, int32_t dtype) {
    if (dtype == kFloat32)
        pack_linear(static_cast<const float*>(weight), row_stride, out_features, in_features,
                    static_cast<float*>(packed), num_threads);
    else
        pack_linear(static_cast<const Bf16*>(weight), row_stride, out_features, in_features,
                    static_cast<Bf16*>(packed), num_threads);
}

// Ask for huge pages for the whole ones inside [start, start + bytes), before the memory is touched. A hint only.
void pagefleet_advise_huge_pages(void* start, int64_t bytes) {
    constexpr uintptr_t kHuge = 2u << 20;
    uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + kHuge - 1) & ~(kHuge - 1);
    uintptr_t end = (reinterpret_cast<uintptr_t>(start) + static_cast<uintptr_t>(bytes)) & ~(kHuge - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // extern "C"
#pragma GCC visibility pop
