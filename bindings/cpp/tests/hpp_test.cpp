// turboattention.hpp: every call once, what it adds to the C ABI (lifetimes, errors, callbacks), and wrong use.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <thread>
#include <turboattention.hpp>

namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;

std::vector<float> numbers(int64_t n, uint32_t seed) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) seed = seed * 1664525 + 1013904223, v = static_cast<float>(seed >> 8) / (1 << 23) - 1;
    return x;
}
template <class T>
ta::View<T> view(std::vector<T>& x) {
    return {x.data(), static_cast<int64_t>(x.size()) / kRow, kHeads, kDim};
}

ta::PoolOptions shape(uint32_t bits = 4) {
    return {.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = bits, .budget_bytes = 64 << 20};
}

// Appends n tokens to a sequence and returns what the last layer's attention gives.
std::vector<float> feed(const ta::Plan& plan, const ta::Sequence& seq, int32_t n, uint32_t seed = 1) {
    auto k = numbers(n * kRow, seed), v = numbers(n * kRow, seed + 1), q = numbers(n * kRow, seed + 2), out = q;
    auto step = plan.begin(seq, n);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        step.append(layer, view(k), view(v));
        step.attend(layer, view(q), view(out));
    }
    step.end();
    return out;
}

ta_status status_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const ta::Error& error) {
        EXPECT_STRNE(error.what(), "");
        return error.status();
    }
    return TA_OK;
}

struct Folder {
    std::filesystem::path path;
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "hpp_test_XXXXXX").string();
        if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
        path = name;
    }
    ~Folder() { std::filesystem::remove_all(path); }
    std::string file(const char* name) const { return path / name; }
};

TEST(Hpp, AStepGivesTheBitsOfC) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto seq = pool.create_sequence();
    const auto plan = pool.create_plan();
    const auto got = feed(plan, seq, 100);

    auto k = numbers(100 * kRow, 1), v = numbers(100 * kRow, 2), q = numbers(100 * kRow, 3), want = q;
    ta_seq id = 0;
    const int32_t n = 100;
    ASSERT_EQ(ta_seq_create(pool.get(), &id, nullptr), TA_OK);
    ASSERT_EQ(ta_plan_begin(plan.get(), 1, &id, &n, nullptr, nullptr, nullptr), TA_OK);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        ASSERT_EQ(ta_append(plan.get(), layer, view(k).get(), view(v).get(), nullptr), TA_OK);
        ASSERT_EQ(ta_attend(plan.get(), layer, view(q).get(), view(want).get(), nullptr, nullptr, nullptr), TA_OK);
    }
    ASSERT_EQ(ta_plan_end(plan.get(), nullptr, nullptr), TA_OK);
    EXPECT_EQ(got, want);
    EXPECT_EQ(seq.length(), 100);
}

TEST(Hpp, WhatNeedsAParentKeepsIt) {
    auto context = std::make_optional(ta::Context::create());
    auto pool = std::make_optional(context->create_pool(shape()));
    auto plan = std::make_optional(pool->create_plan());
    auto seq = pool->create_sequence();
    auto calibrator = context->create_calibrator(1, 1, 64);
    context.reset(), pool.reset();
    feed(*plan, seq, 70);
    auto k = numbers(kRow, 1);
    auto step = plan->begin(seq, 1);
    plan.reset();
    for (uint32_t layer = 0; layer < kLayers; ++layer) step.append(layer, view(k), view(k));
    step.end();
    EXPECT_EQ(seq.length(), 71);
    EXPECT_EQ(status_of([&] { step.end(); }), TA_E_INVALID);  // it is over
}

TEST(Hpp, AStepThatIsLeftIsAborted) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence(), other = pool.create_sequence();
    EXPECT_THROW(
        {
            auto step = plan.begin({{seq, 5}, {other, 3}});
            throw std::runtime_error("of the caller");
        },
        std::runtime_error);
    auto step = plan.begin({{seq, 0}, {other, 0}});
    step.abort();
    EXPECT_EQ(seq.length(), 0);
    EXPECT_EQ(status_of([&] { plan.begin(std::array{seq.id()}, std::array{1, 2}); }), TA_E_INVALID);
    const auto strange = ta::Context::create().create_pool(shape()).create_sequence();
    EXPECT_EQ(status_of([&] { plan.begin(strange, 1); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { plan.begin({{seq, 1}, {strange, 1}}); }), TA_E_INVALID);
}

TEST(Hpp, SequencesAreReleasedOnce) {
    const auto pool = ta::Context::create().create_pool(shape());
    {
        auto a = pool.create_sequence();
        auto b = std::move(a);
        b = pool.create_sequence();
        EXPECT_EQ(pool.stats().sequences, 1u);
        b.release();
        EXPECT_EQ(status_of([&] { b.release(); }), TA_E_STALE);
        ta::Sequence adopted(pool.shared(), pool.create_sequence().detach());
    }
    EXPECT_EQ(pool.stats().sequences, 0u);
}

