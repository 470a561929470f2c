// turboattention.hpp: threads, forks, signals, memory of a process that runs long.
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>

#include "hpp_steps.h"

namespace hpp_tests {
namespace {

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

volatile sig_atomic_t g_signals = 0;

// Signals interrupt system calls of the library (EINTR); what it does is the same.
TEST(Hpp, SignalsChangeNothing) {
    const Folder folder;
    const auto pool = [&] {
        auto options = shape();
        options.tiers = {.disk_bytes = 64 << 20, .disk_folder = folder.path.c_str()};
        return ta::Context::create({.threads = 1}).create_pool(options);
    }();
    const auto seq = pool.create_sequence();
    feed(pool.create_plan(), seq, 500);
    const auto next = [&](const ta::Sequence& s) { return feed(pool.create_plan(), s.fork(), 1, 7); };
    const auto want = next(seq);

    struct sigaction count = {}, before = {};
    count.sa_handler = [](int) { g_signals = g_signals + 1; };  // without SA_RESTART
    ASSERT_EQ(sigaction(SIGALRM, &count, &before), 0);
    const itimerval often{{0, 100}, {0, 100}}, never{};
    setitimer(ITIMER_REAL, &often, nullptr);
    for (int i = 0; i < 10; ++i) {
        const std::string file = folder.file(std::to_string(i).c_str());
        seq.save(file.c_str());
        EXPECT_EQ(next(pool.load_sequence(file.c_str())), want);
        EXPECT_EQ(seq.move(TA_TIER_DISK, 1, 6).wait().state, TA_MOVE_DONE);
        EXPECT_EQ(next(seq), want);
    }
    setitimer(ITIMER_REAL, &never, nullptr);
    sigaction(SIGALRM, &before, nullptr);
    EXPECT_GT(g_signals, 10);
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
}  // namespace hpp_tests
