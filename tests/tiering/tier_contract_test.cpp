// What whoever moves blocks may rely on, whichever tier it is: host memory, the disk, and the simulated tier of other tests.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "src/tiering/disk.h"
#include "src/tiering/host.h"
#include "support/files.h"
#include "tiering/simulated_tier.h"
#include "tiering/tier_client.h"

namespace ta {
namespace {

using testing::Folder;
using testing::make_bytes;
using testing::make_identity;
using testing::read_request;
using testing::SimulatedTier;
using testing::write_request;

constexpr size_t kBytes[kSlotClasses] = {12000, 5000};

struct Maker {
    const char* name;
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
        if (auto* simulated = dynamic_cast<SimulatedTier*>(tier.get())) {
            stepper = std::thread([this, simulated] {
                while (!done) {
                    if (!simulated->step()) std::this_thread::yield();
                }
            });
        }
    }
    ~TierContract() override {
        done = true;
        if (stepper.joinable()) stepper.join();
    }

    Folder folder;
    ThreadPool threads;
    std::unique_ptr<Tier> tier;
    std::atomic<bool> done{false};
    std::thread stepper;
};

// Writes a block, reads it back, gives the slot back, over and over, each step from the completion of the one before.
class Chain final : public TierClient {
  public:
    Chain(Tier& tier, uint64_t id, int rounds) : tier_(tier), id_(id), rounds_(rounds) {}
    void start() { next(); }
    bool wait() {
        for (int i = 0; i < 20000 && !finished; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return finished;
    }
    std::atomic<bool> finished{false};
    std::atomic<int> wrong{0};

    void on_done(TierCompletion c) noexcept override {
        if (!c.status.ok() || c.cancelled || c.tag != tag_) ++wrong;
        if (reading_) {
            if (bytes_ != expected_) ++wrong;
            tier_.release({&slot_, 1});
            return next();
        }
        reading_ = true;
        std::fill(bytes_.begin(), bytes_.end(), uint8_t(0xee));
        submit(read_request(slot_, identity_, bytes_));
    }

  private:
    void next() {
        reading_ = false;
        if (rounds_-- == 0) {
            finished = true;
            return;
        }
        const auto slot_class = uint8_t((id_ + uint64_t(rounds_)) % 2);
        Result<std::vector<Slot>> slots = tier_.acquire({&slot_class, 1});
        if (!slots.ok()) {
            ++wrong;
            finished = true;
            return;
        }
        slot_ = slots.value()[0];
        identity_ = make_identity(id_, uint64_t(rounds_) + 1);
        bytes_ = expected_ = make_bytes(identity_, kBytes[slot_class]);
        submit(write_request(slot_, identity_, bytes_));
    }
    void submit(TierRequest r) {
        r.tag = ++tag_;
        if (tier_.submit({&r, 1}, *this).ok()) return;
        ++wrong;
        finished = true;
    }
    Tier& tier_;
    const uint64_t id_;
    int rounds_;
    bool reading_ = false;
    uint64_t tag_ = 0;
    Slot slot_;
    BlockIdentity identity_;
    std::vector<uint8_t> bytes_, expected_;
};

TEST_P(TierContract, CompletionsMayCallTheTier) {
    ASSERT_TRUE(tier);
    std::vector<std::unique_ptr<Chain>> chains;
    for (uint64_t i = 0; i < 6; ++i) chains.push_back(std::make_unique<Chain>(*tier, i, 40));
    for (auto& chain : chains) chain->start();
    for (auto& chain : chains) {
        EXPECT_TRUE(chain->wait());
        EXPECT_EQ(chain->wrong, 0);
    }
    for (int i = 0; i < 5000 && tier->stats().used > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(tier->stats().used, 0u);
}

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
    EXPECT_EQ(tier->address(slot) == nullptr, tier->kind() == TierKind::kDisk);
}

TEST_P(TierContract, RequestsForSlotsThatNobodyHasAreRefused) {
    const uint8_t slot_class = 1;
    const Slot slot = tier->acquire({&slot_class, 1}).value()[0];
    tier->release({&slot, 1});
    std::vector<uint8_t> bytes(kBytes[1]);
    Status why;
    EXPECT_TRUE(testing::run(*tier, {write_request(slot, make_identity(1, 1), bytes)}, &why).empty());
    EXPECT_EQ(why.code(), TA_E_STATE);
}

std::unique_ptr<Tier> make_disk(const Folder& folder, bool persistent, bool uring) {
    DiskTierOptions o;
    o.path = persistent ? folder.file("tier") : folder.path();
    o.persistent = persistent;
    o.use_uring = uring;
    o.budget = 400000;
    std::copy(std::begin(kBytes), std::end(kBytes), o.slot_bytes);
    return DiskTier::open(system_files(), o).take();
}

const Maker kMakers[] = {
    {"host",
     [](const Folder&, ThreadPool& threads) -> std::unique_ptr<Tier> {
         HostTierOptions o;
         o.budget = 400000;
         std::copy(std::begin(kBytes), std::end(kBytes), o.slot_bytes);
         return HostTier::create(system_memory(), threads, o).take();
     }},
    {"disk_uring", [](const Folder& f, ThreadPool&) { return make_disk(f, false, true); }},
    {"disk_threads", [](const Folder& f, ThreadPool&) { return make_disk(f, false, false); }},
    {"disk_persistent", [](const Folder& f, ThreadPool&) { return make_disk(f, true, true); }},
    {"simulated_device",
     [](const Folder&, ThreadPool&) -> std::unique_ptr<Tier> {
         return std::make_unique<SimulatedTier>(TierKind::kDevice, 400000, kBytes, 1);
     }},
};

INSTANTIATE_TEST_SUITE_P(Tiers, TierContract, ::testing::ValuesIn(kMakers),
                         [](const auto& maker) { return std::string(maker.param.name); });

}  // namespace
}  // namespace ta