TEST(Hpp, ErrorsSayWhere) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    auto step = plan.begin(seq, 2);
    auto k = numbers(2 * kRow, 1);
    k[kRow] = std::nanf("");
    try {
        step.append(1, view(k), view(k));
        FAIL();
    } catch (const ta::Error& error) {
        EXPECT_EQ(error.status(), TA_E_NONFINITE);
        EXPECT_STREQ(error.status_name(), "TA_E_NONFINITE");
        EXPECT_EQ(error.detail().layer, 1);
        EXPECT_EQ(error.detail().token, 1);
    }
    const std::vector<uint8_t> bits(3, 4);
    auto options = shape();
    options.k_bits = bits;
    EXPECT_EQ(status_of([&] { ta::Context::create().create_pool(options); }), TA_E_SHAPE);
}

TEST(Hpp, ResultsReturnErrors) {
    namespace tr = ta::results;
    const auto context = tr::Context::create();
    ASSERT_TRUE(context);
    const auto none = context->create_pool({});
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().status(), TA_E_INVALID);
    const auto pool = context->create_pool(shape());
    const auto plan = pool->create_plan();
    auto seq = pool->create_sequence();
    auto k = numbers(kRow, 1);
    {
        auto step = plan->begin(*seq, 1);
        EXPECT_FALSE(step->end());
        for (uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_TRUE(step->append(layer, view(k), view(k)));
        EXPECT_TRUE(step->end());
    }
    EXPECT_EQ(*seq->length(), 1);
}

TEST(Hpp, Callbacks) {
    struct Counting : std::pmr::memory_resource {
        std::atomic<int64_t> bytes = 0;
        bool full = false;
        void* do_allocate(size_t n, size_t a) override {
            if (full) throw std::bad_alloc();
            bytes += static_cast<int64_t>(n);
            return std::pmr::new_delete_resource()->allocate(n, a);
        }
        void do_deallocate(void* p, size_t n, size_t a) override {
            bytes -= static_cast<int64_t>(n);
            std::pmr::new_delete_resource()->deallocate(p, n, a);
        }
        bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
    };
    const auto memory = std::make_shared<Counting>();
    const auto witness = std::make_shared<int>();
    std::atomic<int> logged = 0;
    Folder folder;
    {
        const auto context = ta::Context::create({.threads = 2,
                                                  .allocator = memory,
                                                  .log_level = TA_LOG_DEBUG,
                                                  .log = [witness, &logged](ta_log_level, std::string_view text) {
                                                      logged += !text.empty();
                                                      throw std::runtime_error("dropped");
                                                  }});
        const auto pool = context.create_pool(shape());
        const auto seq = pool.create_sequence();
        feed(pool.create_plan(), seq, 200);
        EXPECT_GT(memory->bytes, 0);

        const auto path = folder.file("seq");
        EXPECT_THROW(seq.save(path.c_str(), [](uint64_t, uint64_t) -> bool { throw std::out_of_range("of the caller"); }),
                     std::out_of_range);
        EXPECT_EQ(status_of([&] { seq.save(path.c_str(), [](uint64_t, uint64_t) { return false; }); }), TA_E_CANCELLED);
        uint64_t seen = 0;
        seq.save(path.c_str(), [&](uint64_t done, uint64_t total) { return seen = total, done <= total; });
        EXPECT_GT(seen, 0u);
        EXPECT_EQ(pool.load_sequence(path.c_str()).length(), 200);

        memory->full = true;
        const auto more = context.create_pool(shape());
        const auto other = more.create_sequence();
        EXPECT_EQ(status_of([&] { more.create_plan().begin(other, 64); }), TA_E_MEMORY);
        memory->full = false;
    }
    EXPECT_EQ(memory->bytes, 0);
    EXPECT_EQ(memory.use_count(), 1);
    EXPECT_EQ(witness.use_count(), 1);
}

TEST(Hpp, Exports) {
    Folder folder;
    const auto pool = ta::Context::create().create_pool(shape());
    const auto seq = pool.create_sequence(), empty = pool.create_sequence();
    feed(pool.create_plan(), seq, 200);
    const auto bytes = seq.export_bytes();
    seq.save(folder.file("seq").c_str());
    std::ifstream file(folder.file("seq"), std::ios::binary);
    EXPECT_TRUE(bytes == std::vector<uint8_t>(std::istreambuf_iterator<char>(file), {}));
    const auto imported = pool.import_sequence(bytes);
    imported.verify();
    EXPECT_EQ(imported.length(), 200);
    EXPECT_EQ(feed(pool.create_plan(), imported, 3), feed(pool.create_plan(), seq, 3));
    EXPECT_EQ(pool.import_sequence(empty.export_bytes()).length(), 0);

    std::vector<uint8_t> mine(bytes.size());
    const ta::Sink copy = [&](uint64_t offset, std::span<const uint8_t> part) {
        return std::copy(part.begin(), part.end(), mine.begin() + static_cast<std::ptrdiff_t>(offset)), true;
    };
    EXPECT_EQ(pool.import_sequence(bytes).export_to(copy), bytes.size());
    EXPECT_EQ(pool.import_sequence(mine).length(), 200);
    EXPECT_EQ(status_of([&] { seq.export_to([](uint64_t, auto) { return false; }); }), TA_E_CANCELLED);
    EXPECT_EQ(status_of([&] { seq.export_to(nullptr); }), TA_E_INVALID);
    EXPECT_THROW(seq.export_to([](uint64_t, auto) -> bool { throw std::out_of_range("of the caller"); }), std::out_of_range);
    mine[mine.size() / 2] ^= 1;
    EXPECT_EQ(status_of([&] { pool.import_sequence(mine); }), TA_E_CORRUPT);
    EXPECT_EQ(status_of([&] { pool.import_sequence(std::span(bytes).first(100)); }), TA_E_CORRUPT);
    EXPECT_EQ(status_of([&] { pool.import_sequence({}); }), TA_E_INVALID);
    EXPECT_EQ(pool.stats().sequences, 3u);
}

