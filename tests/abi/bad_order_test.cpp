// The wrong order of calls, ids that name no sequence, closed pools and documented limits.
#include <chrono>
#include <thread>

#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

class BadOrder : public WrongCalls {
  protected:
    BadOrder() {
        Random random(13);
        k = Tensor(random.normals(kRow), 1, kHeads, kDim);
        q = Tensor(random.normals(kQHeads * kDim), 1, kQHeads, kDim);
    }
    std::function<ta_status(ta_error*)> do_append(uint32_t layer) {
        return [this, layer](ta_error* err) { return ta_append(plan.get(), layer, k.view(), k.view(), err); };
    }
    std::function<ta_status(ta_error*)> do_attend(uint32_t layer) {
        return
            [this, layer](ta_error* err) { return ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, err); };
    }
    std::function<ta_status(ta_error*)> do_end() {
        return [this](ta_error* err) { return ta_plan_end(plan.get(), nullptr, err); };
    }
    std::function<ta_status(ta_error*)> do_abort() {
        return [this](ta_error* err) { return ta_plan_abort(plan.get(), err); };
    }
    std::function<ta_status(ta_error*)> do_begin(ta_seq seq) {
        return [this, seq](ta_error* err) {
            const int32_t one = 1;
            return ta_plan_begin(plan.get(), 1, &seq, &one, nullptr, nullptr, err);
        };
    }

    Tensor k{1, 1, 1}, q{1, 1, 1}, out{1, kQHeads, kDim};
};

TEST_F(BadOrder, APlanThatIsNotOpenRefusesItsCalls) {
    const auto all = [&] {
        expect_failures({
            {"append", do_append(0), TA_E_STATE, -1, "ta_plan_begin belongs first"},
            {"attend", do_attend(0), TA_E_STATE, -1, "ta_plan_begin belongs first"},
            {"end", do_end(), TA_E_STATE, -1, "ta_plan_begin belongs first"},
            {"abort", do_abort(), TA_E_STATE, -1, "ta_plan_begin belongs first"},
        });
    };
    all();
    step(plan, {short_seq}, {1});
    all();  // after an end
    begin(plan, {short_seq}, {1});
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
    all();  // after an abort
    EXPECT_TRUE(out.all_poison());
}

TEST_F(BadOrder, LayersAreAppendedOnceAndAttendedToRightAfter) {
    auto in_order = sized<ta_step_options>();
    in_order.layers_in_order = TA_ON;
    const int32_t one = 1;
    ASSERT_EQ(ta_plan_begin(plan.get(), 1, &short_seq, &one, nullptr, &in_order, nullptr), TA_OK);
    expect_failures(
        {
            {"begin again", do_begin(long_seq), TA_E_STATE, -1, "end or abort it first"},
            {"attend before append", do_attend(0), TA_E_STATE, -1, "ta_append belongs first"},
            {"end without appends", do_end(), TA_E_STATE, -1, "layer 0 lacks its ta_append"},
        },
        true);
    append(plan, 1, k, k);  // any order of layers
    expect_failures(
        {
            {"second append", do_append(1), TA_E_STATE, -1, "layer 1 was appended already"},
            {"attend to the other", do_attend(0), TA_E_STATE, -1, "ta_append belongs first"},
            {"end too early", do_end(), TA_E_STATE, -1, "layer 0 lacks its ta_append"},
        },
        true);
    EXPECT_EQ(do_attend(1)(nullptr), TA_OK);
    EXPECT_EQ(do_attend(1)(nullptr), TA_OK) << "attending twice is allowed";
    append(plan, 0, k, k);
    out = Tensor(1, kQHeads, kDim);
    expect_failures({{"attend to an earlier layer", do_attend(1), TA_E_STATE, -1, "layer 0 was appended after layer 1"}}, true);
    EXPECT_TRUE(out.all_poison());
    ta_error err;
    EXPECT_EQ(do_attend(1)(&err), TA_E_STATE);
    EXPECT_EQ(err.layer, 1);
    EXPECT_EQ(do_attend(0)(nullptr), TA_OK);
    EXPECT_EQ(length(pool, short_seq), 10);
    end(plan);
    EXPECT_EQ(length(pool, short_seq), 11);
    // In the other order, and in any.
    for (const ta_step_options* how :
         {static_cast<const ta_step_options*>(&in_order), static_cast<const ta_step_options*>(nullptr)}) {
        ASSERT_EQ(ta_plan_begin(plan.get(), 1, &short_seq, &one, nullptr, how, nullptr), TA_OK);
        append(plan, 0, k, k);
        append(plan, 1, k, k);
        if (how) {
            expect_failures({{"attend to layer 0", do_attend(0), TA_E_STATE, -1, "layer 1 was appended after layer 0"}}, true);
        } else {
            EXPECT_EQ(do_attend(0)(nullptr), TA_OK);
        }
        EXPECT_EQ(do_attend(1)(nullptr), TA_OK);
        end(plan);
    }
}

