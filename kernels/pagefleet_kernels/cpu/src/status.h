// What a call of the library returns; library.py turns it into an error.
#pragma once

#include <cstdint>

namespace pagefleet {

enum Status : int32_t {
    kOk = 0,
    kBadStarts = 1,
    kTableTooShort = 2,
    kBadBlock = 3,
    kBadSlot = 4,
    kNoMemory = 5,
    kBadPosition = 6,
};

}  // namespace pagefleet
