// The promises of every tier to its user: memory of the host or of a peer, or the disk.
#include <gtest/gtest.h>

#include <functional>

#include "support/files.h"
#include "tiering/disk/disk.h"
#include "tiering/host/host.h"
#include "tiering/peer/peer.h"

namespace ta {
namespace {

using testing::Folder;

constexpr size_t kBytes[kSlotClasses] = {12000, 5000};

struct Maker {
    const char* name;
    bool has_addresses;
    std::function<std::unique_ptr<Tier>(const Folder&, ThreadPool&)> make;
};
void PrintTo(const Maker& m, std::ostream* out) {
    *out << m.name;
}

class TierContract : public ::testing::TestWithParam<Maker> {
  protected:
    TierContract() {
        EXPECT_TRUE(threads.start(2).ok());
        tier = GetParam().make(folder, threads);
    }

    Folder folder;
    ThreadPool threads;
    std::unique_ptr<Tier> tier;
};

TEST_P(TierContract, AcquireIsAllOrNothing) {
    const std::vector<uint8_t> too_many(tier->stats().slots_free[1] + 1, 1);
    Result<std::vector<Slot>> none = tier->acquire(too_many);
    ASSERT_FALSE(none.ok());
    EXPECT_EQ(std::move(none).status().code(), TA_E_TIER_FULL);
    EXPECT_EQ(tier->stats().used, 0u);
    EXPECT_TRUE(tier->acquire({too_many.data(), too_many.size() - 1}).ok());
    EXPECT_EQ(tier->stats().slots_free[0], 0u);
}

TEST_P(TierContract, OnlyMemoryHasAddresses) {
    const uint8_t slot_class = 0;
    const Slot slot = tier->acquire({&slot_class, 1}).value()[0];
    EXPECT_EQ(tier->address(slot) != nullptr, GetParam().has_addresses);
}

TEST_P(TierContract, WhatIsGivenBackTwiceIsFreeOnce) {
    const uint8_t slot_class = 1;
    const Slot slot = tier->acquire({&slot_class, 1}).value()[0];
    tier->release({&slot, 1});
    tier->release({&slot, 1});
    EXPECT_EQ(tier->stats().used, 0u);
    const Slot never{1u << 30, slot_class};
    tier->release({&never, 1});
    EXPECT_EQ(tier->stats().used, 0u);
}

std::unique_ptr<Tier> make_disk(const Folder& folder, bool persistent) {
    DiskTierOptions o;
    o.path = persistent ? folder.file("tier") : folder.path();
    o.persistent = persistent;
    o.budget = 400000;
    std::copy(std::begin(kBytes), std::end(kBytes), o.slot_bytes);
    return DiskTier::open(system_files(), o).take();
}

const Maker kMakers[] = {
    {"host", true,
     [](const Folder&, ThreadPool& threads) -> std::unique_ptr<Tier> {
         HostTierOptions o;
         o.budget = 400000;
         std::copy(std::begin(kBytes), std::end(kBytes), o.slot_bytes);
         return HostTier::create(system_memory(), threads, o).take();
     }},
    {"peer", true,
     [](const Folder&, ThreadPool&) -> std::unique_ptr<Tier> {
         PeerTierOptions o;
         o.budget = 400000;
         std::copy(std::begin(kBytes), std::end(kBytes), o.slot_bytes);
         const std::shared_ptr<Context> own = Context::create({}).take();
         return PeerTier::create(*own, Context::create({}).take(), o).take();
     }},
    {"disk", false, [](const Folder& f, ThreadPool&) { return make_disk(f, false); }},
    {"disk_persistent", false, [](const Folder& f, ThreadPool&) { return make_disk(f, true); }},
};

INSTANTIATE_TEST_SUITE_P(Tiers, TierContract, ::testing::ValuesIn(kMakers),
                         [](const auto& maker) { return std::string(maker.param.name); });

}  // namespace
}  // namespace ta
