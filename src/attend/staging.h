// Layer-ahead staging, the arithmetic: which pages in host memory a step copies to device memory before its layers read them,
// and where they go there. src/attend/cuda/staging.* does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/kv/pool.h"

namespace ta {

// How often a page that all rows of a sequence may see is read by a call of attention: kernels take `rows_at_once` query rows
// (query token x group) of a kv head together. A row sees `window` keys, 0: all.
int64_t reads_of_page(int64_t n_query, int group, int64_t rows_at_once, int64_t window);

// A sequence's pages in host memory, in one layer.
struct HostPages {
    int64_t reads = 0;   // of each by a call
    uint64_t bytes = 0;  // of all
};

// The sequences whose pages are to be staged, those whose pages are read most often first. None where staging all that may gain
// from it is predicted to take as long as reading it in place.
std::vector<uint32_t> choose_staged(std::span<const HostPages> sequences, StagingMode mode, double bytes_per_s);

// Places of staged pages. `parts` is 2 when a layer's pages lie there while the next one's arrive, 1 when there is no room for it.
struct StagingRing {
    struct Place {
        size_t slot, offset;
    };
    int parts = 0;
    size_t pages = 0;           // that have places: the first ones
    std::vector<Place> places;  // [parts, pages]
};

// Slots for all pages in so many parts. `page_bytes`: of each page, in the layer where it is largest; at most slot_bytes.
size_t count_ring_slots(std::span<const uint32_t> page_bytes, int parts, size_t slot_bytes);
// Cuts places from `slots` slots: in two parts if all pages fit, else as many as fit in one. A staged page is read once over
// the bus, one in place once for every `rows_at_once` rows: room for more pages is worth more than copies beside the work of the
// layer before.
StagingRing cut_ring(std::span<const uint32_t> page_bytes, size_t slots, size_t slot_bytes);

}  // namespace ta
