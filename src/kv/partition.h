// A sequence whose blocks are spread over the ranks of a group.
#pragma once

#include <cstdint>
#include <memory>

#include "include/turboattention.h"
#include "src/kv/share/exchange.h"

namespace ta {

// One rank's side of a partitioned sequence. Every rank quantizes all tokens. A block of another rank is dropped once there is
// a next block: how that begins depends on the last one.
struct Partition {
    std::shared_ptr<share::Exchange> exchange;  // knows the tag; nullptr: it does not know it yet
    uint64_t tag = 0;                           // of the sequence, the same on all ranks
    uint32_t first_rank = 0;                    // the rank of block 0
    ta_partition_output output = TA_OUTPUT_ALL;
    uint32_t output_rank = 0;
    // At first the tag's history (Exchange::add_tag): the same on ranks that have made the same calls. Later the identity of
    // the last step with queries in which the ranks met, whatever calls failed before. The open plan writes it.
    mutable uint64_t last_met = 0;
    // Steps without queries since then that failed or were aborted here; other ranks may have ended them. The plan writes this,
    // too.
    mutable uint64_t given_up = 0;

    Partition() = default;
    Partition(const Partition&) = delete;
    Partition& operator=(const Partition&) = delete;
    ~Partition() {
        if (exchange) exchange->remove_tag(tag, last_met, given_up);
    }

    uint32_t rank_of(int64_t block) const { return uint32_t((uint64_t(first_rank) + uint64_t(block)) % exchange->ranks()); }
    // The first block of this rank.
    int32_t first_own() const {
        const uint32_t n = exchange->ranks();
        return int32_t((exchange->rank() + n - first_rank) % n);
    }
    bool owns(int64_t block) const { return rank_of(block) == exchange->rank(); }
};

}  // namespace ta