TEST(Hpp, PoolsSequencesFiles) {
    Folder folder;
    const auto context = ta::Context::create({.threads = 1});
    auto options = shape();
    options.numerics = {.profile = TA_PROFILE_PAPER, .sink_blocks = 2};
    const auto pool = context.create_pool(options);
    const auto seq = pool.create_sequence();
    feed(pool.create_plan(), seq, 200);
    seq.verify();
    const auto fork = seq.fork();
    fork.truncate(130);
    fork.set_priority(3);
    EXPECT_EQ(fork.length(), 130);
    EXPECT_EQ(pool.stats().sequences, 2u);
    EXPECT_EQ(pool.describe().numerics->sink_blocks, 2);

    const auto path = folder.file("pool");
    pool.save(path.c_str());
    const auto again = context.create_pool(options);
    const auto loaded = again.load(path.c_str());
    ASSERT_EQ(loaded.size(), 2u);
    EXPECT_EQ(loaded[0].sequence.length() + loaded[1].sequence.length(), 330);
    EXPECT_TRUE(loaded[0].saved == seq.id() || loaded[1].saved == seq.id());

    EXPECT_NE(pool.metrics().find("# EOF"), std::string::npos);
    EXPECT_EQ(pool.metrics(TA_METRICS_JSON).front(), '{');
    EXPECT_EQ(context.info().threads, 1);
    context.health();
    EXPECT_EQ(ta::version(), ta_version());
    EXPECT_EQ(ta::abi_version(), TA_ABI_VERSION);
    EXPECT_NE(std::strstr(ta::build_info(), "turboattention"), nullptr);
    EXPECT_EQ(status_of([&] { pool.create_plan().set_stream(reinterpret_cast<ta_stream>(8)); }), TA_E_UNSUPPORTED);
    pool.close();
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.length()); }), TA_E_CLOSED);
}

TEST(Hpp, TiersAndPrefixes) {
    Folder folder;
    const auto path = folder.file("tier");
    auto options = shape();
    const auto peer = ta::Context::create();
    options.tiers = {
        .host_bytes = 16 << 20, .disk_bytes = 16 << 20, .disk_path = path.c_str(), .peer = peer.get(), .peer_bytes = 16 << 20};
    ta::NamespaceOptions tenant;
    tenant.salt.fill(7);
    std::vector<ta::Key> keys(3);
    for (size_t i = 0; i < keys.size(); ++i) keys[i].fill(static_cast<uint8_t>(i + 1));
    {
        const auto pool = ta::Context::create().create_pool(options);
        const auto seq = pool.create_sequence();
        feed(pool.create_plan(), seq, 256);
        auto move = seq.move(TA_TIER_HOST, 1, 2);
        EXPECT_EQ(move.wait().state, TA_MOVE_DONE);
        EXPECT_EQ(move.query().moved, 2u);
        move.cancel();
        EXPECT_EQ(seq.residency().host_blocks, 2u);
        EXPECT_EQ(seq.prefetch(1, 2).wait(std::chrono::seconds(60)).state, TA_MOVE_DONE);
        seq.pin(1, 1);
        EXPECT_EQ(seq.residency().pinned_blocks, 1u);
        seq.unpin(1, 1);
        EXPECT_EQ(seq.move(TA_TIER_PEER, 1, 2).wait().moved, 2u);
        EXPECT_EQ(seq.residency().peer_blocks, 2u);
        EXPECT_EQ(pool.tier_stats(TA_TIER_HOST).bytes_budget, 16u << 20);
        EXPECT_GT(pool.move_stats().bytes_asked, 0u);

        const auto space = pool.create_namespace(tenant);
        seq.publish(space, keys);
        struct Table : ta::BlockStore {
            std::map<std::string, std::string> values;
            static std::string key(const ta_store_item& item) { return {reinterpret_cast<const char*>(item.key), 32}; }
            bool exists(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) item.result = values.count(key(item)) ? TA_STORE_DONE : TA_STORE_ABSENT;
                return true;
            }
            bool get(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) {
                    const auto found = values.find(key(item));
                    if (found == values.end()) continue;
                    std::memcpy(item.data, found->second.data(), found->second.size());
                    item.bytes = found->second.size();
                    item.result = TA_STORE_DONE;
                }
                return true;
            }
            bool put(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) {
                    values[key(item)].assign(static_cast<const char*>(item.data), item.bytes);
                    item.result = TA_STORE_DONE;
                }
                return true;
            }
            bool remove(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) values.erase(key(item)), item.result = TA_STORE_DONE;
                return true;
            }
        };
        const auto table = std::make_shared<Table>();
        space.attach_store(table, {.batch_bytes = 1});
        EXPECT_EQ(space.flush_store(), 0u);
        EXPECT_EQ(table->values.size(), 3u);
        EXPECT_EQ(space.load(keys).wait().present, 3u);
        EXPECT_EQ(space.store_stats().puts, 3u);
        space.detach_store();
        EXPECT_EQ(table.use_count(), 1);
        EXPECT_EQ(status_of([&] { static_cast<void>(space.load(keys)); }), TA_E_STATE);
        const auto events = space.take_events();
        ASSERT_EQ(events.size(), 4u);
        EXPECT_EQ(events[0].kind, TA_PREFIX_RESET);
        EXPECT_EQ(0, std::memcmp(events[1].key, space.hash_keys(keys)[events[1].index].data(), 32));
        EXPECT_EQ(space.match(keys).length, 192);
        space.flush();
        EXPECT_EQ(space.stats().entries, 3u);
    }
    const auto pool = ta::Context::create().create_pool(options);
    const auto space = pool.create_namespace(tenant);
    EXPECT_EQ(space.match(keys).sequence.length(), 192);  // the namespace's handle had gone, not what was published
    space.destroy();
    EXPECT_EQ(status_of([&] { static_cast<void>(space.stats()); }), TA_E_STALE);
}

