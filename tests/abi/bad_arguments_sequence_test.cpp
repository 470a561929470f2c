// Calls on a sequence with wrong values: files, moves, prefixes, reservations, inspection.
#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

TEST_F(BadArguments, SequenceCallsRefuseNullAndLengths) {
    ta_seq out = 77;
    int64_t n = 77;
    expect_failures({
        {"create of null", [&](ta_error* err) { return ta_seq_create(nullptr, &out, err); }, TA_E_INVALID, 0, "pool is null"},
        {"create without out", [&](ta_error* err) { return ta_seq_create(pool.get(), nullptr, err); }, TA_E_INVALID, 1,
         "out is null"},
        {"fork of null", [&](ta_error* err) { return ta_seq_fork(nullptr, long_seq, &out, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"fork without out", [&](ta_error* err) { return ta_seq_fork(pool.get(), long_seq, nullptr, err); }, TA_E_INVALID, 2,
         "out is null"},
        {"truncate of null", [&](ta_error* err) { return ta_seq_truncate(nullptr, long_seq, 1, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"truncate to -1", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, -1, err); }, TA_E_INVALID, 2,
         "length is -1"},
        {"truncate to INT64_MIN", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, INT64_MIN, err); },
         TA_E_INVALID, 2, "length is -9223372036854775808"},
        {"truncate to more", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, 131, err); }, TA_E_INVALID, 2,
         "the sequence has 130"},
        {"truncate to INT64_MAX", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, INT64_MAX, err); },
         TA_E_INVALID, 2, "the sequence has 130"},
        {"release of null", [&](ta_error* err) { return ta_seq_release(nullptr, long_seq, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"length of null", [&](ta_error* err) { return ta_seq_length(nullptr, long_seq, &n, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"length without out", [&](ta_error* err) { return ta_seq_length(pool.get(), long_seq, nullptr, err); }, TA_E_INVALID,
         2, "out is null"},
        {"verify of null", [&](ta_error* err) { return ta_seq_verify(nullptr, long_seq, err); }, TA_E_INVALID, 0,
         "pool is null"},
    });
    EXPECT_EQ(out, 77u);
    EXPECT_EQ(n, 77);
    expect_success([&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, 130, err); });
    expect_success([&](ta_error* err) { return ta_seq_length(pool.get(), long_seq, &n, err); });
    expect_success([&](ta_error* err) { return ta_seq_verify(pool.get(), long_seq, err); });
}

