// Precision that falls on demotion while memory or files fail: a block is at any time one of the three things that it can
// be, and never gains bits; a move that fails leaves it what and where it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "src/api/api.h"
#include "support/failing_memory.h"
#include "support/files.h"
#include "support/tiers.h"
#include "tests/tiering/store/falling_blocks.h"
#include "tiering/faulty_files.h"
#include "tiering/simulated_device.h"

namespace ta::testing {
namespace {

constexpr uint64_t kBlocks = 8;
constexpr FallingShape kShape{2, 1, 64};

struct Life {
    std::shared_ptr<FaultyFiles> files = std::make_shared<FaultyFiles>();
    SimulatedDevice* device = nullptr;
    Folder folder;
    Context context;
    KvPool pool;
    ta_seq seq = 0;
    std::vector<uint32_t> bits = std::vector<uint32_t>(kBlocks, 8);  // at most
    const std::vector<std::map<uint32_t, std::vector<uint8_t>>>& expected;

    // FaultyFiles takes memory where no library would.
    enum class On { kMemory, kDevice };
    explicit Life(const std::vector<std::map<uint32_t, std::vector<uint8_t>>>& blocks, bool faulty_files = true,
                  On on = On::kMemory)
        : expected(blocks) {
        Seams seams;
        if (faulty_files) seams.files = files;
        if (on == On::kDevice) {
            auto simulated = std::make_unique<SimulatedDevice>(5);
            device = simulated.get();
            seams.device = std::move(simulated);
        }
        seams.io_retry_after = std::chrono::milliseconds(1);
        ta::Context::Options options;
        options.threads = 2;
        Result<std::shared_ptr<ta::Context>> made = ta::Context::create(std::move(options), std::move(seams));
        if (!made.ok()) throw std::runtime_error("no context");
        context.reset(new ta_context{made.take()});
        auto o = pool_options(kShape.layers, kShape.kv_heads, kShape.head_dim, 8);
        o.budget_bytes = uint64_t{1} << 20;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = tiers.disk_bytes = uint64_t{1} << 20;
        tiers.disk_folder = folder.path().c_str();
        tiers.high_percent = 100;
        tiers.falling_precision = TA_ON;
        o.tiers = &tiers;
        pool = make_pool(context, o);
        seq = make_sequence(pool);
        grow(pool, seq);
    }

    static void grow(const KvPool& pool, ta_seq seq) {
        Random random(11);
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {kBlocks * 64}, {0});
        for (uint32_t layer = 0; layer < kShape.layers; ++layer) {
            Tensor k(random.normals(kBlocks * 64 * 64), kBlocks * 64, 1, 64),
                v(random.normals(kBlocks * 64 * 64), kBlocks * 64, 1, 64);
            append(plan, layer, k, v);
        }
        end(plan);
    }

    // The work that may fail: demotions, promotions and demotions again, and a step between them.
    uint64_t work() {
        uint64_t failed = move(1, 6, TA_TIER_HOST) + move(2, 4, TA_TIER_DISK) + move(7, 1, TA_TIER_DISK);
        auto plan_of = [&] {
            ta_plan* p = nullptr;
            return ta_plan_create(pool.get(), nullptr, &p, nullptr) == TA_OK ? Plan(p) : nullptr;
        };
        if (const Plan plan = plan_of()) {
            const int32_t n_new = 0, n_query = 1;
            if (ta_plan_begin(plan.get(), 1, &seq, &n_new, &n_query, nullptr, nullptr) == TA_OK)
                ta_plan_abort(plan.get(), nullptr);
            else
                ++failed;
        }
        return failed + move(1, 3, TA_TIER_DEVICE) + move(0, 8, TA_TIER_HOST);
    }
    uint64_t move(uint64_t first, uint64_t n, ta_tier tier) {
        ta_ticket ticket = 0;
        if (ta_seq_move(pool.get(), seq, first, n, tier, &ticket, nullptr) != TA_OK) return 1;
        auto info = sized<ta_move_info>();
        while (ta_move_wait(pool.get(), ticket, -1, &info, nullptr) != TA_OK) {  // memory is gone: ask again
        }
        return info.failed;
    }

    void check() {
        for (uint64_t b = 0; b < kBlocks; ++b) {
            const BlockBits got = read_block(pool, seq, b);
            EXPECT_LE(got.bits, bits[b]) << "block " << b << " gained bits";
            ASSERT_TRUE(expected[b].contains(got.bits));
            EXPECT_TRUE(got.payload == expected[b].at(got.bits)) << "block " << b << " of " << got.bits << " bits";
            bits[b] = got.bits;
        }
        verify(pool, seq);
    }
    void finish() {
        for (int attempt = 0; attempt < 1000 && work() > 0; ++attempt) usleep(1000);
        check();
        EXPECT_EQ(bits, (std::vector<uint32_t>{8, 4, 2, 2, 2, 2, 4, 2}));
        const ta_tier_stats host = tier_stats(pool, TA_TIER_HOST);
        EXPECT_EQ(host.blocks, kBlocks);
        EXPECT_EQ(host.low_blocks, 5u);
        EXPECT_EQ(tier_stats(pool, TA_TIER_DEVICE).bytes_used, 0u) << "a place was lost";
    }
};

std::vector<std::map<uint32_t, std::vector<uint8_t>>> expected_blocks() {
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, pool_options(kShape.layers, kShape.kv_heads, kShape.head_dim, 8));
    const ta_seq seq = make_sequence(pool);
    Life::grow(pool, seq);
    std::vector<std::map<uint32_t, std::vector<uint8_t>>> blocks;
    for (uint64_t b = 0; b < kBlocks; ++b) {
        const BlockBits full = read_block(pool, seq, b);
        std::map<uint32_t, std::vector<uint8_t>> of{{8, full.payload}};
        of[4] = encode_lower_by_hand(kShape, 8, of[8], full.trailer);
        of[2] = encode_lower_by_hand(kShape, 4, of[4], full.trailer);
        blocks.push_back(std::move(of));
    }
    return blocks;
}

