// Handles: destroyed in any order, used after their parents' are gone, carried into a child process; the allocator and the log.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "support/counting_allocator.h"
#include "support/groups.h"
#include "support/handles.h"

namespace ta::testing {
namespace {

constexpr uint32_t kHeads = 2, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;

// A context, a pool, a plan and a calibrator with some work done on them.
struct Family {
    explicit Family(const ta_allocator* hooks = nullptr, int threads = 2) {
        auto options = sized<ta_context_options>();
        options.threads = threads;
        options.allocator = hooks;
        context = make_context(options);
        pool = make_pool(context, pool_options(1, kHeads, kDim));
        plan = make_plan(pool);
        seq = make_sequence(pool);
        ta_calibrator* c = nullptr;
        ta_error err;
        require(ta_calibrator_create(context.get(), 1, kHeads, kDim, &c, &err), err);
        calibrator.reset(c);
        Random random(1);
        k = Tensor(random.normals(100 * kRow), 100, kHeads, kDim);
        q = Tensor(random.normals(2 * kRow), 2, kHeads, kDim);
        begin(plan, {seq}, {100}, {2});
        append(plan, 0, k, k);
    }

    // The plan goes on, whatever handles are gone.
    std::vector<float> use_plan() {
        Tensor out(2, kHeads, kDim);
        attend(plan, 0, q, out);
        end(plan);
        begin(plan, {seq}, {1});
        Tensor one(std::vector<float>(kRow, 0.5f), 1, kHeads, kDim);
        append(plan, 0, one, one);
        end(plan);
        begin(plan, {seq}, {0}, {2});
        attend(plan, 0, q, out);
        return out.values();
    }
    void use_calibrator() {
        ta_error err;
        require(ta_calibrator_observe(calibrator.get(), 0, k.view(), k.view(), &err), err);
        uint8_t k_bits[kHeads], v_bits[kHeads];
        require(ta_calibrator_finish(calibrator.get(), 1, k_bits, v_bits, nullptr, nullptr, &err), err);
        EXPECT_EQ(k_bits[0] + k_bits[1], 6);
    }
    void destroy(int which) {
        if (which == 0) context.reset();
        if (which == 1) pool.reset();
        if (which == 2) plan.reset();
        if (which == 3) calibrator.reset();
    }