TEST_F(BadOrder, KeepBelongsToDrafts) {
    const int32_t two = 2, keep[] = {0}, above[] = {3}, below[] = {-1}, parents[] = {-1, -1};
    const auto do_end_with = [&](const int32_t* kept) {
        return [this, kept](ta_error* err) { return ta_plan_end(plan.get(), kept, err); };
    };
    Tensor two_k(Random(1).normals(2 * kRow), 2, kHeads, kDim);
    for (const bool drafts : {false, true}) {
        auto how = sized<ta_step_options>();
        how.tree_parent = drafts ? parents : nullptr;
        ASSERT_EQ(ta_plan_begin(plan.get(), 1, &short_seq, &two, nullptr, &how, nullptr), TA_OK);
        expect_failures({{"end without appends", do_end_with(keep), TA_E_STATE, -1, "layer 0 lacks its ta_append"}}, true);
        append(plan, 0, two_k, two_k);
        append(plan, 1, two_k, two_k);
        if (drafts) {
            expect_failures(
                {
                    {"too many", do_end_with(above), TA_E_INVALID, 1, "keep[0] is 3; the sequence has 2 new tokens"},
                    {"too few", do_end_with(below), TA_E_INVALID, 1, "keep[0] is -1"},
                    {"all of a tree", do_end_with(nullptr), TA_E_INVALID, 1, "are no chain"},
                    {"misaligned", do_end_with(reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(keep) + 1)),
                     TA_E_ALIGNMENT, 1, "keep is not aligned"},
                },
                true);
            EXPECT_EQ(do_end_with(keep)(nullptr), TA_OK);
            EXPECT_EQ(length(pool, short_seq), 10);
        } else {
            expect_failures({{"no drafts", do_end_with(keep), TA_E_INVALID, 1, "without ta_step_options.drafts"}}, true);
            EXPECT_EQ(do_end()(nullptr), TA_OK);
            EXPECT_TRUE(ta_seq_truncate(pool.get(), short_seq, 10, nullptr) == TA_OK);
        }
    }
}

TEST_F(BadOrder, AStepWithoutNewTokensNeedsNoAppends) {
    begin(plan, {short_seq, long_seq}, {0, 0}, {1, 0});
    EXPECT_EQ(do_attend(1)(nullptr), TA_OK);
    EXPECT_EQ(do_attend(0)(nullptr), TA_OK);
    Tensor none(0, kHeads, kDim);
    append(plan, 0, none, none);
    expect_failures(
        {{"second empty append", [&](ta_error* err) { return ta_append(plan.get(), 0, none.view(), none.view(), err); },
          TA_E_STATE, -1, "layer 0 was appended already"}},
        true);
    EXPECT_EQ(do_attend(1)(nullptr), TA_OK);
    end(plan);
    expect_unchanged(before);
}