TEST_F(BadArguments, FilesMovesAndNamespacesRefuseNull) {
    ta_seq out = 77;
    uint64_t n = 77;
    int64_t length = 77;
    ta_ticket ticket = 77;
    int32_t fd = 77;
    auto info = sized<ta_move_info>();
    ta_namespace space = 77;
    const uint8_t key[32] = {};
    const ta_status invalid = TA_E_INVALID;
    const auto save = [&](const char* path, ta_error* err) { return ta_seq_save(pool.get(), long_seq, path, nullptr, err); };
    const auto load = [&](const char* path, ta_seq* to, ta_error* err) {
        return ta_seq_load(pool.get(), path, nullptr, to, err);
    };
    auto sink = sized<ta_sink>(), no_write = sink;
    sink.write = [](void*, uint64_t, const void*, uint64_t) { return 1; };
    const auto load_all = [&](const char* path, uint64_t* count, ta_error* err) {
        return ta_kv_pool_load(pool.get(), path, nullptr, nullptr, 0, count, err);
    };
    const auto match = [&](const uint8_t* keys, ta_seq* to, int64_t* tokens, ta_error* err) {
        return ta_seq_match_prefix(pool.get(), space, keys, 1, to, tokens, err);
    };
    expect_failures({
        {"save to null", [&](ta_error* err) { return save(nullptr, err); }, invalid, 2, "path is null"},
        {"save to nothing", [&](ta_error* err) { return save("", err); }, invalid, 2, "path is empty"},
        {"load from null", [&](ta_error* err) { return load(nullptr, &out, err); }, invalid, 1, "path is null"},
        {"load without out", [&](ta_error* err) { return load("none", nullptr, err); }, invalid, 3, "out is null"},
        {"export of null", [&](ta_error* err) { return ta_seq_export(nullptr, long_seq, &sink, &n, err); }, invalid, 0,
         "pool is null"},
        {"export to null", [&](ta_error* err) { return ta_seq_export(pool.get(), long_seq, nullptr, &n, err); }, invalid, 2,
         "sink is null"},
        {"export to nothing", [&](ta_error* err) { return ta_seq_export(pool.get(), long_seq, &no_write, &n, err); }, invalid,
         2, "sink.write is null"},
        {"export that stops", [&](ta_error* err) { return ta_seq_export(pool.get(), long_seq, &sink, &n, err); },
         TA_E_CANCELLED, -1, "stopped"},
        {"import of null", [&](ta_error* err) { return ta_seq_import(nullptr, key, 1, &out, err); }, invalid, 0,
         "pool is null"},
        {"import from null", [&](ta_error* err) { return ta_seq_import(pool.get(), nullptr, 1, &out, err); }, invalid, 1,
         "data is null"},
        {"import without out", [&](ta_error* err) { return ta_seq_import(pool.get(), key, 1, nullptr, err); }, invalid, 3,
         "out is null"},
        {"import of no bytes", [&](ta_error* err) { return ta_seq_import(pool.get(), key, 0, &out, err); }, TA_E_CORRUPT, -1,
         "the given memory"},
        {"save the pool to null", [&](ta_error* err) { return ta_kv_pool_save(pool.get(), nullptr, 0, nullptr, err); }, invalid,
         1, "path is null"},
        {"load a pool from null", [&](ta_error* err) { return load_all(nullptr, &n, err); }, invalid, 1, "path is null"},
        {"load a pool without n", [&](ta_error* err) { return load_all("none", nullptr, err); }, invalid, 5, "n is null"},
        {"move without out",
         [&](ta_error* err) { return ta_seq_move(pool.get(), long_seq, 0, 1, TA_TIER_DEVICE, nullptr, err); }, invalid, 5,
         "out is null"},
        {"move to no tier", [&](ta_error* err) { return ta_seq_move(pool.get(), long_seq, 0, 1, ta_tier(9), &ticket, err); },
         invalid, 4, "tier is 9"},
        {"prefetch without out", [&](ta_error* err) { return ta_seq_prefetch(pool.get(), long_seq, 0, 1, nullptr, err); },
         invalid, 4, "out is null"},
        {"query of null", [&](ta_error* err) { return ta_move_query(nullptr, ticket, &info, err); }, invalid, 0,
         "pool is null"},
        {"descriptor of null", [&](ta_error* err) { return ta_kv_pool_descriptor(nullptr, &fd, err); }, invalid, 0,
         "pool is null"},
        {"take finished of null", [&](ta_error* err) { return ta_move_take_finished(nullptr, &ticket, 1, &n, err); }, invalid,
         0, "pool is null"},
        {"take finished without tiers", [&](ta_error* err) { return ta_move_take_finished(pool.get(), &ticket, 1, &n, err); },
         TA_E_UNSUPPORTED, 0, "no tier below"},
        {"descriptor without out", [&](ta_error* err) { return ta_kv_pool_descriptor(pool.get(), nullptr, err); }, invalid, 1,
         "out is null"},
        {"descriptor without tiers", [&](ta_error* err) { return ta_kv_pool_descriptor(pool.get(), &fd, err); },
         TA_E_UNSUPPORTED, 0, "no tier below"},
        {"take finished into null", [&](ta_error* err) { return ta_move_take_finished(pool.get(), nullptr, 1, &n, err); },
         invalid, 1, "out is null"},
        {"take finished without n", [&](ta_error* err) { return ta_move_take_finished(pool.get(), &ticket, 1, nullptr, err); },
         invalid, 3, "n is null"},
        {"query without tiers", [&](ta_error* err) { return ta_move_query(pool.get(), ticket, &info, err); }, TA_E_UNSUPPORTED,
         0, "no tier below"},
        {"residency without out", [&](ta_error* err) { return ta_seq_residency(pool.get(), long_seq, nullptr, err); }, invalid,
         2, "out is null"},
        {"tier statistics without stats",
         [&](ta_error* err) { return ta_kv_pool_get_tier_stats(pool.get(), TA_TIER_DEVICE, nullptr, err); }, invalid, 2,
         "stats is null"},
        {"namespace without options", [&](ta_error* err) { return ta_namespace_create(pool.get(), nullptr, &space, err); },
         invalid, 1, "options is null"},
        {"publish no keys", [&](ta_error* err) { return ta_seq_publish(pool.get(), long_seq, space, nullptr, 1, err); },
         invalid, 3, "keys is null"},
        {"match no keys", [&](ta_error* err) { return match(nullptr, &out, &length, err); }, invalid, 2, "keys is null"},
        {"match without out", [&](ta_error* err) { return match(key, nullptr, &length, err); }, invalid, 4, "out is null"},
        {"match without length", [&](ta_error* err) { return match(key, &out, nullptr, err); }, invalid, 5, "length is null"},
    });
    EXPECT_EQ(out, 77u);
    EXPECT_EQ(n, 77u);
    EXPECT_EQ(length, 77);
    EXPECT_EQ(ticket, 77u);
    EXPECT_EQ(fd, 77);
    EXPECT_EQ(space, 77u);
}