    Context context;
    KvPool pool;
    Plan plan;
    Calibrator calibrator;
    ta_seq seq = 0;
    Tensor k{1, 1, 1}, q{1, 1, 1};
};

TEST(Lifetime, DestroyOfNullDoesNothing) {
    ta_context_destroy(nullptr);
    ta_kv_pool_destroy(nullptr);
    ta_plan_destroy(nullptr);
    ta_calibrator_destroy(nullptr);
    ta_group_destroy(nullptr);
}

TEST(Lifetime, HandlesGoInAnyOrder) {
    std::vector<float> expected;
    {
        Family f;
        expected = f.use_plan();
    }
    std::array<int, 4> order = {0, 1, 2, 3};
    do {
        SCOPED_TRACE(::testing::Message() << order[0] << order[1] << order[2] << order[3]);
        CountingAllocator allocator;
        const ta_allocator hooks = allocator.hooks();
        Family f(&hooks, 1 + order[0] % 2);
        for (int which : order) {
            // Each child is used just before it goes, with whatever of its parents is left.
            if (which == 2) {
                EXPECT_EQ(f.use_plan(), expected);
            } else if (which == 3) {
                f.use_calibrator();
            }
            EXPECT_EQ(allocator.released(), 0);
            f.destroy(which);
            if (f.plan) {
                EXPECT_EQ(ta_plan_begin(f.plan.get(), 1, &f.seq, nullptr, nullptr, nullptr, nullptr), TA_E_STATE)
                    << "open still";
            }
        }
        EXPECT_EQ(allocator.bytes_alive(), 0u);
        EXPECT_EQ(allocator.faults(), 0u);
        EXPECT_EQ(allocator.released(), 1);
    } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Lifetime, AnOpenPlanMayBeDestroyed) {
    Family f;
    f.plan.reset();
    EXPECT_EQ(length(f.pool, f.seq), 0) << "destroying an open plan aborts it";
    EXPECT_EQ(stats(f.pool).bytes_used, 0u);
    EXPECT_EQ(ta_seq_release(f.pool.get(), f.seq, nullptr), TA_OK);
    EXPECT_EQ(ta_kv_pool_close(f.pool.get(), nullptr), TA_OK);
}

TEST(Lifetime, CloseGivesMemoryBackWhileHandlesLive) {
    CountingAllocator allocator;
    const ta_allocator hooks = allocator.hooks();
    Family f(&hooks);
    end(f.plan);
    const uint64_t full = allocator.bytes_alive();
    const uint64_t blocks = stats(f.pool).bytes_used;
    ASSERT_GT(blocks, 0u);
    EXPECT_EQ(ta_kv_pool_close(f.pool.get(), nullptr), TA_OK);
    EXPECT_LE(allocator.bytes_alive(), full - blocks) << "a closed pool holds no blocks";
    EXPECT_EQ(ta_kv_pool_close(f.pool.get(), nullptr), TA_E_CLOSED);
    f.use_calibrator();
}

TEST(Lifetime, ManyPoolsOfOneContextAreApart) {
    const Context context = make_context(2);
    std::vector<KvPool> pools;
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 8; ++i) {
        pools.push_back(make_pool(context, pool_options(1, kHeads, kDim)));
        seqs.push_back(make_sequence(pools.back()));
        const Plan plan = make_plan(pools.back());
        Tensor k(std::vector<float>(size_t(i + 1) * kRow, float(i)), i + 1, kHeads, kDim);
        begin(plan, {seqs.back()}, {i + 1});
        append(plan, 0, k, k);
        end(plan);
    }
    for (int i = 0; i < 8; i += 2) pools[size_t(i)].reset();
    for (int i = 1; i < 8; i += 2) {
        EXPECT_EQ(length(pools[size_t(i)], seqs[size_t(i)]), i + 1);
        EXPECT_NEAR(dequantize(pools[size_t(i)], seqs[size_t(i)], 0, 0, 1, kRow).v[0], float(i), 0.01f * float(i));
        int64_t n = 0;
        EXPECT_EQ(ta_seq_length(pools[size_t(i)].get(), seqs[size_t(i) - 1], &n, nullptr), TA_E_STALE)
            << "a sequence of another pool";
    }
}

// ------------------------------------------------------------------------------------------------------------------ fork

// Runs `check` in a child; it returns the number of the first thing that was wrong, 0 for none.
template <class Check>
int in_child(Check&& check) {
    // A thread that is just starting may hold a lock of the sanitizer's allocator, which the child would wait for.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        _exit(check());
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Fork, EveryCallInTheChildSaysSoAndDestroyIsHarmless) {
    Family f;
    const ta_group_id id = make_group_id();
    const auto group_of_one = group_options(id, 0, 1);
    GroupHandle group = make_group(f.context, group_of_one);
    ta_namespace_options salted = sized<ta_namespace_options>();
    salted.salt[0] = 1;
    ta_namespace space = 0;
    ASSERT_EQ(ta_namespace_create(f.pool.get(), &salted, &space, nullptr), TA_OK);
    ASSERT_EQ(ta_namespace_join(group.get(), f.pool.get(), space, nullptr), TA_OK);
    const int wrong = in_child([&] {
        int n = 0, bad = 0;
        ta_error err;
        const auto forked = [&](ta_status status) {
            ++n;
            if (bad == 0 && (status != TA_E_FORKED || err.code != TA_E_FORKED || !std::strstr(err.message, "fork"))) bad = n;
        };
        auto i = sized<ta_context_info>();
        auto s = sized<ta_kv_pool_stats>();
        auto b = sized<ta_x_block_info>();
        auto po = pool_options(1, 1, 64);
        ta_kv_pool* pool = nullptr;
        ta_plan* plan = nullptr;
        ta_calibrator* calibrator = nullptr;
        ta_seq seq = 0;
        int64_t length = 0;
        uint8_t bits[kHeads];
        Tensor out(2, kHeads, kDim);
        forked(ta_context_get_info(f.context.get(), &i, &err));
        forked(ta_context_health(f.context.get(), &err));
        forked(ta_kv_pool_create(f.context.get(), &po, &pool, &err));
        forked(ta_kv_pool_close(f.pool.get(), &err));
        forked(ta_kv_pool_get_stats(f.pool.get(), &s, &err));
        forked(ta_seq_create(f.pool.get(), &seq, &err));
        forked(ta_seq_fork(f.pool.get(), f.seq, &seq, &err));
        forked(ta_seq_truncate(f.pool.get(), f.seq, 0, &err));
        forked(ta_seq_reserve(f.pool.get(), f.seq, 1, 0, &err));
        ta_block_info block;
        forked(ta_seq_forget(f.pool.get(), f.seq, 0, 0, nullptr, &err));
        forked(ta_seq_shift(f.pool.get(), f.seq, 0, 0, &err));
        forked(ta_seq_retain(f.pool.get(), f.seq, 0, 0, nullptr, &err));
        forked(ta_seq_describe_blocks(f.pool.get(), f.seq, 0, 1, &block, &err));
        const void* located;
        forked(ta_seq_locate_blocks(f.pool.get(), f.seq, 0, 1, &located, &err));
        auto range = sized<ta_memory_range>();
        forked(ta_kv_pool_get_memory(f.pool.get(), TA_TIER_HOST, &range, &err));
        ta_ticket suspended = 0;
        forked(ta_seq_suspend(f.pool.get(), f.seq, TA_TIER_HOST, &suspended, &err));
        auto room = sized<ta_fit>();
        forked(ta_kv_pool_fit(f.pool.get(), 1, &f.seq, nullptr, &room, &err));
        forked(ta_seq_release(f.pool.get(), f.seq, &err));
        forked(ta_seq_length(f.pool.get(), f.seq, &length, &err));
        forked(ta_seq_verify(f.pool.get(), f.seq, &err));
        forked(ta_plan_create(f.pool.get(), nullptr, &plan, &err));
        forked(ta_plan_begin(f.plan.get(), 1, &f.seq, nullptr, nullptr, nullptr, &err));
        forked(ta_append(f.plan.get(), 0, f.k.view(), f.k.view(), &err));
        forked(ta_attend(f.plan.get(), 0, f.q.view(), out.view(), nullptr, nullptr, &err));
        forked(ta_plan_end(f.plan.get(), nullptr, &err));
        forked(ta_plan_abort(f.plan.get(), &err));
        forked(ta_attend_dense(f.context.get(), f.q.view(), f.q.view(), f.q.view(), out.view(), nullptr, nullptr, &err));
        const float* lses[] = {nullptr};
        forked(ta_merge_states(f.context.get(), 1, f.q.view(), lses, out.view(), nullptr, nullptr, &err));
        forked(ta_calibrator_create(f.context.get(), 1, 1, 64, &calibrator, &err));
        forked(ta_calibrator_create_for(f.context.get(), &po, &calibrator, &err));
        forked(ta_calibrator_observe(f.calibrator.get(), 0, f.k.view(), f.k.view(), &err));
        forked(ta_calibrator_finish(f.calibrator.get(), 0, bits, bits, nullptr, nullptr, &err));
        const float costs[3] = {};
        forked(ta_calibrator_choose(f.calibrator.get(), costs, costs, 1 << 30, bits, bits, &err));
        ta_group* joined = nullptr;
        ta_group_state state = 0;
        auto gi = sized<ta_group_info>();
        auto gp = sized<ta_group_peer>();
        auto ti = sized<ta_transfer_info>();
        ta_ticket ticket = 0;
        int32_t fd = 0;
        uint64_t taken = 0;
        forked(ta_group_create(f.context.get(), &group_of_one, &joined, &err));
        forked(ta_group_poll(group.get(), 0, &state, &err));
        forked(ta_group_get_info(group.get(), &gi, &err));
        forked(ta_group_get_peer(group.get(), 0, &gp, &err));
        forked(ta_group_health(group.get(), &err));
        forked(ta_group_abort(group.get(), &err));
        forked(ta_group_descriptor(group.get(), &fd, &err));
        forked(ta_group_take_finished(group.get(), &ticket, 1, &taken, &err));
        forked(ta_seq_send(group.get(), f.pool.get(), f.seq, 0, 0, 0, &ticket, &err));
        forked(ta_seq_receive(group.get(), f.pool.get(), 0, 0, &ticket, &err));
        auto partition = sized<ta_partition_options>();
        forked(ta_seq_partition(group.get(), f.pool.get(), f.seq, &partition, &err));
        forked(ta_x_group_attend_dense(group.get(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr, nullptr,
                                       &err));
        forked(ta_transfer_query(group.get(), 1, &ti, &err));
        forked(ta_transfer_wait(group.get(), 1, -1, &ti, &err));
        forked(ta_transfer_cancel(group.get(), 1, &err));
        const uint8_t key[32] = {};
        uint8_t hashed[32];
        ta_prefix_place place;
        ta_prefix_event event;
        forked(ta_namespace_join(group.get(), f.pool.get(), 1, &err));
        forked(ta_namespace_leave(group.get(), f.pool.get(), 1, &err));
        forked(ta_namespace_lookup(group.get(), f.pool.get(), 1, key, 1, -1, &place, &err));
        forked(ta_namespace_fetch(group.get(), f.pool.get(), 1, key, 1, &ticket, &err));
        forked(ta_namespace_hash_keys(f.pool.get(), 1, key, 1, hashed, &err));
        forked(ta_namespace_take_events(f.pool.get(), 1, &event, 1, &taken, &err));
        const ta_store_fn none = [](void*, ta_store_item*, uint64_t, int64_t) { return 0; };
        auto store = sized<ta_block_store>();
        store.exists = store.get = store.put = store.remove = none;
        auto store_stats = sized<ta_store_stats>();
        forked(ta_namespace_attach_store(f.pool.get(), 1, &store, nullptr, &err));
        forked(ta_namespace_detach_store(f.pool.get(), 1, &err));
        forked(ta_namespace_load(f.pool.get(), 1, key, 1, &ticket, &err));
        forked(ta_namespace_flush_store(f.pool.get(), 1, -1, &taken, &err));
        forked(ta_namespace_get_store_stats(f.pool.get(), 1, &store_stats, &err));
        forked(ta_x_seq_block(f.pool.get(), f.seq, 0, &b, nullptr, 0, &err));
        forked(ta_x_seq_dequantize(f.pool.get(), f.seq, 0, 0, 0, nullptr, nullptr, &err));
        if (bad) return bad;
        if (pool || plan || calibrator || seq) return 100;
        group.reset();
        for (int which : {0, 3, 1, 2}) f.destroy(which);
        // The calls that need no handle work as ever, and so does a context of the child's own.
        if (std::strcmp(ta_status_name(TA_E_FORKED), "TA_E_FORKED") != 0) return 101;
#if defined(__SANITIZE_THREAD__)
        Family own(nullptr, 1);  // ThreadSanitizer does not let a forked child start threads
#else
        Family own;
#endif
        return own.use_plan().empty() ? 102 : 0;
    });
    EXPECT_EQ(wrong, 0) << "the number of the call in the child that went wrong (negative: the signal that ended it)";
    // The parent has noticed nothing.
    EXPECT_FALSE(f.use_plan().empty());
    f.use_calibrator();
    EXPECT_EQ(ta_context_health(f.context.get(), nullptr), TA_OK);
}

TEST(Fork, ChildrenOfABusyPoolDoNotHang) {
    Family f(nullptr, 3);
    f.use_plan();
    for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(in_child([&] {
                      ta_error err;
                      int64_t n = 0;
                      if (ta_seq_length(f.pool.get(), f.seq, &n, &err) != TA_E_FORKED) return 1;
                      f.destroy(2);
                      f.destroy(1);
                      f.destroy(0);
                      return 0;
                  }),
                  0);
    }
}

// Handlers of pthread_atfork do not run in such a child.
TEST(Fork, AChildOfARawCloneKnowsItself) {
    Family f(nullptr, 1);
    const auto child_says = [](auto&& check) {
        const long child = syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr);
        if (child == 0) {
            alarm(30);
            _exit(check());
        }
        int status = 0;
        if (child < 0 || waitpid(pid_t(child), &status, 0) != child) return -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    };
    EXPECT_EQ(child_says([&] {
                  ta_error err;
                  int64_t n = 0;
                  if (ta_seq_length(f.pool.get(), f.seq, &n, &err) != TA_E_FORKED) return 1;
                  // Objects that the child makes are its own, and are not its child's.
                  Family own(nullptr, 1);
                  if (own.use_plan().empty()) return 2;
                  if (ta_seq_length(f.pool.get(), f.seq, &n, &err) != TA_E_FORKED) return 3;
                  const int grandchild = child_says([&] {
                      if (ta_seq_length(f.pool.get(), f.seq, &n, &err) != TA_E_FORKED) return 1;
                      if (ta_seq_length(own.pool.get(), own.seq, &n, &err) != TA_E_FORKED) return 2;
                      return Family(nullptr, 1).use_plan().empty() ? 3 : 0;
                  });
                  return grandchild == 0 ? 0 : 10 + grandchild;
              }),
              0);
    EXPECT_FALSE(f.use_plan().empty());
}