TEST_F(BadOrder, SequencesInAnOpenPlanAreBusy) {
    const Plan other = make_plan(pool);
    begin(plan, {short_seq}, {1});
    ta_seq fork = 5;
    auto block = sized<ta_x_block_info>();
    float value[kRow];
    const ta_seq both[] = {long_seq, short_seq};
    expect_failures(
        {
            {"begin of another plan",
             [&](ta_error* err) { return ta_plan_begin(other.get(), 2, both, nullptr, nullptr, nullptr, err); }, TA_E_BUSY, -1,
             "is in an open plan"},
            {"fork", [&](ta_error* err) { return ta_seq_fork(pool.get(), short_seq, &fork, err); }, TA_E_BUSY, -1,
             "is in an open plan"},
            {"truncate", [&](ta_error* err) { return ta_seq_truncate(pool.get(), short_seq, 0, err); }, TA_E_BUSY, -1,
             "is in an open plan"},
            {"verify", [&](ta_error* err) { return ta_seq_verify(pool.get(), short_seq, err); }, TA_E_BUSY, -1,
             "is in an open plan"},
            {"reserve", [&](ta_error* err) { return ta_seq_reserve(pool.get(), short_seq, 1, 0, err); }, TA_E_BUSY, -1,
             "is in an open plan"},
            {"block", [&](ta_error* err) { return ta_x_seq_block(pool.get(), short_seq, 0, &block, nullptr, 0, err); },
             TA_E_BUSY, -1, "is in an open plan"},
            {"values", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), short_seq, 0, 0, 1, value, value, err); },
             TA_E_BUSY, -1, "is in an open plan"},
        },
        true);
    EXPECT_EQ(fork, 5u);
    EXPECT_EQ(length(pool, short_seq), 10) << "the length may be asked for";
    auto room = sized<ta_fit>();
    EXPECT_EQ(ta_kv_pool_fit(pool.get(), 2, both, nullptr, &room, nullptr), TA_OK) << "and whether it would find room";
    // The refused begin did not keep the other sequence.
    EXPECT_EQ(ta_seq_truncate(pool.get(), long_seq, 130, nullptr), TA_OK);
    run_open_plan(plan, {1});
    end(plan);
    EXPECT_EQ(ta_plan_begin(other.get(), 2, both, nullptr, nullptr, nullptr, nullptr), TA_OK);
    EXPECT_EQ(ta_plan_end(other.get(), nullptr, nullptr), TA_OK);
}

TEST_F(BadOrder, AbortUndoesTheStep) {
    const std::vector<float> expected = [&] {
        const KvPool twin = make_pool(context, pool_options(kLayers, kHeads, kDim));
        const ta_seq a = make_sequence(twin), b = make_sequence(twin);
        const Plan p = make_plan(twin);
        step(p, {a, b}, {130, 10});
        return step(p, {a, b}, {70, 2}, 99);
    }();
    for (int appended = 0; appended <= 2; ++appended) {
        begin(plan, {long_seq, short_seq}, {70, 60});
        Random random(17);
        for (int layer = 0; layer < appended; ++layer) {
            Tensor kt(random.normals(130 * kRow), 130, kHeads, kDim), vt(random.normals(130 * kRow), 130, kHeads, kDim);
            append(plan, uint32_t(layer), kt, vt);
        }
        ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        // The blocks that the step had reserved are kept for the next one.
        before.stats.bytes_cached = stats(pool).bytes_cached;
        before.stats.bytes_peak = stats(pool).bytes_peak;
        expect_unchanged(before);
        EXPECT_EQ(ta_seq_verify(pool.get(), long_seq, nullptr), TA_OK);
    }
    EXPECT_EQ(step(plan, {long_seq, short_seq}, {70, 2}, 99), expected) << "an aborted step has left traces";
}

TEST_F(BadOrder, AbortUndoesTheFirstScaleOfAUniversalPage) {
    auto numerics = sized<ta_numerics>();
    numerics.profile = TA_PROFILE_PAPER;
    const auto stored_after = [&](bool with_aborted_step) {
        const KvPool paper = make_pool(context, pool_options(kLayers, kHeads, kDim, 4, &numerics));
        const ta_seq seq = make_sequence(paper);
        const Plan p = make_plan(paper);
        const auto add = [&](float x) {
            begin(p, {seq}, {1});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                Tensor t(std::vector<float>(kRow, x), 1, kHeads, kDim);
                append(p, layer, t, t);
            }
        };
        add(0.0f);
        end(p);
        if (with_aborted_step) {
            add(1e-3f);
            EXPECT_EQ(ta_plan_abort(p.get(), nullptr), TA_OK);
        }
        add(5.0f);
        end(p);
        EXPECT_EQ(stats(paper).clamped_values, 0u) << "with_aborted_step = " << with_aborted_step;
        return dequantize(paper, seq, 0, 0, 2, kRow);
    };
    EXPECT_EQ(stored_after(true), stored_after(false));
}

