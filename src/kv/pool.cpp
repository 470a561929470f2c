#include "src/kv/pool.h"

#include <chrono>
#include <vector>

#include "kernels/format/hash.h"
#include "kernels/format/rotation.h"

namespace ta {
namespace {

// A hash of all that determines the meaning of a page's bytes. Pools of equal fingerprints can exchange pages.
uint64_t fingerprint_of(const Geometry& g, const Numerics& n) {
    std::vector<uint8_t> bytes;
    const auto add = [&bytes](const auto& value) {
        const auto* p = reinterpret_cast<const uint8_t*>(&value);
        bytes.insert(bytes.end(), p, p + sizeof value);
    };
    add(uint32_t(kFormatVersion));
    add(g.layers);
    add(g.common.kv_heads);
    add(g.common.head_dim);
    bytes.insert(bytes.end(), g.k_bits.begin(), g.k_bits.end());
    bytes.insert(bytes.end(), g.v_bits.begin(), g.v_bits.end());
    add(uint32_t(n.hadamard));
    add(n.hadamard ? n.hadamard_seed : uint64_t{0});
    add(n.sink_blocks);
    add(uint32_t(n.encode.k_turning));
    for (const float x : n.k_offset) add(x);
    // Other pools let tokens share scales.
    if (n.batch_invariant) add(uint32_t{1} << 31);
    if (g.falls) add(uint32_t(g.all_8_bits ? 8 : 4));
    if (g.keeps_own_scales) add(uint32_t(kPageTokens));
    if (g.common.is_wider()) {
        add(g.common.k_channels);
        add(g.common.v_channels);
    }
    for (const int64_t window : g.windows) add(window);
    if (!g.is_even()) {
        for (const LayerShape& s : g.shapes) add(s);
    }
    return hash_bytes(bytes.data(), bytes.size());
}

uint64_t next_serial() {
    static std::atomic<uint64_t> pools{0};
    return pools.fetch_add(1) + 1;
}

// A generation somewhere in the lower half.
uint32_t some_generation(const void* pool) {
    const uint64_t seed[] = {reinterpret_cast<uintptr_t>(pool),
                             uint64_t(std::chrono::steady_clock::now().time_since_epoch().count())};
    return uint32_t(hash_bytes(seed, sizeof seed) >> 33);
}

}  // namespace

static Pages pages_of(Geometry&& geometry, Numerics&& numerics, const Context& context) {
    const uint64_t fingerprint = fingerprint_of(geometry, numerics);
    return {std::move(geometry), std::move(numerics), fingerprint, context.kernels().codec};
}

Pool::Pool(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics, uint64_t budget, uint32_t max_sequences)
    : context_(std::move(context)),
      pages_(pages_of(std::move(geometry), std::move(numerics), *context_)),
      serial_(next_serial()),
      first_generation_(some_generation(this)),
      residency_(*context_, pages_, sequences_, budget),
      prefixes_(residency_.store(), geometry_, first_ticket()),
      sequences_(*context_, pages_, residency_, prefixes_, max_sequences, first_generation_, counters_.saturated_values) {
    for (int c = 0; c < kMaxHeadDim; ++c) signs_[c] = rotation_sign(numerics_.hadamard_seed, c) ? -1.0f : 1.0f;
}

Result<std::shared_ptr<Pool>> Pool::create(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics,
                                           uint64_t budget, uint32_t max_sequences, const TierSettings& tiers) {
    std::shared_ptr<Pool> pool(new Pool(std::move(context), std::move(geometry), std::move(numerics), budget, max_sequences));
    if (Device* device = pool->context().device()) {
        TA_RETURN_IF_ERROR(device->health());
        TA_RETURN_IF_ERROR(pool->blocks().take_slab());
        TA_RETURN_IF_ERROR(pool->sequences_.records().open(*device, pool->pages_, max_sequences));
    }
    TA_RETURN_IF_ERROR(pool->residency_.open(tiers));
    if (!tiers.disk_path.empty() && tiers.disk_budget > 0) pool->recover_published();
    TA_RETURN_IF_ERROR(pool->residency_.start(pool->first_ticket()));
    return pool;
}

Pool::~Pool() {
    blocks().keep_records();
    residency_.stop();
}

// A closed pool creates no sequences, so none appears after those that are released.
Status Pool::close() {
    TA_RETURN_IF_ERROR(sequences_.close());
    if (mover()) mover()->cancel_all();
    blocks().keep_records();
    prefixes_.close();
    sequences_.release_all();
    blocks().trim();
    return {};
}

}  // namespace ta
