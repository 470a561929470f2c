// Failures that are told of while operator new fails.
#include "src/core/status.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "src/api/api.h"
#include "support/failing_memory.h"

namespace ta {
namespace {

// From here to the end of its scope operator new fails.
class NoMemory {
  public:
    NoMemory() { testing::break_memory(testing::MemorySource::kNew, true, 0); }
    ~NoMemory() { testing::heal_memory(); }
};

Status refused(int i) {
    return fail(TA_E_MEMORY, "the allocator has no %d bytes", i).layer(i).tier(TA_TIER_HOST).bytes(uint64_t(i));
}

TEST(Status, HasItsDetailsWithoutMemory) {
    Status status, copy, longer;
    ta_error err;
    {
        const NoMemory none;
        status = refused(4096);
        copy = status.clone();
        longer = refused(7).because("so it is");
        api::report(copy, &err);
    }
    ASSERT_TRUE(status.detail() && copy.detail() && longer.detail());
    for (const ta_error* e : {status.detail(), copy.detail(), const_cast<const ta_error*>(&err)}) {
        EXPECT_STREQ(e->message, "the allocator has no 4096 bytes");
        EXPECT_EQ(e->code, TA_E_MEMORY);
        EXPECT_EQ(e->bytes, 4096);
        EXPECT_EQ(e->layer, 4096);
        EXPECT_EQ(e->tier, TA_TIER_HOST);
        EXPECT_EQ(e->block, -1);
    }
    EXPECT_STREQ(longer.detail()->message, "the allocator has no 7 bytes; so it is");
}

TEST(Status, GivesSpareDetailsBack) {
    constexpr int kSpare = Status::kSpareDetails;
    std::vector<Status> all(kSpare + 1);
    for (int round = 0; round < 3; ++round) {
        {
            const NoMemory none;
            for (int i = 0; i <= kSpare; ++i) all[size_t(i)] = refused(i);
        }
        for (int i = 0; i < kSpare; ++i) {
            ASSERT_TRUE(all[size_t(i)].detail()) << i;
            EXPECT_EQ(all[size_t(i)].detail()->bytes, i);
        }
        // The one too many has its status still, and says that it cannot say more.
        EXPECT_EQ(all[kSpare].code(), TA_E_MEMORY);
        EXPECT_EQ(all[kSpare].detail(), nullptr);
        ta_error err;
        EXPECT_EQ(api::report(std::move(all[kSpare]).layer(3).because("a cause"), &err), TA_E_MEMORY);
        EXPECT_EQ(err.code, TA_E_MEMORY);
        EXPECT_EQ(err.layer, -1);
        EXPECT_NE(std::string(err.message).find("no memory"), std::string::npos) << err.message;
        // One that is dropped makes room for one.
        all[5] = {};
        {
            const NoMemory none;
            all[5] = refused(500);
            all[kSpare] = refused(0);
        }
        ASSERT_TRUE(all[5].detail());
        EXPECT_EQ(all[5].detail()->bytes, 500);
        EXPECT_EQ(all[kSpare].detail(), nullptr);
        for (Status& s : all) s = {};
    }
    ta_error err;
    api::report(Status(), &err);
    EXPECT_STREQ(err.message, "") << "of a success";
}

// In TSan's eyes too.
TEST(Status, HasDetailsOfItsOwnInEachThread) {
    constexpr int kThreads = 4, kRounds = 2000, kHeld = Status::kSpareDetails / kThreads;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    std::atomic<bool> go{false};
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            while (!go) std::this_thread::yield();
            Status held[kHeld];
            for (int round = 0; round < kRounds; ++round) {
                for (int i = 0; i < kHeld; ++i) held[i] = refused((t * kRounds + round) * kHeld + i);
                for (int i = 0; i < kHeld; ++i) {
                    if (!held[i].detail() || held[i].detail()->bytes != (t * kRounds + round) * kHeld + i) ++wrong;
                    held[i] = {};
                }
            }
        });
    }
    {
        const NoMemory none;
        go = true;
        for (std::thread& t : threads) t.join();
    }
    EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace ta