// From a callback here; threads_test.cpp has threads.
TEST_F(BadOrder, APlanTakesOneCallAtATime) {
    struct Hook {
        std::function<void()> during;
        bool called = false;
    } hook;
    auto mine = sized<ta_allocator>();
    mine.allocate = [](size_t bytes, size_t alignment, void* user) {
        auto* h = static_cast<Hook*>(user);
        h->called = true;
        if (h->during) h->during();
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    mine.deallocate = [](void* p, size_t, size_t, void*) { std::free(p); };
    mine.user = &hook;
    auto options = sized<ta_context_options>();
    options.threads = 1;
    options.allocator = &mine;
    const Context c = make_context(options);
    const KvPool p = make_pool(c, pool_options(kLayers, kHeads, kDim));
    plan = make_plan(p);
    const ta_seq seq = make_sequence(p);
    hook.during = [&] {
        const std::function<ta_status(ta_error*)> calls[] = {
            [&](ta_error* err) { return ta_plan_set_stream(plan.get(), nullptr, err); },
            do_begin(seq),
            do_append(0),
            do_attend(0),
            do_end(),
            do_abort()};
        for (size_t i = 0; i < std::size(calls); ++i) {
            ta_error err{};
            EXPECT_EQ(calls[i](&err), TA_E_BUSY) << "call " << i;
            EXPECT_EQ(err.argument, 0) << "call " << i;
            EXPECT_STREQ(err.message, "another call on the plan runs; it takes one at a time");
        }
    };
    hook.called = false;
    begin(plan, {seq}, {10});
    ASSERT_TRUE(hook.called);
    hook.during = nullptr;
    EXPECT_FALSE(run_open_plan(plan, {10}).empty());
    end(plan);
    plan.reset();
}

TEST_F(BadOrder, StaleIdsAreRefusedByEveryCall) {
    const ta_seq released = make_sequence(pool);
    ASSERT_EQ(ta_seq_release(pool.get(), released, nullptr), TA_OK);
    const ta_seq reused = make_sequence(pool);
    ASSERT_EQ(uint32_t(reused), uint32_t(released)) << "the slot was expected to be reused";
    ASSERT_NE(reused, released);
    const KvPool other_pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq foreign = make_sequence(other_pool);
    std::vector<ta_seq> stale = {0,
                                 released,
                                 foreign,
                                 UINT64_MAX,
                                 long_seq + (uint64_t{1} << 32),
                                 long_seq - (uint64_t{1} << 32),
                                 long_seq + 7,
                                 uint64_t{1} << 32,
                                 uint32_t(long_seq)};
    Random random(23);
    for (int i = 0; i < 200; ++i) stale.push_back(random.bits());
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    ta_namespace space = 0;
    ASSERT_EQ(ta_namespace_create(pool.get(), &options, &space, nullptr), TA_OK);
    before = snapshot();
    for (const ta_seq seq : stale) {
        SCOPED_TRACE(::testing::Message() << std::hex << seq);
        ta_seq fork = 5;
        int64_t n = -7;
        auto block = sized<ta_x_block_info>();
        float value[kRow];
        auto residency = sized<ta_residency>();
        ta_ticket ticket = 0;
        const uint8_t key[32] = {1};
        const ta_seq list[] = {long_seq, seq};
        ta_block_info described{};
        const void* located = nullptr;
        const char* text = "no living sequence";
        const Wrong calls[] = {
            {"fork", [&](ta_error* err) { return ta_seq_fork(pool.get(), seq, &fork, err); }, TA_E_STALE, 1, text},
            {"truncate", [&](ta_error* err) { return ta_seq_truncate(pool.get(), seq, 0, err); }, TA_E_STALE, 1, text},
            {"release", [&](ta_error* err) { return ta_seq_release(pool.get(), seq, err); }, TA_E_STALE, 1, text},
            {"length", [&](ta_error* err) { return ta_seq_length(pool.get(), seq, &n, err); }, TA_E_STALE, 1, text},
            {"verify", [&](ta_error* err) { return ta_seq_verify(pool.get(), seq, err); }, TA_E_STALE, 1, text},
            {"block", [&](ta_error* err) { return ta_x_seq_block(pool.get(), seq, 0, &block, nullptr, 0, err); }, TA_E_STALE, 1,
             text},
            {"values", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), seq, 0, 0, 0, value, value, err); },
             TA_E_STALE, 1, text},
            {"priority", [&](ta_error* err) { return ta_seq_set_priority(pool.get(), seq, 1, err); }, TA_E_STALE, 1, text},
            {"residency", [&](ta_error* err) { return ta_seq_residency(pool.get(), seq, &residency, err); }, TA_E_STALE, 1,
             text},
            {"reserve", [&](ta_error* err) { return ta_seq_reserve(pool.get(), seq, 1, 0, err); }, TA_E_STALE, 1, text},
            {"move", [&](ta_error* err) { return ta_seq_move(pool.get(), seq, 0, 1, TA_TIER_DEVICE, &ticket, err); },
             TA_E_STALE, 1, text},
            {"prefetch", [&](ta_error* err) { return ta_seq_prefetch(pool.get(), seq, 0, 1, &ticket, err); }, TA_E_STALE, 1,
             text},
            {"pin", [&](ta_error* err) { return ta_seq_pin(pool.get(), seq, 0, 1, err); }, TA_E_STALE, 1, text},
            {"unpin", [&](ta_error* err) { return ta_seq_unpin(pool.get(), seq, 0, 1, err); }, TA_E_STALE, 1, text},
            {"forget", [&](ta_error* err) { return ta_seq_forget(pool.get(), seq, 0, 1, &n, err); }, TA_E_STALE, 1, text},
            {"shift", [&](ta_error* err) { return ta_seq_shift(pool.get(), seq, 0, 64, err); }, TA_E_STALE, 1, text},
            {"retain", [&](ta_error* err) { return ta_seq_retain(pool.get(), seq, 0, 1, nullptr, err); }, TA_E_STALE, 1, text},
            {"describe", [&](ta_error* err) { return ta_seq_describe_blocks(pool.get(), seq, 0, 1, &described, err); },
             TA_E_STALE, 1, text},
            {"locate", [&](ta_error* err) { return ta_seq_locate_blocks(pool.get(), seq, 0, 1, &located, err); }, TA_E_STALE, 1,
             text},
            {"publish", [&](ta_error* err) { return ta_seq_publish(pool.get(), seq, space, key, 1, err); }, TA_E_STALE, 1,
             text},
            {"save", [&](ta_error* err) { return ta_seq_save(pool.get(), seq, "nowhere", nullptr, err); }, TA_E_STALE, 1, text},
            {"begin", [&](ta_error* err) { return ta_plan_begin(plan.get(), 2, list, nullptr, nullptr, nullptr, err); },
             TA_E_STALE, 2, text},
        };
        for (const Wrong& wrong : calls) expect_failure(wrong);
        auto room = sized<ta_fit>();
        if (seq != 0) {  // a new one
            expect_failure({"fit", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 2, list, nullptr, &room, err); },
                            TA_E_STALE, 2, text});
        }
        EXPECT_EQ(fork, 5u);
        EXPECT_EQ(n, -7);
    }
    expect_unchanged(before);
    EXPECT_EQ(step(plan, {reused}, {3}).size(), size_t(2 * 3 * kQHeads * kDim));
}

