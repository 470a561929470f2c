// What the decode kernels take beside the call itself, and how their work is cut. Host and device.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_args.h"

namespace ta::cuda {

inline constexpr int kDecodeRows = 16;        // query rows (query tokens x group) of a sequence and kv head at most
inline constexpr int kDecodeMaxWarps = 8;     // of a CTA
inline constexpr int kDecodeMaxInFlight = 8;  // pieces of one warp

// A unit of work is one page of one kv head of one sequence; all units of a call, ordered by sequence, head and page, are cut into
// equal contiguous ranges, at most one per warp. A segment is the part of one (sequence, head) within a range. A segment that is not the
// whole of its (sequence, head) leaves a partial result in slot range + sequence * kv_heads + head: both only grow along the
// units, and each new segment raises one of them, so no two segments share a slot.
struct DecodeParams {
    AttendArgs a;
    const int32_t* pages_before;  // a.pages_before, or what decode_window_kernel made of it
    float* partial_o;             // [slots, row_capacity, head_dim], not divided by l
    float2* partial_ml;           // [slots, row_capacity] maximum in log2 units and sum
    float unit;                   // of scores: scale * log2 e, or scale under a softcap
    int32_t row_capacity;         // 4, 8 or 16
    int32_t warps;                // of the grid
    int32_t ring_bytes;           // of each warp, for pieces in flight
    bool bulk;                    // cp.async.bulk instead of cp.async
};

// How many ranges there are: none is empty.
TA_HD inline int64_t ranges(int64_t units, int64_t warps) {
    return units < warps ? units : warps;
}
TA_HD inline int64_t range_begin(int64_t units, int64_t ranges, int64_t index) {
    return units * index / ranges;
}
// The range that holds unit u.
TA_HD inline int32_t range_of(int64_t units, int64_t ranges, int64_t u) {
    return int32_t(((u + 1) * ranges - 1) / units);
}

}  // namespace ta::cuda
