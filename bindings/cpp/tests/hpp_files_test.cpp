// turboattention.hpp: files, exports, and what callbacks may do.
#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory_resource>

#include "hpp_steps.h"

namespace hpp_tests {
namespace {

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

}  // namespace
}  // namespace hpp_tests