TEST_F(BadOrder, SuspendRefusesWhatIsNotIdle) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 1 << 20;
    auto options = pool_options(kLayers, kHeads, kDim);
    options.tiers = &tiers;
    const KvPool tiered = make_pool(context, options);
    const Plan p = make_plan(tiered);
    const ta_seq seq = make_sequence(tiered), stale = make_sequence(tiered);
    ASSERT_EQ(ta_seq_release(tiered.get(), stale, nullptr), TA_OK);
    step(p, {seq}, {100});
    ASSERT_EQ(ta_seq_reserve(tiered.get(), seq, 50, 0, nullptr), TA_OK);
    const ta_kv_pool_stats was = stats(tiered);
    ta_ticket ticket = 77;
    const auto suspend = [&](ta_seq of) {
        return [&, of](ta_error* err) { return ta_seq_suspend(tiered.get(), of, TA_TIER_HOST, &ticket, err); };
    };
    expect_failure({"a stale one", suspend(stale), TA_E_STALE, 1, "no living sequence"});
    begin(p, {seq}, {0});
    expect_failure({"a busy one", suspend(seq), TA_E_BUSY, -1, "is in an open plan"});
    ASSERT_EQ(ta_plan_abort(p.get(), nullptr), TA_OK);
    const ta_kv_pool_stats now = stats(tiered);
    EXPECT_EQ(std::memcmp(&was, &now, sizeof was), 0) << "a call that failed ended the promise";
    ASSERT_EQ(ta_kv_pool_close(tiered.get(), nullptr), TA_OK);
    expect_failure({"of a closed pool", suspend(seq), TA_E_CLOSED, -1, "closed"});
    EXPECT_EQ(ticket, 77u);
}

