// Calls for blocks and ranges of tokens of a sequence, with wrong values: forgetting, retaining, describing.
#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

class BadBlocks : public WrongCalls {};

TEST_F(BadBlocks, RangesAndValuesThatAreNoneAreRefused) {
    const auto forget = [&](int64_t first, int64_t n) {
        return [&, first, n](ta_error* err) { return ta_seq_forget(pool.get(), long_seq, first, n, nullptr, err); };
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
    expect_failures({
        {"forget of null", [&](ta_error* err) { return ta_seq_forget(nullptr, long_seq, 0, 1, nullptr, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"forget from -1 on", forget(-1, 1), TA_E_INVALID, 2, "1 tokens from -1 on"},
        {"forget -1", forget(0, -1), TA_E_INVALID, 2, "-1 tokens from 0 on"},
        {"forget beyond the end", forget(1, length(pool, long_seq)), TA_E_INVALID, 2, "are to be forgotten"},
        {"forget INT64_MAX", forget(INT64_MAX, INT64_MAX), TA_E_INVALID, 2, "are to be forgotten"},
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
    });
}

}  // namespace
}  // namespace ta::testing