// ThreadSanitizer and AddressSanitizer reserve more address space than this lets them have.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(Fork, ThreadsThatCannotStartAreALimit) {
    EXPECT_EQ(in_child([] {
                  const rlimit room{uint64_t{1} << 30, uint64_t{1} << 30};
                  if (setrlimit(RLIMIT_AS, &room) != 0) return 1;
                  auto options = sized<ta_context_options>();
                  options.threads = 1024;
                  ta_context* context = nullptr;
                  ta_error err;
                  if (ta_context_create(&options, &context, &err) != TA_E_LIMIT || context) return 2;
                  if (!std::strstr(err.message, "of 1023 worker threads")) return 3;
                  // The threads that had started are gone, and so is their memory.
                  options.threads = 8;
                  for (int i = 0; i < 100; ++i) {
                      if (ta_context_create(&options, &context, &err) != TA_OK) return 4;
                      ta_context_destroy(context);
                  }
                  return 0;
              }),
              0);
}
#endif

// ------------------------------------------------------------------------------------------------------- allocator and log

TEST(Hooks, EveryByteComesFromTheAllocatorAndGoesBack) {
    CountingAllocator allocator;
    const ta_allocator hooks = allocator.hooks();
    {
        Family f(&hooks);
        f.use_plan();
        EXPECT_GE(allocator.bytes_alive(), stats(f.pool).bytes_used);
        const auto i = info(f.context);
        EXPECT_EQ(i.bytes_in_use, allocator.bytes_alive());
        EXPECT_GE(i.bytes_peak, i.bytes_in_use);
        Tensor out(2, kHeads, kDim);
        ASSERT_EQ(ta_attend_dense(f.context.get(), f.q.view(), f.k.view(), f.k.view(), out.view(), nullptr, nullptr, nullptr),
                  TA_OK);
        EXPECT_EQ(info(f.context).bytes_in_use, i.bytes_in_use) << "dense attention keeps nothing";
        EXPECT_GT(info(f.context).bytes_peak, i.bytes_in_use);
    }
    EXPECT_GT(allocator.allocations(), 0u);
    EXPECT_EQ(allocator.bytes_alive(), 0u);
    EXPECT_EQ(allocator.faults(), 0u);
}