// As a begin that waits does.
TEST_F(BadOrder, ACloseEndsAReserveThatWaits) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 1 << 20;
    auto options = pool_options(kLayers, kHeads, kDim);
    options.tiers = &tiers;
    options.budget_bytes = stats(pool).token_block_bytes * 7;
    const KvPool full = make_pool(context, options);
    const Plan p = make_plan(full);
    const ta_seq in_plan = make_sequence(full), waits = make_sequence(full);
    step(p, {in_plan}, {30});
    ASSERT_EQ(ta_seq_reserve(full.get(), in_plan, 100, -1, nullptr), TA_OK);
    begin(p, {in_plan}, {1});
    std::thread closes([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        EXPECT_EQ(ta_kv_pool_close(full.get(), nullptr), TA_OK);
    });
    const auto start = std::chrono::steady_clock::now();
    ta_error err;
    const ta_status status = ta_seq_reserve(full.get(), waits, 200, 60'000, &err);
    EXPECT_EQ(status, TA_E_CLOSED) << ta_status_name(status) << ": " << err.message;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
    closes.join();
    EXPECT_EQ(ta_seq_reserve(full.get(), waits, 1, -1, nullptr), TA_E_CLOSED);
}

TEST_F(BadOrder, AClosedPoolRefusesEverythingButDestroy) {
    const Plan other = make_plan(pool);
    expect_success([](ta_error* err) {  // close cannot succeed twice, so on its own pool each time
        const Context c = make_context(1);
        const KvPool p = make_pool(c, pool_options(1, 1, 64));
        make_sequence(p);
        return ta_kv_pool_close(p.get(), err);
    });
    ASSERT_EQ(ta_kv_pool_close(pool.get(), nullptr), TA_OK);
    ta_seq out_seq = 5;
    int64_t n = 5;
    auto block = sized<ta_x_block_info>();
    auto s = sized<ta_kv_pool_stats>();
    auto moves = sized<ta_move_stats>();
    auto description = sized<ta_kv_pool_description>();
    auto room = sized<ta_fit>();
    auto range = sized<ta_memory_range>();
    ta_ticket ticket = 0;
    auto* out_plan = untouched<ta_plan>();
    float value[kRow];
    const Wrong calls[] = {
        {"close", [&](ta_error* err) { return ta_kv_pool_close(pool.get(), err); }, TA_E_CLOSED, -1, "closed"},
        {"stats", [&](ta_error* err) { return ta_kv_pool_get_stats(pool.get(), &s, err); }, TA_E_CLOSED, -1, "closed"},
        {"move stats", [&](ta_error* err) { return ta_kv_pool_get_move_stats(pool.get(), &moves, err); }, TA_E_CLOSED, -1,
         "closed"},
        {"describe", [&](ta_error* err) { return ta_kv_pool_describe(pool.get(), &description, err); }, TA_E_CLOSED, -1,
         "closed"},
        {"create", [&](ta_error* err) { return ta_seq_create(pool.get(), &out_seq, err); }, TA_E_CLOSED, -1, "closed"},
        {"fork", [&](ta_error* err) { return ta_seq_fork(pool.get(), long_seq, &out_seq, err); }, TA_E_CLOSED, -1, "closed"},
        {"truncate", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, 0, err); }, TA_E_CLOSED, -1, "closed"},
        {"release", [&](ta_error* err) { return ta_seq_release(pool.get(), long_seq, err); }, TA_E_CLOSED, -1, "closed"},
        {"reserve", [&](ta_error* err) { return ta_seq_reserve(pool.get(), long_seq, 1, 0, err); }, TA_E_CLOSED, -1, "closed"},
        {"fit", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, &long_seq, nullptr, &room, err); }, TA_E_CLOSED, -1,
         "closed"},
        {"length", [&](ta_error* err) { return ta_seq_length(pool.get(), long_seq, &n, err); }, TA_E_CLOSED, -1, "closed"},
        {"verify", [&](ta_error* err) { return ta_seq_verify(pool.get(), long_seq, err); }, TA_E_CLOSED, -1, "closed"},
        {"plan", [&](ta_error* err) { return ta_plan_create(pool.get(), nullptr, &out_plan, err); }, TA_E_CLOSED, -1, "closed"},
        {"begin", do_begin(long_seq), TA_E_CLOSED, -1, "closed"},
        {"append", do_append(0), TA_E_CLOSED, -1, "closed"},
        {"attend", do_attend(0), TA_E_CLOSED, -1, "closed"},
        {"end", do_end(), TA_E_CLOSED, -1, "closed"},
        {"abort", do_abort(), TA_E_CLOSED, -1, "closed"},
        {"block", [&](ta_error* err) { return ta_x_seq_block(pool.get(), long_seq, 0, &block, nullptr, 0, err); }, TA_E_CLOSED,
         -1, "closed"},
        {"attention", [&](ta_error* err) { return ta_x_seq_attention(pool.get(), long_seq, 0, 1, value, err); }, TA_E_CLOSED,
         -1, "closed"},
        {"values", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 0, 1, value, value, err); },
         TA_E_CLOSED, -1, "closed"},
        // Of a tier that the pool never had.
        {"memory", [&](ta_error* err) { return ta_kv_pool_get_memory(pool.get(), TA_TIER_HOST, &range, err); }, TA_E_CLOSED, -1,
         "closed"},
        {"move", [&](ta_error* err) { return ta_seq_move(pool.get(), long_seq, 0, 1, TA_TIER_DISK, &ticket, err); },
         TA_E_CLOSED, -1, "closed"},
        {"suspend", [&](ta_error* err) { return ta_seq_suspend(pool.get(), long_seq, TA_TIER_DISK, &ticket, err); },
         TA_E_CLOSED, -1, "closed"},
    };
    for (const Wrong& wrong : calls) expect_failure(wrong);
    EXPECT_EQ(out_seq, 5u);
    EXPECT_EQ(n, 5);
    EXPECT_EQ(out_plan, untouched<ta_plan>());
    EXPECT_TRUE(out.all_poison());
    expect_success([&](ta_error* err) { return ta_context_health(context.get(), err); });
}