TEST(Hpp, AStoreThatThrowsHasFailed) {
    struct Broken : ta::BlockStore {
        using Items = std::span<ta_store_item>;
        bool exists(Items, std::chrono::nanoseconds) override { throw std::runtime_error("exists"); }
        bool get(Items, std::chrono::nanoseconds) override { throw std::runtime_error("get"); }
        bool put(Items, std::chrono::nanoseconds) override { throw 1; }
        bool remove(Items, std::chrono::nanoseconds) override { throw 1; }
    };
    const auto pool = ta::Context::create({.threads = 1}).create_pool(shape());
    const auto space = pool.create_namespace({.salt = {1}});
    const std::vector<ta::Key> keys(1), absent(1, ta::Key{1});
    const auto seq = pool.create_sequence();
    feed(pool.create_plan(), seq, 100);
    const auto broken = std::make_shared<Broken>();
    space.attach_store(broken);
    seq.publish(space, keys);
    EXPECT_EQ(space.flush_store(std::chrono::milliseconds(100)), 1u);
    const auto info = space.load(absent).wait();
    EXPECT_EQ(info.state, TA_MOVE_DONE);
    EXPECT_EQ(info.moved, 0u);
    EXPECT_GT(space.store_stats().calls_failed, 0u);
    EXPECT_EQ(space.store_stats().puts, 0u);
    space.detach_store();
    EXPECT_EQ(broken.use_count(), 1);
    EXPECT_EQ(space.match(keys).length, 64);  // the pool is as it was
}