// Blocks beyond those that are kept for reuse, kept ones that give way to another kind, workspaces that grow, what a call takes
// for itself, and all that is there at the end: of sequences of no namespace, too.
TEST(Hooks, WhatGoesBackIsZeroed) {
    CountingAllocator allocator;
    const ta_allocator hooks = allocator.hooks();
    {
        Family f(&hooks);
        f.use_plan();
        Random random(3);
        const Plan plan = make_plan(f.pool);
        for (const int32_t n : {1, 500, 200 * 64, 64, 130 * 64}) {
            const ta_seq seq = make_sequence(f.pool);
            Tensor k(random.normals(n * kRow), n, kHeads, kDim);
            const int32_t some = std::min(n, 100);
            Tensor q(random.normals(some * kRow), some, kHeads, kDim), o(some, kHeads, kDim);
            begin(plan, {seq}, {n}, {some});
            append(plan, 0, k, k);
            attend(plan, 0, q, o);
            end(plan);
            ASSERT_EQ(ta_attend_dense(f.context.get(), q.view(), k.view(), k.view(), o.view(), nullptr, nullptr, nullptr),
                      TA_OK);
            ASSERT_EQ(ta_seq_release(f.pool.get(), seq, nullptr), TA_OK);
        }
    }
    EXPECT_EQ(allocator.bytes_alive(), 0u);
    EXPECT_EQ(allocator.returned_dirty(), 0u);
}