// ---------------------------------------------------------------------------------------------------------------- limits

TEST_F(BadOrder, MaxSequencesIsALimitOnLivingOnes) {
    std::vector<ta_seq> all;
    for (int i = 2; i < 8; ++i) all.push_back(make_sequence(pool));
    before = snapshot();
    ta_seq seq = 5;
    expect_failures({
        {"create", [&](ta_error* err) { return ta_seq_create(pool.get(), &seq, err); }, TA_E_LIMIT, -1,
         "maximum of 8 sequences"},
        {"fork", [&](ta_error* err) { return ta_seq_fork(pool.get(), long_seq, &seq, err); }, TA_E_LIMIT, -1,
         "maximum of 8 sequences"},
    });
    EXPECT_EQ(seq, 5u);
    for (int i = 0; i < 3; ++i) {
        ASSERT_EQ(ta_seq_release(pool.get(), all.back(), nullptr), TA_OK);
        all.back() = fork_sequence(pool, long_seq);
    }
    EXPECT_EQ(stats(pool).sequences, 8u);
    EXPECT_GT(stats(pool).shared_blocks, 0u);
}

TEST_F(BadOrder, AFullTierRefusesBeginAndRecovers) {
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = stats(pool).token_block_bytes * 4;
    const KvPool small = make_pool(context, options);
    const Plan p = make_plan(small);
    const ta_seq a = make_sequence(small), b = make_sequence(small);
    step(p, {a}, {100});
    const auto was = stats(small);
    const Stored stored = dequantize(small, a, 1, 0, 100, kRow);
    const ta_seq both[] = {b, a};
    for (int32_t n : {200, 1000, 1 << 20, INT32_MAX - 1}) {
        const int32_t n_new[] = {1, n};
        expect_failure({"begin", [&](ta_error* err) { return ta_plan_begin(p.get(), 2, both, n_new, nullptr, nullptr, err); },
                        TA_E_TIER_FULL, -1, "needs"});
        ta_error err;
        EXPECT_EQ(ta_plan_begin(p.get(), 2, both, n_new, nullptr, nullptr, &err), TA_E_TIER_FULL);
        EXPECT_EQ(err.tier, TA_TIER_DEVICE);
        EXPECT_EQ(err.sequence, 1);
        const uint64_t blocks = uint64_t(n) / 64;  // of the second at least; the budget holds the first of the other, too
        EXPECT_GE(err.bytes + int64_t(was.bytes_budget), int64_t(blocks * was.channel_block_bytes));
        EXPECT_LE(err.bytes, int64_t((blocks + 3) * was.token_block_bytes));
        const auto now = stats(small);
        EXPECT_EQ(now.bytes_used, was.bytes_used);
        EXPECT_EQ(now.token_blocks, was.token_blocks);
        EXPECT_EQ(now.channel_blocks, was.channel_blocks);
        EXPECT_EQ(now.tokens, 100u);
        EXPECT_LE(now.bytes_used + now.bytes_cached, now.bytes_budget);
        EXPECT_LE(now.bytes_peak, now.bytes_budget);
    }
    EXPECT_EQ(dequantize(small, a, 1, 0, 100, kRow), stored);
    step(p, {b}, {64});
    const int32_t many = 300;
    ASSERT_EQ(ta_plan_begin(p.get(), 1, &b, &many, nullptr, nullptr, nullptr), TA_E_TIER_FULL);
    ASSERT_EQ(ta_seq_release(small.get(), a, nullptr), TA_OK);
    step(p, {b}, {60});
    EXPECT_EQ(stats(small).tokens, 124u);
    // Use and release again and again: neither budget nor memory leaks away.
    for (int i = 0; i < 50; ++i) {
        const ta_seq c = make_sequence(small);
        step(p, {c}, {70 + i % 40});
        ASSERT_EQ(ta_seq_release(small.get(), c, nullptr), TA_OK);
    }
    ASSERT_EQ(ta_seq_release(small.get(), b, nullptr), TA_OK);
    EXPECT_EQ(stats(small).bytes_used, 0u);
    EXPECT_EQ(stats(small).sequences, 0u);
}

TEST_F(BadOrder, TheBudgetCanBeUsedToTheLastByte) {
    auto options = pool_options(kLayers, kHeads, kDim);
    const auto shape = stats(pool);
    options.budget_bytes = shape.token_block_bytes + 2 * shape.channel_block_bytes;  // the sink and two closed blocks
    const KvPool tight = make_pool(context, options);
    const Plan p = make_plan(tight);
    const ta_seq seq = make_sequence(tight);
    step(p, {seq}, {192});
    EXPECT_EQ(stats(tight).bytes_used, options.budget_bytes);
    const int32_t one = 1;
    EXPECT_EQ(ta_plan_begin(p.get(), 1, &seq, &one, nullptr, nullptr, nullptr), TA_E_TIER_FULL);
    EXPECT_EQ(length(tight, seq), 192);
    EXPECT_EQ(ta_seq_verify(tight.get(), seq, nullptr), TA_OK);
}

}  // namespace
}  // namespace ta::testing