TEST(FallingFaults, WithoutAny) {
    const auto blocks = expected_blocks();
    Life life(blocks);
    EXPECT_EQ(life.work(), 0u);
    life.finish();
}

TEST(FallingFaults, MemoryRunsOut) {
    const auto blocks = expected_blocks();
    for (const bool forever : {false, true}) {
        uint64_t failures = 0;
        for (int64_t at = 0;; at += 1 + at / 40) {
            SCOPED_TRACE(::testing::Message() << "allocation " << at << (forever ? " and all after it" : ""));
            Life life(blocks, false);
            const uint64_t before = allocations();
            break_memory(MemorySource::kNew, forever, at);
            uint64_t failed = 0;
            try {
                failed = life.work();
            } catch (...) {
                heal_memory();
                throw;
            }
            const bool over = int64_t(allocations() - before) <= at;
            heal_memory();
            failures += failed;
            life.check();
            life.finish();
            if (over || HasFatalFailure()) break;
        }
        EXPECT_GT(failures, 0u);
    }
}

TEST(FallingFaults, FilesFail) {
    const auto blocks = expected_blocks();
    for (const Fault fault : {Fault::kEio, Fault::kEnospc, Fault::kShort, Fault::kTorn}) {
        for (const bool forever : {false, true}) {
            for (uint64_t skip = 0;; ++skip) {
                SCOPED_TRACE(::testing::Message() << name_of(fault) << " after " << skip << (forever ? " for good" : ""));
                Life life(blocks);
                const uint64_t before = life.files->operations();
                life.files->break_now(fault, forever, skip);
                life.work();
                const bool over = life.files->operations() - before <= skip;
                life.files->heal();
                life.check();
                life.finish();
                if (over || HasFatalFailure()) break;
            }
        }
    }
}

// Blocks are encoded by the device, and copied from there.
TEST(FallingFaults, ADeviceFails) {
    const auto blocks = expected_blocks();
    for (const DeviceFault fault : {DeviceFault::kNone, DeviceFault::kFails, DeviceFault::kWrong, DeviceFault::kLate}) {
        for (const bool forever : {false, true}) {
            for (uint64_t skip = 0;; skip += fault == DeviceFault::kLate ? 5 : 1) {
                SCOPED_TRACE(::testing::Message() << name_of(fault) << " after " << skip << (forever ? " for good" : ""));
                Life life(blocks, false, Life::On::kDevice);
                const uint64_t before = life.device->operations();
                life.device->break_now(fault, forever, skip);
                life.work();
                const bool over = life.device->operations() - before <= skip;
                life.device->heal();
                life.check();
                life.finish();
                if (over || fault == DeviceFault::kNone || HasFatalFailure()) break;
            }
        }
    }
}

// A damaged block does not get hashes that say it is right.
TEST(FallingFaults, DamagedBlocksStayWhatTheyAre) {
    const auto blocks = expected_blocks();
    Life life(blocks);
    const auto byte_of = [&](uint64_t b, size_t at) -> uint8_t& {
        uint8_t* slot = nullptr;
        (void)life.pool->impl->sequences().inspect(life.seq, [&](const Sequence& s) {
            slot = s.blocks[size_t(b)]->slot();
            return Status();
        });
        return slot[at];
    };
    const size_t payload = kShape.payload_bytes(8);
    for (const size_t at : {size_t{77}, payload - 1, payload + 8}) {
        byte_of(3, at) ^= 4;
        EXPECT_EQ(life.move(1, 6, TA_TIER_HOST), 1u);
        EXPECT_EQ(life.move(3, 1, TA_TIER_DISK), 1u);
        byte_of(3, at) ^= 4;
        life.check();
        EXPECT_EQ(life.bits[3], 8u);
    }
    EXPECT_EQ(life.bits[4], 4u);
    byte_of(4, 100) ^= 1;
    EXPECT_EQ(life.move(2, 4, TA_TIER_DISK), 1u);
    byte_of(4, 100) ^= 1;
    life.check();
    EXPECT_EQ(life.bits, (std::vector<uint32_t>{8, 4, 2, 2, 4, 2, 4, 8}));
    life.finish();
}

}  // namespace
}  // namespace ta::testing