TEST(Hooks, ResultsDoNotDependOnWhatMemoryHeld) {
    const auto run = [](uint8_t fill) {
        CountingAllocator allocator;
        allocator.fill = fill;
        const ta_allocator hooks = allocator.hooks();
        Family f(&hooks);
        std::vector<float> seen = f.use_plan();
        f.plan.reset();
        const auto keep = [&](const std::vector<float>& x) { seen.insert(seen.end(), x.begin(), x.end()); };
        // Pages with room, reused ones, reopened ones, dense workspaces.
        const Plan plan = make_plan(f.pool);
        Random random(2);
        for (int32_t n : {1, 62, 3, 70, 1}) {
            const ta_seq other = fork_sequence(f.pool, f.seq);
            ta_error err;
            require(ta_seq_truncate(f.pool.get(), f.seq, length(f.pool, f.seq) - 5, &err), err);
            Tensor k(random.normals(2 * n * kRow), 2 * n, kHeads, kDim), out(2 * n, kHeads, kDim);
            begin(plan, {other, f.seq}, {n, n});
            append(plan, 0, k, k);
            attend(plan, 0, k, out);
            keep(out.values());
            end(plan);
            require(ta_attend_dense(f.context.get(), k.view(), k.view(), k.view(), out.view(), nullptr, nullptr, &err), err);
            keep(out.values());
            require(ta_seq_release(f.pool.get(), other, &err), err);
        }
        keep(dequantize(f.pool, f.seq, 0, 0, length(f.pool, f.seq), kRow).v);
        return seen;
    };
    const std::vector<float> expected = run(0x00);
    for (float x : expected) ASSERT_TRUE(std::isfinite(x));
    EXPECT_EQ(run(0xff), expected);
    EXPECT_EQ(run(0x7f), expected);
}