TEST(Hpp, ReservedFittedSuspended) {
    auto options = shape();
    options.budget_bytes = 8 * ta::Context::create().create_pool(shape()).stats().token_block_bytes;
    options.tiers = {.host_bytes = 16 << 20};
    const auto pool = ta::Context::create().create_pool(options);
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    EXPECT_EQ(pool.stats().bytes_free, options.budget_bytes);
    seq.reserve(100);
    const ta_kv_pool_stats stats = pool.stats();
    EXPECT_GT(stats.bytes_promised, 0u);
    EXPECT_EQ(stats.bytes_free + stats.bytes_promised, options.budget_bytes);
    EXPECT_EQ(stats.bytes_reclaimable, 0u);
    EXPECT_EQ(status_of([&] { seq.reserve(1 << 20, -1); }), TA_E_TIER_FULL);
    const std::array<ta_seq, 2> ids{seq.id(), 0};
    const ta_fit fits = pool.fit(ids, std::array{100, 1});
    EXPECT_EQ(fits.now + fits.after_eviction, 2);
    EXPECT_EQ(fits.first_lacking, -1);
    const ta_fit lacks = pool.fit(ids, std::array{100, 1 << 20});
    EXPECT_EQ(lacks.first_lacking, 1);
    EXPECT_GT(lacks.bytes_lacking, 0u);
    EXPECT_EQ(status_of([&] { pool.fit(ids, std::array{1}); }), TA_E_INVALID);

    const auto idle = pool.create_sequence();
    feed(plan, idle, 70);
    feed(plan, seq, 100);
    EXPECT_EQ(pool.stats().bytes_promised, 0u);
    EXPECT_EQ(status_of([&] { plan.begin(seq, 1 << 20, -1, {.wait_ms = -2}); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { pool.take_finished_moves(); }), TA_E_STATE);
    EXPECT_GE(pool.descriptor(), 0);
    const auto suspended = idle.suspend(TA_TIER_HOST);
    EXPECT_EQ(suspended.wait().state, TA_MOVE_DONE);
    std::vector<ta_ticket> finished;
    while (finished.empty()) finished = pool.take_finished_moves();
    EXPECT_EQ(finished, std::vector<ta_ticket>{suspended.ticket()});
    EXPECT_EQ(idle.residency().device_bytes, 0u);
    feed(plan, idle, 1);
    EXPECT_EQ(idle.length(), 71);
}

// More than a call of the C ABI is asked for at once.
TEST(Hpp, AllThatWaitsIsTaken) {
    auto options = shape();
    options.tiers = {.host_bytes = 16 << 20};
    const auto pool = ta::Context::create().create_pool(options);
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence(), other = pool.create_sequence();
    feed(plan, seq, 64);
    feed(plan, other, 200);
    ta::NamespaceOptions tenant;
    tenant.salt.fill(9);
    const auto space = pool.create_namespace(tenant);
    constexpr uint32_t kN = 1500;
    for (uint32_t i = 0; i < kN; ++i) {
        std::array<ta::Key, 1> keys{};
        std::memcpy(keys[0].data(), &i, sizeof i);
        seq.publish(space, keys);
    }
    EXPECT_TRUE(space.take_events(0).empty());
    auto events = space.take_events(1100);
    ASSERT_EQ(events.size(), 1100u);
    for (const ta_prefix_event& event : space.take_events(SIZE_MAX)) events.push_back(event);
    ASSERT_EQ(events.size(), kN + 1);
    for (size_t i = 0; i < events.size(); ++i) ASSERT_EQ(events[i].number, i + 1);

    EXPECT_GE(pool.descriptor(), 0);
    std::vector<ta_ticket> want;
    for (uint32_t i = 0; i < kN; ++i) {
        const auto move = other.move(i % 2 ? TA_TIER_DEVICE : TA_TIER_HOST, 1, 1);
        move.wait();
        want.push_back(move.ticket());
    }
    auto got = pool.take_finished_moves(1100);
    while (got.size() < kN)
        for (const ta_ticket ticket : pool.take_finished_moves(SIZE_MAX)) got.push_back(ticket);
    EXPECT_EQ(got, want);
    space.destroy();
    EXPECT_EQ(status_of([&] { space.take_events(SIZE_MAX); }), TA_E_STALE);

    const auto context = ta::results::Context::create();
    ASSERT_TRUE(context);
    const auto result = context->create_pool(options);
    ASSERT_TRUE(result);
    EXPECT_EQ(result->take_finished_moves(SIZE_MAX).error().status(), TA_E_STATE);
}

TEST(Hpp, VMayHaveOtherChannels) {
    const auto pool = ta::Context::create().create_pool(
        {.layers = 1, .kv_heads = 2, .head_dim = 48, .budget_bytes = 1 << 20, .v_head_dim = 32});
    EXPECT_EQ(pool.describe().v_head_dim, 32u);
    const ta::LayerGroup windowed[] = {{.first = 0, .layers = 2, .window = 100}};
    const auto with_windows = ta::Context::create().create_pool(
        {.layers = 3, .kv_heads = 2, .head_dim = 64, .budget_bytes = 1 << 20, .layer_groups = windowed});
    ASSERT_EQ(with_windows.describe().n_layer_groups, 1u);
    EXPECT_EQ(with_windows.describe().layer_groups[0].window, 100);
    EXPECT_EQ(pool.describe().block_head_dim, 64u);
    const auto seq = pool.create_sequence();
    const auto plan = pool.create_plan();
    std::vector<float> k(5 * 2 * 48, 0.5f), v(5 * 2 * 32, 0.25f), out(v.size());
    auto step = plan.begin(seq, 5);
    step.append(0, ta::View(k.data(), 5, 2, 48), ta::View(v.data(), 5, 2, 32));
    step.attend(0, ta::View(k.data(), 5, 2, 48), ta::View(out.data(), 5, 2, 32));
    step.end();
    for (const float x : out) ASSERT_NEAR(x, 0.25f, 0.01f);
}

TEST(Hpp, LayersMayHaveOtherShapes) {
    const auto context = ta::Context::create();
    const ta::LayerGroup wide[] = {{.first = 1, .kv_heads = 1, .head_dim = 128, .v_head_dim = 96}};
    const std::vector<uint8_t> bits{8, 4, 2};
    std::vector<float> offset(2 * 64 + 128, 0.125f);
    ta::PoolOptions options{.layers = 2,
                            .kv_heads = 2,
                            .head_dim = 64,
                            .k_bits = bits,
                            .v_bits = bits,
                            .budget_bytes = 1 << 20,
                            .numerics = {.k_offset = offset},
                            .layer_groups = wide};
    const auto pool = context.create_pool(options);
    const ta_kv_pool_description what = pool.describe();
    EXPECT_EQ(what.layer_groups[0].kv_heads, 1u);
    EXPECT_EQ(what.layer_groups[0].head_dim, 128u);
    EXPECT_EQ(what.layer_groups[0].v_head_dim, 96u);
    EXPECT_EQ(what.k_bits[2], 2);
    EXPECT_EQ(what.numerics->k_offset[2 * 64 + 127], 0.125f);
    const auto seq = pool.create_sequence();
    const auto plan = pool.create_plan();
    std::vector<float> k(100 * 128, 0.5f), v(100 * 128, 0.25f), q(100 * 2 * 128, 0.1f), out(q.size());
    auto step = plan.begin(seq, 100);
    step.append(0, ta::View(k.data(), 100, 2, 64), ta::View(v.data(), 100, 2, 64));
    step.attend(0, ta::View(q.data(), 100, 4, 64), ta::View(out.data(), 100, 4, 64));
    for (const float x : out) ASSERT_NEAR(x, 0.25f, 0.01f);
    EXPECT_EQ(status_of([&] { step.append(1, ta::View(k.data(), 100, 2, 64), ta::View(v.data(), 100, 2, 64)); }), TA_E_SHAPE);
    step.append(1, ta::View(k.data(), 100, 1, 128), ta::View(v.data(), 100, 1, 96));
    std::fill(out.begin(), out.end(), 0.0f);
    step.attend(1, ta::View(q.data(), 100, 2, 128), ta::View(out.data(), 100, 2, 96));
    step.end();
    for (size_t i = 0; i < 100 * 2 * 96; ++i) ASSERT_NEAR(out[i], 0.25f, 0.01f);

    const std::vector<uint8_t> one_too_many(4, 4);
    options.k_bits = one_too_many;
    EXPECT_EQ(status_of([&] { context.create_pool(options); }), TA_E_SHAPE);
    options.k_bits = bits;
    offset.push_back(0);
    options.numerics.k_offset = offset;
    EXPECT_EQ(status_of([&] { context.create_pool(options); }), TA_E_SHAPE);
}

TEST(Hpp, BlocksAreForgottenRetainedDescribed) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    feed(plan, seq, 200);
    EXPECT_EQ(seq.forget(60, 100), 64);  // of block 1, the only whole one
    EXPECT_EQ(seq.forget(0, 192), 128);  // of blocks 0 and 2
    EXPECT_EQ(seq.residency().dropped_blocks, 3u);
    EXPECT_EQ(seq.residency().device_blocks, 1u);
    EXPECT_EQ(seq.length(), 200);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.forget(0, 201)); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.forget(-1, 1)); }), TA_E_INVALID);
    feed(plan, seq, 100);  // to the end of block 3, and 44 tokens of block 4
    seq.pin(3, 1);
    seq.retain(3, 1, {.priority = 50, .duration_ms = 1 << 30});
    EXPECT_EQ(status_of([&] { seq.retain(3, 2); }), TA_E_STATE);  // not full
    EXPECT_EQ(status_of([&] { seq.retain(3, 3); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { seq.retain(3, 1, {.priority = 64}); }), TA_E_INVALID);
    const std::vector<ta_block_info> blocks = seq.describe_blocks(2, 3);
    ASSERT_EQ(blocks.size(), 3u);
    EXPECT_EQ(blocks[0].flags, TA_BLOCK_DROPPED);
    EXPECT_EQ(blocks[0].owners, 0u);
    EXPECT_EQ(blocks[1].flags, 0);
    EXPECT_EQ(blocks[1].tier, TA_TIER_DEVICE);
    EXPECT_EQ(blocks[1].bytes, pool.stats().channel_block_bytes);
    EXPECT_EQ(blocks[1].owners, 1u);
    EXPECT_EQ(blocks[1].pins, 1u);
    EXPECT_EQ(blocks[1].priority, 50u);
    EXPECT_GT(blocks[1].retained_ms, 1 << 29);
    EXPECT_EQ(blocks[2].flags, TA_BLOCK_OPEN);
    EXPECT_EQ(blocks[2].priority, 32u);
    EXPECT_EQ(blocks[2].retained_ms, -1);
    seq.retain(3, 1);
    EXPECT_EQ(seq.describe_blocks(3, 1).at(0).priority, 32u);
    EXPECT_TRUE(seq.describe_blocks(5, 0).empty());
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.describe_blocks(3, 3)); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.describe_blocks(0, UINT64_MAX)); }), TA_E_INVALID);
}