TEST_F(BadArguments, ReserveFitAndSuspendRefuseAndTakeNothing) {
    ta_ticket ticket = 77;
    auto out = sized<ta_fit>();
    out.bytes_new = 77;
    const ta_status invalid = TA_E_INVALID;
    const auto reserve = [&](int64_t tokens, int32_t wait_ms) {
        return [&, tokens, wait_ms](ta_error* err) { return ta_seq_reserve(pool.get(), long_seq, tokens, wait_ms, err); };
    };
    const auto fit = [&](std::vector<ta_seq> seqs, std::vector<int32_t> n_new) {
        return [&, seqs, n_new](ta_error* err) {
            return ta_kv_pool_fit(pool.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), &out, err);
        };
    };
    const auto suspend = [&](ta_tier tier, ta_ticket* to) {
        return [&, tier, to](ta_error* err) { return ta_seq_suspend(pool.get(), long_seq, tier, to, err); };
    };
    const auto refused = [&] {
        expect_failures({
            {"reserve of null", [&](ta_error* err) { return ta_seq_reserve(nullptr, long_seq, 1, 0, err); }, invalid, 0,
             "pool is null"},
            {"reserve -1", reserve(-1, 0), invalid, 2, "tokens is -1"},
            {"reserve INT64_MIN", reserve(INT64_MIN, 0), invalid, 2, "tokens is -9223372036854775808"},
            {"reserve 2^40", reserve(int64_t{1} << 40, 0), TA_E_LIMIT, 2, "more than 2^40"},
            {"reserve INT64_MAX", reserve(INT64_MAX, -1), TA_E_LIMIT, 2, "more than 2^40"},
            {"reserve beyond the budget", reserve((int64_t{1} << 40) - 130, 0), TA_E_TIER_FULL, -1, "device tier"},
            {"wait -2 ms", reserve(1, -2), invalid, 3, "wait_ms is -2"},
            {"wait longer than a day", reserve(1, 24 * 3600 * 1000 + 1), invalid, 3, "wait_ms is 86400001"},
            {"wait INT32_MIN ms", reserve(0, INT32_MIN), invalid, 3, "wait_ms is -2147483648"},
            {"fit of null", [&](ta_error* err) { return ta_kv_pool_fit(nullptr, 1, &long_seq, nullptr, &out, err); }, invalid,
             0, "pool is null"},
            {"fit no sequences", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 0, &long_seq, nullptr, &out, err); },
             invalid, 1, "n_seqs is 0"},
            {"fit no list", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, nullptr, nullptr, &out, err); }, invalid,
             2, "seqs is null"},
            {"fit without out", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, &long_seq, nullptr, nullptr, err); },
             invalid, 4, "out is null"},
            {"fit twice the same", fit({long_seq, 0, long_seq}, {1, 1, 1}), invalid, 2, "twice"},
            {"fit -1", fit({0, long_seq}, {1, -1}), invalid, 3, "n_new[1] is -1"},
            {"fit INT32_MIN", fit({0}, {INT32_MIN}), invalid, 3, "n_new[0] is -2147483648"},
            {"fit a stale one", fit({long_seq, 0xdeadull << 32}, {1, 1}), TA_E_STALE, 2, "no living sequence"},
            {"suspend of null", [&](ta_error* err) { return ta_seq_suspend(nullptr, long_seq, TA_TIER_HOST, &ticket, err); },
             invalid, 0, "pool is null"},
            {"suspend to no tier", suspend(9, &ticket), invalid, 2, "tier is 9"},
            {"suspend to the device", suspend(TA_TIER_DEVICE, &ticket), invalid, 2, "tier is the device"},
            {"suspend without out", suspend(TA_TIER_HOST, nullptr), invalid, 3, "out is null"},
            {"suspend without tiers", suspend(TA_TIER_HOST, &ticket), TA_E_UNSUPPORTED, 2, "no host tier"},
        });
    };
    refused();
    expect_success(reserve(200, 0));
    EXPECT_GT(stats(pool).bytes_promised, 0u);
    refused();  // the promise holds
    expect_success(reserve(0, -1));
    EXPECT_EQ(stats(pool).bytes_promised, 0u);
    EXPECT_EQ(ticket, 77u);
    EXPECT_EQ(out.bytes_new, 77u);
    expect_success(fit({0, long_seq, 0}, {1, INT32_MAX, 0}));
    EXPECT_EQ(out.first_lacking, 1);
    expect_success([&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, &long_seq, nullptr, &out, err); });
    EXPECT_EQ(out.now + out.after_eviction, 2);
}