TEST(Hooks, TheHooksStructIsCopied) {
    CountingAllocator allocator;
    ta_allocator hooks = allocator.hooks();
    const Context context = [&] {
        auto options = sized<ta_context_options>();
        options.threads = 1;
        options.allocator = &hooks;
        return make_context(options);
    }();
    hooks = ta_allocator{};
    const KvPool pool = make_pool(context, pool_options(1, kHeads, kDim));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    begin(plan, {seq}, {1});
    EXPECT_GT(allocator.bytes_alive(), 0u);
}

TEST(Hooks, ArraysOfThePoolOptionsAreCopied) {
    const Context context = make_context(1);
    std::vector<uint8_t> k_bits = {8, 2}, v_bits = {2, 4};
    std::vector<float> offset(kRow, 3.0f);
    auto numerics = sized<ta_numerics>();
    numerics.k_offset = offset.data();
    auto options = pool_options(1, kHeads, kDim, 0, &numerics);
    options.k_bits = k_bits.data();
    options.v_bits = v_bits.data();
    const auto run = [&](bool spoil) {
        const KvPool pool = make_pool(context, options);
        if (spoil) {
            std::fill(k_bits.begin(), k_bits.end(), uint8_t{99});
            std::fill(v_bits.begin(), v_bits.end(), uint8_t{99});
            std::fill(offset.begin(), offset.end(), 1e30f);
        }
        const Plan plan = make_plan(pool);
        const ta_seq seq = make_sequence(pool);
        Random random(4);
        Tensor k(random.normals(128 * kRow), 128, kHeads, kDim);
        begin(plan, {seq}, {128});
        append(plan, 0, k, k);
        end(plan);
        return dequantize(pool, seq, 0, 0, 128, kRow);
    };
    const Stored expected = run(false);
    EXPECT_EQ(run(true), expected);
}

