// The arithmetic of layer-ahead staging: which pages in host memory a step copies to device memory before its layers read them,
// and where they go. src/attend/cuda/staging.* carries it out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/kv/pool.h"

namespace ta {

// How often a call of attention reads a page that all rows of a sequence may see. Kernels take `rows_at_once` query rows (query
// token x group) of a kv head together. A row sees `window` keys; 0: all.
int64_t reads_of_page(int64_t n_query, int group, int64_t rows_at_once, int64_t window);

// A sequence's pages in host memory, in one layer.
struct HostPages {
    int64_t reads = 0;   // how often a call reads each
    uint64_t bytes = 0;  // of all of them
};

// Chooses the sequences whose pages are staged; those with the most reads come first. None, if staging is predicted to take as
// long as reading in place.
std::vector<uint32_t> choose_staged(std::span<const HostPages> sequences, StagingMode mode, double bytes_per_s);

// Places of staged pages. parts: 2 if the next layer's pages arrive while a layer's are read; 1 if there is no room for that.
struct StagingRing {
    struct Place {
        size_t slot, offset;
    };
    int parts = 0;
    size_t pages = 0;           // pages with places: the first ones
    std::vector<Place> places;  // [parts, pages]
};

// Slots that all pages take in so many parts. `page_bytes`: each page's size in the layer where it is largest, at most
// slot_bytes.
size_t count_ring_slots(std::span<const uint32_t> page_bytes, int parts, size_t slot_bytes);
// Cuts places from `slots` slots: two parts if all pages fit twice, else one part with as many pages as fit. Room for more
// pages is worth more than overlapping copies: a staged page crosses the bus once, a page in place once for every
// `rows_at_once` rows.
StagingRing cut_ring(std::span<const uint32_t> page_bytes, size_t slots, size_t slot_bytes);

}  // namespace ta
