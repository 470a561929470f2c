// Calls for blocks and ranges of tokens of a sequence, with wrong values: forgetting, shifting, retaining, describing.
#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

class BadBlocks : public WrongCalls {};

TEST_F(BadBlocks, RangesAndValuesThatAreNoneAreRefused) {
    const auto forget = [&](int64_t first, int64_t n) {
        return [&, first, n](ta_error* err) { return ta_seq_forget(pool.get(), long_seq, first, n, nullptr, err); };
    };
    const auto shift = [&](int64_t first, int64_t n) {
        return [&, first, n](ta_error* err) { return ta_seq_shift(pool.get(), long_seq, first, n, err); };
    };
    const auto retain = [&](uint64_t first, uint64_t n, uint32_t priority, int64_t ms) {
        return [&, first, n, priority, ms](ta_error* err) {
            auto r = sized<ta_retention>();
            r.priority = priority;
            r.duration_ms = ms;
            return ta_seq_retain(pool.get(), long_seq, first, n, &r, err);
        };
    };
    ta_block_info described[2];
    const auto describe = [&](uint64_t first, uint64_t n, ta_block_info* to) {
        return [&, first, n, to](ta_error* err) { return ta_seq_describe_blocks(pool.get(), long_seq, first, n, to, err); };
    };
    const void* located[2];
    const auto locate = [&](uint64_t first, uint64_t n, const void** to) {
        return [&, first, n, to](ta_error* err) { return ta_seq_locate_blocks(pool.get(), long_seq, first, n, to, err); };
    };
    auto range = sized<ta_memory_range>();
    const auto memory = [&](ta_tier tier, ta_memory_range* to) {
        return [&, tier, to](ta_error* err) { return ta_kv_pool_get_memory(pool.get(), tier, to, err); };
    };
    expect_failures({
        {"forget of null", [&](ta_error* err) { return ta_seq_forget(nullptr, long_seq, 0, 1, nullptr, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"forget from -1 on", forget(-1, 1), TA_E_INVALID, 2, "1 tokens from -1 on"},
        {"forget -1", forget(0, -1), TA_E_INVALID, 2, "-1 tokens from 0 on"},
        {"forget beyond the end", forget(1, length(pool, long_seq)), TA_E_INVALID, 2, "are to be forgotten"},
        {"forget INT64_MAX", forget(INT64_MAX, INT64_MAX), TA_E_INVALID, 2, "are to be forgotten"},
        {"shift of null", [&](ta_error* err) { return ta_seq_shift(nullptr, long_seq, 0, 64, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"shift from -64 on", shift(-64, 64), TA_E_INVALID, 2, "64 tokens from -64 on"},
        {"shift from 1 on", shift(1, 64), TA_E_INVALID, 2, "multiples of 64"},
        {"shift 63", shift(64, 63), TA_E_INVALID, 3, "multiples of 64"},
        {"shift -64", shift(64, -64), TA_E_INVALID, 3, "-64 tokens from 64 on"},
        {"shift behind the end", shift(1 << 20, 0), TA_E_INVALID, 2, "the sequence has"},
        {"shift beyond the end", shift(64, 1 << 20), TA_E_INVALID, 3, "the sequence has"},
        {"shift INT64_MAX", shift(INT64_MAX / 64 * 64, INT64_MAX / 64 * 64), TA_E_INVALID, 2, "are to be taken out"},
        {"shift without an embedding", shift(64, 64), TA_E_UNSUPPORTED, 0, "without options.rotary"},
        {"retain of null", [&](ta_error* err) { return ta_seq_retain(nullptr, long_seq, 0, 1, nullptr, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"priority 64", retain(0, 1, 64, 0), TA_E_INVALID, 4, "retention.priority is 64"},
        {"-1 ms", retain(0, 1, 1, -1), TA_E_INVALID, 4, "retention.duration_ms is -1"},
        {"INT64_MAX ms", retain(0, 1, 1, INT64_MAX), TA_E_INVALID, 4, "it takes 0 to 2^53"},
        {"retain beyond the end", retain(1, UINT64_MAX, 1, 0), TA_E_INVALID, 2, "the sequence has"},
        {"describe of null", [&](ta_error* err) { return ta_seq_describe_blocks(nullptr, long_seq, 0, 1, described, err); },
         TA_E_INVALID, 0, "pool is null"},
        {"describe into nothing", describe(0, 1, nullptr), TA_E_INVALID, 4, "out is null"},
        {"describe beyond the end", describe(UINT64_MAX, 2, described), TA_E_INVALID, 2, "the sequence has"},
        {"locate of null", [&](ta_error* err) { return ta_seq_locate_blocks(nullptr, long_seq, 0, 1, located, err); },
         TA_E_INVALID, 0, "pool is null"},
        {"locate into nothing", locate(0, 1, nullptr), TA_E_INVALID, 4, "out is null"},
        {"locate beyond the end", locate(UINT64_MAX, 2, located), TA_E_INVALID, 2, "the sequence has"},
        {"memory of null", [&](ta_error* err) { return ta_kv_pool_get_memory(nullptr, TA_TIER_DEVICE, &range, err); },
         TA_E_INVALID, 0, "pool is null"},
        {"memory of tier 9", memory(9, &range), TA_E_INVALID, 1, "tier"},
        {"memory of a CPU's device tier", memory(TA_TIER_DEVICE, &range), TA_E_UNSUPPORTED, 1, "of a CPU"},
        {"memory of no tier", memory(TA_TIER_HOST, &range), TA_E_UNSUPPORTED, 1, "no such tier"},
        {"memory into nothing", memory(TA_TIER_HOST, nullptr), TA_E_INVALID, 2, "out is null"},
    });
}

}  // namespace
}  // namespace ta::testing