// A set of each kind that counts how often it is released.
struct CountedSets {
    CountedSets() {
        allocator.allocate = [](size_t bytes, size_t alignment, void*) {
            return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        };
        allocator.deallocate = [](void* p, size_t, size_t, void*) { std::free(p); };
        allocator.user = &allocators;
        log.user = &logs;
        progress.user = &progresses;
        allocator.release = log.release = progress.release = [](void* user) { ++*static_cast<std::atomic<int>*>(user); };
        options.threads = 1;
        options.allocator = &allocator;
        options.log = &log;
    }

    std::atomic<int> allocators{0}, logs{0}, progresses{0};
    ta_allocator allocator = sized<ta_allocator>();
    ta_log_sink log = sized<ta_log_sink>();
    ta_progress progress = sized<ta_progress>();
    ta_context_options options = sized<ta_context_options>();
};

TEST(CallbackSets, ACreateThatFailsReleasesThem) {
    struct Longer {
        ta_context_options options;
        uint64_t unknown = 1;
    };
    struct LongerAllocator {
        ta_allocator allocator;
        uint64_t unknown = 1;
    };
    struct Case {
        const char* what;
        std::function<void(CountedSets&)> spoil;
        ta_status status;
        int allocators = 1, logs = 1;
    };
    Longer longer{};
    LongerAllocator longer_allocator{};
    const Case cases[] = {
        {"device", [](CountedSets& s) { s.options.device = 9; }, TA_E_INVALID},
        {"threads", [](CountedSets& s) { s.options.threads = -1; }, TA_E_INVALID},
        {"level", [](CountedSets& s) { s.log.level = 9; }, TA_E_INVALID},
        {"no allocate", [](CountedSets& s) { s.allocator.allocate = nullptr; }, TA_E_INVALID},
        {"a field that this library does not know",
         [&](CountedSets& s) {
             longer_allocator.allocator = s.allocator;
             longer_allocator.allocator.struct_size = sizeof longer_allocator;
             s.options.allocator = &longer_allocator.allocator;
         },
         TA_E_STRUCT},
        {"an allocator of no header's size", [](CountedSets& s) { s.allocator.struct_size = 9; }, TA_E_STRUCT, 0, 1},
        {"a log of no header's size", [](CountedSets& s) { s.log.struct_size = 0; }, TA_E_STRUCT, 1, 0},
        {"options of no header's size", [](CountedSets& s) { s.options.struct_size = 3; }, TA_E_STRUCT, 0, 0},
    };
    for (const Case& c : cases) {
        CountedSets sets;
        c.spoil(sets);
        ta_context* out = nullptr;
        EXPECT_EQ(ta_context_create(&sets.options, &out, nullptr), c.status) << c.what;
        EXPECT_EQ(sets.allocators, c.allocators) << c.what;
        EXPECT_EQ(sets.logs, c.logs) << c.what;
    }
    CountedSets sets;
    EXPECT_EQ(ta_context_create(&sets.options, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(sets.allocators, 1);
    EXPECT_EQ(sets.logs, 1);
    longer.options = sets.options;
    longer.options.struct_size = sizeof longer;
    ta_context* out = nullptr;
    EXPECT_EQ(ta_context_create(&longer.options, &out, nullptr), TA_E_STRUCT);
    EXPECT_EQ(sets.allocators, 2);
    EXPECT_EQ(sets.logs, 2);
}

TEST(CallbackSets, TheLastHandleReleasesThemOnWhateverThread) {
    CountedSets sets;
    Context context = make_context(sets.options);
    KvPool pool = make_pool(context, pool_options(1, kHeads, kDim));
    Plan plan = make_plan(pool);
    context.reset();
    pool.reset();
    EXPECT_EQ(sets.allocators + sets.logs, 0);
    std::thread([&] { plan.reset(); }).join();
    EXPECT_EQ(sets.allocators, 1);
    EXPECT_EQ(sets.logs, 1);
}

TEST(CallbackSets, FilesReleaseTheirProgressBeforeTheyReturn) {
    Family f;
    end(f.plan);
    CountedSets sets;
    const std::filesystem::path path = std::filesystem::temp_directory_path() / ("ta-sets-" + std::to_string(getpid()));
    ta_seq loaded = 0;
    uint64_t n = 0;
    ta_loaded_seq all[4];
    ta_kv_pool* const pool = f.pool.get();
    const ta_progress* const p = &sets.progress;
    int given = 0;
    const auto released = [&](ta_status status, ta_status wanted) {
        EXPECT_EQ(status, wanted) << "call " << given;
        EXPECT_EQ(sets.progresses, ++given);
    };
    released(ta_seq_save(nullptr, f.seq, path.c_str(), p, nullptr), TA_E_INVALID);
    released(ta_seq_save(pool, f.seq, nullptr, p, nullptr), TA_E_INVALID);
    released(ta_seq_save(pool, 0, path.c_str(), p, nullptr), TA_E_STALE);
    released(ta_seq_load(pool, path.c_str(), p, &loaded, nullptr), TA_E_IO);
    released(ta_seq_load(pool, path.c_str(), p, nullptr, nullptr), TA_E_INVALID);
    released(ta_seq_save(pool, f.seq, path.c_str(), p, nullptr), TA_OK);
    released(ta_seq_load(pool, path.c_str(), p, &loaded, nullptr), TA_OK);
    std::filesystem::remove(path);
    released(ta_kv_pool_save(pool, path.c_str(), 77, p, nullptr), TA_E_INVALID);
    released(ta_kv_pool_load(pool, path.c_str(), p, all, 4, nullptr, nullptr), TA_E_INVALID);
    released(ta_kv_pool_load(pool, path.c_str(), p, nullptr, 0, &n, nullptr), TA_E_IO);
    released(ta_kv_pool_save(pool, path.c_str(), 0, p, nullptr), TA_OK);
    released(ta_kv_pool_load(pool, path.c_str(), p, nullptr, 0, &n, nullptr), TA_OK);
    released(ta_kv_pool_load(pool, path.c_str(), p, all, 4, &n, nullptr), TA_OK);
    ta_kv_pool_close(pool, nullptr);
    released(ta_kv_pool_save(pool, path.c_str(), 0, p, nullptr), TA_E_CLOSED);
    std::filesystem::remove(path);
    EXPECT_EQ(in_child([&] {
                  released(ta_kv_pool_save(pool, path.c_str(), 0, p, nullptr), TA_E_FORKED);
                  return sets.progresses == given ? 0 : 1;
              }),
              0);
}

struct Log {
    std::mutex mutex;
    std::vector<std::pair<ta_log_level, std::string>> lines;
    static void take(ta_log_level level, const char* message, void* user) {
        auto* log = static_cast<Log*>(user);
        std::lock_guard lock(log->mutex);
        log->lines.emplace_back(level, message);
    }
};

TEST(Hooks, TheLogGetsItsLevelsAndNoOthers) {
    for (ta_log_level level = 0; level <= TA_LOG_DEBUG; ++level) {
        Log log;
        auto sink = sized<ta_log_sink>();
        sink.log = Log::take;
        sink.user = &log;
        sink.level = level;
        auto options = sized<ta_context_options>();
        options.threads = 1;
        options.log = &sink;
        const Context context = make_context(options);
        const ta_log_level most = level == 0 ? TA_LOG_WARNING : level;
        bool said_hello = false;
        for (const auto& [l, text] : log.lines) {
            EXPECT_GE(l, TA_LOG_ERROR);
            EXPECT_LE(l, most);
            EXPECT_FALSE(text.empty());
            said_hello |= text.find("context") != std::string::npos;
        }
        EXPECT_EQ(said_hello, most >= TA_LOG_INFO);
    }
}

}  // namespace
}  // namespace ta::testing