TEST(Hpp, SequencesAreShifted) {
    const std::vector<double> angles(kLayers * kDim / 2, 0.0);  // which turn nothing
    const std::vector<int64_t> last{199}, before{100}, two{198, 199};
    auto options = shape();
    options.rotary = {.pairs = TA_ROTARY_ADJACENT, .channels = kDim, .angles = angles};
    const auto context = ta::Context::create();
    const auto pool = context.create_pool(options);
    const ta_kv_pool_description what = pool.describe();
    ASSERT_NE(what.rotary, nullptr);
    EXPECT_EQ(what.rotary->pairs, TA_ROTARY_ADJACENT);
    EXPECT_EQ(what.rotary->channels, kDim);
    EXPECT_EQ(what.rotary->layers, kLayers);
    EXPECT_EQ(std::vector<double>(what.rotary->angles, what.rotary->angles + angles.size()), angles);

    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    feed(plan, seq, 200);
    const auto fork = seq.fork();
    const auto ask = [&](const ta::Sequence& of, std::span<const int64_t> at) {
        auto q = numbers(kRow, 1), out = q;
        auto step = plan.begin(of, 0, 1, {.query_positions = at});
        step.attend(0, view(q), view(out));
        step.end();
        return out;
    };
    const std::vector<float> all = ask(seq, last);
    static_cast<void>(ask(seq, before));
    seq.shift(64, 64);
    EXPECT_EQ(fork.forget(64, 64), 64);
    const std::vector<float> shifted = ask(seq, last), forgotten = ask(fork, last);
    EXPECT_NE(shifted, all);
    for (size_t i = 0; i < shifted.size(); ++i) ASSERT_NEAR(shifted[i], forgotten[i], 1e-5f);
    EXPECT_EQ(seq.length(), 200);
    EXPECT_EQ(status_of([&] { ask(seq, before); }), TA_E_STATE);  // in the gap
    EXPECT_EQ(status_of([&] { ask(seq, two); }), TA_E_INVALID);   // of one query
    EXPECT_EQ(status_of([&] { seq.shift(60, 64); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { seq.shift(64, 192); }), TA_E_INVALID);

    options.rotary->angles = std::span(angles).first(kDim / 2);  // one layer for all
    EXPECT_EQ(context.create_pool(options).describe().rotary->layers, 1u);
    options.rotary->angles = std::span(angles).first(3);
    EXPECT_EQ(status_of([&] { context.create_pool(options); }), TA_E_SHAPE);
    options.rotary.reset();
    const auto plain = context.create_pool(options);
    EXPECT_EQ(plain.describe().rotary, nullptr);
    EXPECT_EQ(status_of([&] { plain.create_sequence().shift(0, 0); }), TA_E_UNSUPPORTED);
}

TEST(Hpp, DraftsAreKeptInPart) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence(), other = pool.create_sequence();
    const std::vector<int32_t> tree{-1, 0, 0, -1, 0};
    const ta::StepOptions options{.wait_ms = -1, .drafts = TA_ON, .tree_parent = tree};
    EXPECT_EQ(status_of([&] { plan.begin(seq, 2, -1, options); }), TA_E_INVALID);  // five parents
    auto step = plan.begin({{seq, 3}, {other, 2}}, options);
    auto kv = numbers(5 * kRow, 1);
    for (uint32_t layer = 0; layer < kLayers; ++layer) step.append(layer, view(kv), view(kv));
    EXPECT_EQ(status_of([&] { step.end(std::array{1}); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { step.end(); }), TA_E_INVALID);  // no chain
    step.end(std::array{3, 0});                               // the first token and its second child
    EXPECT_EQ(seq.length(), 2);
    EXPECT_EQ(other.length(), 0);
}

TEST(Hpp, DenseMergedCalibrated) {
    const auto context = ta::Context::create();
    auto q = numbers(8 * kRow, 1), k = numbers(32 * kRow, 2), v = numbers(32 * kRow, 3), out = q, half = q, other = q;
    std::vector<float> lse(16), half_lse(16), other_lse(16);
    const ta::DenseOptions full{.attend = {.mask = TA_MASK_FULL}};
    context.attend_dense(view(q), view(k), view(v), view(out), lse.data(), full);
    const auto part = [&](std::vector<float>& x, int64_t first) {
        return ta::View<const float>(x.data() + first * kRow, 16, kHeads, kDim);
    };
    context.attend_dense(view(q), part(k, 0), part(v, 0), view(half), half_lse.data(), full);
    context.attend_dense(view(q), part(k, 16), part(v, 16), view(other), other_lse.data(), full);
    auto merged = q;
    const std::array<ta::Input, 2> parts{view(half), view(other)};
    const std::array<const float*, 2> lses{half_lse.data(), other_lse.data()};
    context.merge_states(parts, lses, view(merged));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(merged[i], out[i], 0.02f);
    EXPECT_EQ(status_of([&] { context.merge_states(parts, {}, view(merged)); }), TA_E_INVALID);

    const auto calibrator = context.create_calibrator(1, kHeads, kDim);
    calibrator.observe(0, view(k), view(v));
    const auto map = calibrator.finish(1);
    EXPECT_EQ(map.k_bits[0] + map.k_bits[1], 6);
    EXPECT_EQ(map.v_priority.size(), 2u);
    constexpr float kNever = std::numeric_limits<float>::infinity();
    const std::vector<float> k_costs{0, 3, 4, kNever, 0, 1}, v_costs{1, 0, 4, 2, 1, 0};
    const auto chosen = calibrator.choose(k_costs, v_costs, 1 << 30);
    EXPECT_EQ(chosen.k_bits, (std::vector<uint8_t>{8, 4}));
    EXPECT_EQ(chosen.v_bits, (std::vector<uint8_t>{4, 2}));
    EXPECT_EQ(status_of([&] { calibrator.choose(k_costs, v_costs, 1); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { calibrator.choose({}, v_costs, 1 << 30); }), TA_E_INVALID);
}

TEST(Hpp, Groups) {
    constexpr uint32_t kRanks = 2;
    const auto id = ta::Group::make_id(TA_GROUP_LOCAL);
    ta::NamespaceOptions tenant;
    tenant.salt.fill(9);
    const std::array<ta::Key, 1> keys{};
    std::vector<float> outputs[kRanks];
    std::barrier both(kRanks);
    const auto run = [&](uint32_t rank) {
        const auto context = ta::Context::create({.threads = 1});
        const auto group = context.create_group({.rank = rank, .ranks = kRanks, .id = id});
        const auto pool = context.create_pool(shape());
        const auto plan = pool.create_plan();
        ASSERT_EQ(group.wait(), TA_GROUP_READY);
        EXPECT_EQ(group.info().ranks, kRanks);
        EXPECT_EQ(group.peer(1 - rank).route, TA_ROUTE_HOST_MEMORY);
        group.health();
        EXPECT_GE(group.descriptor(), 0);

        const auto space = pool.create_namespace(tenant);
        space.join(group);
        if (rank == 0) {
            const auto seq = pool.create_sequence();
            feed(plan, seq, 100);
            seq.publish(space, keys);
            const auto sent = seq.send(group, 1, 5);
            EXPECT_EQ(sent.wait().state, TA_MOVE_DONE);
            EXPECT_EQ(sent.query().blocks, 2u);
            EXPECT_EQ(group.take_finished(SIZE_MAX).at(0), sent.ticket());
            group.receive(pool, 1, 99).cancel();
        } else {
            auto transfer = group.receive(pool, 0, 5);
            EXPECT_EQ(transfer.take().length(), 100);
            EXPECT_EQ(status_of([&] { transfer.take(); }), TA_E_STATE);
            while (space.lookup(group, keys, std::chrono::seconds(10))[0].answer != TA_PREFIX_YES) std::this_thread::yield();
            EXPECT_EQ(space.fetch(group, keys).wait().length, 64);
            EXPECT_EQ(space.match(keys).length, 64);
        }
        const auto spread = pool.create_sequence();
        spread.partition(group, {.tag = 3});
        outputs[rank] = feed(plan, spread, 200);
        auto last = group.receive(pool, 1 - rank, 1000 + rank);
        EXPECT_EQ(status_of([&] { last.take(std::chrono::milliseconds(1)); }), TA_E_TIMEOUT);
        both.arrive_and_wait();
        space.leave(group);
        both.arrive_and_wait();
        group.abort();
        const ta_status ended = status_of([&] { group.health(); });
        EXPECT_TRUE(ended == TA_E_CANCELLED || ended == TA_E_PEER_LOST);
    };
    std::thread other(run, 1u);
    run(0);
    other.join();
    EXPECT_EQ(outputs[0], outputs[1]);
}

TEST(Hpp, ThreadsShareAPool) {
    const auto pool = ta::Context::create({.threads = 2}).create_pool(shape());
    const auto first = pool.create_sequence();
    feed(pool.create_plan(), first, 130);
    const auto alone = [&] { return feed(pool.create_plan(), first.fork(), 10, 7); }();
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([pool, &first, &alone, &wrong] {
            const auto plan = pool.create_plan();
            for (int round = 0; round < 20; ++round) wrong += feed(plan, first.fork(), 10, 7) != alone;
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(pool.stats().sequences, 1u);
}

TEST(Hpp, APoolIsClosedWhileThreadsUseIt) {
    const auto context = ta::Context::create({.threads = 2});
    for (int round = 0; round < 10; ++round) {
        const auto pool = context.create_pool(shape());
        std::vector<std::thread> threads;
        std::atomic<int> steps = 0, closed = 0;
        for (int i = 0; i < 3; ++i) {
            threads.emplace_back([pool, &steps, &closed] {
                const ta_status status = status_of([&] {
                    for (const auto plan = pool.create_plan();; ++steps) feed(plan, pool.create_sequence(), 10);
                });
                closed += status == TA_E_CLOSED;
            });
        }
        while (steps < 10 + round) std::this_thread::yield();
        pool.close();
        for (auto& thread : threads) thread.join();
        EXPECT_EQ(closed, 3);
    }
}

TEST(Hpp, AChildProcessIsRefused) {
    const auto context = ta::Context::create();
    const auto pool = context.create_pool(shape());
    auto seq = std::make_optional(pool.create_sequence());
    auto step = std::make_optional(pool.create_plan().begin(*seq, 1));
    const pid_t child = fork();
    if (child == 0) {
        bool right = status_of([&] { pool.create_sequence(); }) == TA_E_FORKED;
        right = right && status_of([&] { static_cast<void>(seq->length()); }) == TA_E_FORKED;
        step.reset(), seq.reset();
        right = right && ta::Context::create().create_pool(shape()).create_sequence().length() == 0;
        _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(seq->length(), 0);
}

// A million steps of a sequence that is cut back again and again take no more memory than the first thousand.
TEST(Hpp, AMillionStepsTakeConstantMemory) {
    const auto resident = [] {
        long pages = 0, ignored = 0;
        std::FILE* file = std::fopen("/proc/self/statm", "r");
        const bool read = file && std::fscanf(file, "%ld %ld", &ignored, &pages) == 2;
        if (file) std::fclose(file);
        return read ? pages * sysconf(_SC_PAGESIZE) : 0L;
    };
    const auto context = ta::Context::create({.threads = 1});
    const auto pool = context.create_pool({.layers = 1, .kv_heads = 1, .head_dim = 64, .bits = 8, .budget_bytes = 1 << 20});
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    auto x = numbers(64, 1), out = x;
    const ta::View<float> one(x.data(), 1, 1, 64), result(out.data(), 1, 1, 64);
    const char* given = std::getenv("TA_STEPS");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const bool sanitized = true;  // which keep freed memory for a while
#else
    const bool sanitized = false;
#endif
    const long steps = given ? std::atol(given) : sanitized ? 20000 : 1000000;
    long before = 0;
    uint64_t bytes_before = 0;
    for (long i = 0; i < steps; ++i) {
        if (i == 1000) before = resident(), bytes_before = context.info().bytes_in_use;
        auto step = plan.begin(seq, 1);
        step.append(0, one, one);
        if (i % 16 == 0) step.attend(0, one, result);
        step.end();
        if (i % 128 == 127) seq.truncate(0);
        if (i % 1000 == 999) seq.fork();
    }
    if (!sanitized) {
        EXPECT_LT(resident() - before, 1 << 20);
    }
    EXPECT_LE(context.info().bytes_in_use, bytes_before + (1 << 16));
}

}  // namespace
