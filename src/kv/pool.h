// A pool: what its pages are, its sequences, their blocks in the tiers, and what they have published. Internally synchronised.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "src/core/context.h"
#include "src/kv/prefix.h"
#include "src/kv/sequences.h"
#include "src/page/pages.h"
#include "tiering/room/residency.h"

namespace ta {

class Pool final {
  public:
    // Counters since creation, for the statistics.
    struct Counters {
        std::atomic<uint64_t> appended_tokens{0}, closed_pages{0}, reopened_blocks{0}, copied_blocks{0}, saturated_values{0},
            clamped_values{0};
        // staged_steps: steps that staged blocks. staged_pages: one for each block and layer.
        std::atomic<uint64_t> staged_steps{0}, staged_pages{0}, staged_bytes{0};
    };

    static Result<std::shared_ptr<Pool>> create(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics,
                                                uint64_t budget, uint32_t max_sequences, const TierSettings& tiers = {});
    ~Pool();
    // Releases all sequences, and drops what is published.
    Status close();
    Status check_open() const { return sequences_.check_open(); }

    Context& context() const { return *context_; }
    const std::shared_ptr<Context>& shared_context() const { return context_; }
    const Pages& pages() const { return pages_; }
    const Geometry& geometry() const { return geometry_; }
    const Numerics& numerics() const { return numerics_; }
    uint64_t fingerprint() const { return pages_.fingerprint; }
    const float* rotation_signs() const { return signs_; }  // [kMaxHeadDim] +1 or -1; a layer uses the first head_dim
    // A number of this pool in the process, from 1.
    uint64_t serial() const { return serial_; }
    // Tickets start here.
    uint64_t first_ticket() const { return uint64_t(first_generation_) << 32; }
    Counters& counters() { return counters_; }
    const Counters& counters() const { return counters_; }

    Sequences& sequences() { return sequences_; }
    const Sequences& sequences() const { return sequences_; }

    // ---- blocks in the tiers

    Residency& residency() { return residency_; }
    const Residency& residency() const { return residency_; }
    BlockStore& blocks() { return residency_.store(); }
    const BlockStore& blocks() const { return residency_.store(); }
    const TierSettings& tier_settings() const { return residency_.settings(); }
    Mover* mover() const { return residency_.mover(); }
    const BlockReader& reader() const { return residency_.reader(); }
    // Records of the persistent file that were refused when it was opened.
    uint64_t refused_records() const { return refused_records_; }

    // ---- prefix reuse: pool_prefix.cpp

    PrefixStore& prefixes() { return prefixes_; }
    const PrefixStore& prefixes() const { return prefixes_; }
    // Publishes the first full blocks of a sequence in no plan, one for each key.
    Status publish(ta_seq seq, Tenant space, std::span<const uint8_t> keys);
    // Publishes full, verified blocks that no sequence has, the first ones of a prefix, under hashed keys. `holder`: the
    // caller, if it has a Residency::BlockHold.
    Status publish_blocks(Tenant space, std::span<const BlockKey> keys, std::span<const BlockPtr> blocks,
                          Residency::Holder holder = nullptr);
    // Makes a sequence of the namespace from the blocks that are published under the first keys.
    Result<std::pair<ta_seq, int64_t>> match_prefix(Tenant space, std::span<const uint8_t> keys);
    // The sequence's namespace as files name it: its own, or that of blocks that it shares.
    SpaceTag tag_of(const Sequences::Snapshot& s) const;
    // If files have named the maximum of namespaces, forgets those that nothing in the pool belongs to.
    void end_forgotten_namespaces();
    // Writes the namespace's published blocks to the persistent disk, if they are not there. The records stay beside blocks in
    // faster tiers.
    Status flush_namespace(Tenant space);

  private:
    Pool(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics, uint64_t budget, uint32_t max_sequences);
    void recover_published();
    Status check_unread(Block& block, uint64_t index);
    Status write_record(Block& block, uint64_t index);

    std::shared_ptr<Context> context_;
    const Pages pages_;
    const Geometry& geometry_ = pages_.geometry;
    const Numerics& numerics_ = pages_.numerics;
    const uint64_t serial_;
    const uint32_t first_generation_;  // of its sequences; differs between pools, so that an id of one pool names nothing in
                                       // another
    float signs_[kMaxHeadDim];
    Counters counters_;
    Residency residency_;  // its mover ends before the members below
    PrefixStore prefixes_;
    uint64_t refused_records_ = 0;
    Sequences sequences_;
};

}  // namespace ta