TEST_F(BadArguments, InspectionRefusesRangesBeyondTheSequence) {
    auto block = sized<ta_x_block_info>();
    std::vector<float> k(size_t(130 * kRow), -1.0f), v = k;
    std::vector<uint8_t> bytes(1 << 16, 0x5a);
    const auto values = [&](ta_seq seq, uint32_t layer, int64_t first, int64_t n) {
        return [&, seq, layer, first, n](ta_error* err) {
            return ta_x_seq_dequantize(pool.get(), seq, layer, first, n, k.data(), v.data(), err);
        };
    };
    const auto describe = [&](uint64_t index, uint64_t size) {
        return [&, index, size](ta_error* err) {
            return ta_x_seq_block(pool.get(), long_seq, index, &block, bytes.data(), size, err);
        };
    };
    auto* odd = reinterpret_cast<float*>(reinterpret_cast<char*>(k.data()) + 1);
    expect_failures({
        {"block of null", [&](ta_error* err) { return ta_x_seq_block(nullptr, long_seq, 0, &block, nullptr, 0, err); },
         TA_E_INVALID, 0, "pool is null"},
        {"no info", [&](ta_error* err) { return ta_x_seq_block(pool.get(), long_seq, 0, nullptr, nullptr, 0, err); },
         TA_E_INVALID, 3, "info is null"},
        {"block beyond", describe(3, bytes.size()), TA_E_INVALID, 2, "the sequence has 3"},
        {"block far beyond", describe(UINT64_MAX, bytes.size()), TA_E_INVALID, 2, "block is 18446744073709551615"},
        {"no room", describe(0, 0), TA_E_INVALID, 5, "buffer_bytes is 0"},
        {"one byte less", describe(1, stats(pool).channel_block_bytes - 1), TA_E_INVALID, 5, "the block has"},
        {"values of null",
         [&](ta_error* err) { return ta_x_seq_dequantize(nullptr, long_seq, 0, 0, 1, k.data(), v.data(), err); }, TA_E_INVALID,
         0, "pool is null"},
        {"layer", values(long_seq, 2, 0, 1), TA_E_INVALID, 2, "layer is 2"},
        {"wrapped layer", values(long_seq, UINT32_MAX, 0, 1), TA_E_INVALID, 2, "layer is 4294967295"},
        {"negative first", values(long_seq, 0, -1, 1), TA_E_INVALID, 3, "-1 + 1"},
        {"negative count", values(long_seq, 0, 0, -1), TA_E_INVALID, 3, "0 + -1"},
        {"one too many", values(long_seq, 0, 0, 131), TA_E_INVALID, 3, "a sequence of 130"},
        {"begins beyond", values(long_seq, 0, 131, 0), TA_E_INVALID, 3, "131 + 0"},
        {"sum wraps", values(long_seq, 0, 1, INT64_MAX), TA_E_INVALID, 3, "a sequence of 130"},
        {"misaligned k", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 0, 1, odd, nullptr, err); },
         TA_E_ALIGNMENT, 5, "k is not aligned"},
        {"misaligned v", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 0, 1, nullptr, odd, err); },
         TA_E_ALIGNMENT, 6, "v is not aligned"},
    });
    EXPECT_EQ(k, std::vector<float>(k.size(), -1.0f));
    EXPECT_EQ(v, std::vector<float>(k.size(), -1.0f));
    EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), 0x5a));
    EXPECT_EQ(block.bytes, 0u);
    expect_success([&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 130, 0, nullptr, nullptr, err); });
    expect_success(values(long_seq, 1, 0, 130));
    expect_success(describe(1, stats(pool).channel_block_bytes));
    EXPECT_EQ(block.bits, 4u);
}

}  // namespace
}  // namespace ta::testing
