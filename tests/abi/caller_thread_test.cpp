// The effect of a call on the thread that makes it: the thread may be cancelled and its stack may be small.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "abi/every_call.h"

namespace ta::testing {
namespace {

// A thread that runs a body once, on a stack of its own if it is given one.
void run_thread(void* (*body)(void*), void* user, void* stack, size_t bytes, void** result) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (stack) {
        ASSERT_EQ(pthread_attr_setstack(&attributes, stack, bytes), 0);
    }
    pthread_t thread;
    ASSERT_EQ(pthread_create(&thread, &attributes, body, user), 0);
    pthread_attr_destroy(&attributes);
    ASSERT_EQ(pthread_join(thread, result), 0);
}

struct Cancelled {
    const std::function<ta_status(ta_error*)>& call;
    ta_status status = -1;
    ta_error err{};
    int state = -1;
    bool returned = false, ended_late = false;

    // Cancelled before the call: at the first cancellation point in it the thread would end.
    static void* body(void* user) {
        auto& c = *static_cast<Cancelled*>(user);
        pthread_cancel(pthread_self());
        c.status = c.call(&c.err);
        c.returned = true;
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &c.state);
        pthread_testcancel();
        c.ended_late = true;
        return nullptr;
    }
};

TEST(CallerThread, NoCallIsACancellationPoint) {
    make_every_call([](const char* name, const std::function<ta_status(ta_error*)>& call) {
        Cancelled c{call};
        void* result = nullptr;
        run_thread(Cancelled::body, &c, nullptr, 0, &result);
        EXPECT_TRUE(c.returned) << name;
        EXPECT_EQ(c.status, TA_OK) << name << ": " << c.err.message;
        EXPECT_EQ(c.state, PTHREAD_CANCEL_ENABLE) << name;
        EXPECT_FALSE(c.ended_late) << name;
        EXPECT_EQ(result, PTHREAD_CANCELED) << name;
    });
}

TEST(CallerThread, NorIsACallback) {
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, pool_options(1, 1, 64));
    const ta_seq seq = make_sequence(pool);
    const Folder folder;
    const std::function<ta_status(ta_error*)> save = [&](ta_error* err) {
        int before = -1;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        const ta_progress_fn cancels = [](void*, uint64_t, uint64_t) {
            pthread_testcancel();
            return 0;
        };
        const ta_status s = ta_seq_save(pool.get(), seq, folder.file("f").c_str(), ReportTo(cancels, nullptr), err);
        int after = -1;
        pthread_setcancelstate(before, &after);
        EXPECT_EQ(after, PTHREAD_CANCEL_DISABLE);  // as the caller had it
        return s;
    };
    Cancelled c{save};
    void* result = nullptr;
    run_thread(Cancelled::body, &c, nullptr, 0, &result);
    EXPECT_EQ(c.status, TA_OK) << c.err.message;
    EXPECT_EQ(result, PTHREAD_CANCELED);
}

// Whoever lets a thread be cancelled anywhere has it end where a call returns.
void make_asynchronous() {
    int before;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
}

TEST(CallerThread, AsynchronousCancellationInACallEndsTheThreadBehindIt) {
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, pool_options(1, 1, 64));
    const Folder folder;
    struct Saving {
        ta_kv_pool* pool;
        ta_seq seq;
        std::string path;
        bool returned = false;

        static void* body(void* user) {
            auto& s = *static_cast<Saving*>(user);
            auto progress = sized<ta_progress>();
            progress.report = [](void*, uint64_t, uint64_t) {
                pthread_cancel(pthread_self());
                return 0;
            };
            make_asynchronous();
            ta_seq_save(s.pool, s.seq, s.path.c_str(), &progress, nullptr);
            s.returned = true;
            return nullptr;
        }
    } saving{pool.get(), make_sequence(pool), folder.file("f")};
    void* result = nullptr;
    run_thread(Saving::body, &saving, nullptr, 0, &result);
    EXPECT_EQ(result, PTHREAD_CANCELED);
    EXPECT_FALSE(saving.returned);
    ta_seq loaded = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_load(pool.get(), saving.path.c_str(), nullptr, &loaded, &err), TA_OK) << err.message;
}

TEST(CallerThread, AsynchronousCancellationAtAnyInstruction) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the functions of sanitizers cannot be left anywhere";
#endif
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, pool_options(1, 1, 64));
    struct Looping {
        ta_kv_pool* pool;
        std::atomic<bool> started{false};

        static void* body(void* user) {
            auto& l = *static_cast<Looping*>(user);
            make_asynchronous();
            for (;;) {
                ta_seq seq = 0;
                ta_seq_create(l.pool, &seq, nullptr);
                ta_seq_truncate(l.pool, seq, 0, nullptr);
                ta_seq_release(l.pool, seq, nullptr);
                ta_calibrator_destroy(nullptr);
                l.started = true;
            }
        }
    };
    Random random(3);
    for (int round = 0; round < 300; ++round) {
        Looping looping{pool.get()};
        pthread_t thread;
        ASSERT_EQ(pthread_create(&thread, nullptr, Looping::body, &looping), 0);
        while (!looping.started) sched_yield();
        for (volatile int64_t left = random.below(20000); left > 0;) left = left - 1;
        pthread_cancel(thread);
        void* result = nullptr;
        ASSERT_EQ(pthread_join(thread, &result), 0);
        ASSERT_EQ(result, PTHREAD_CANCELED);
    }
    EXPECT_LE(stats(pool).sequences, 300u);  // a thread may end with an id
}

// ------------------------------------------------------------------------------------------------------------------ stack

// A stack above a page that nobody may touch, filled with a pattern: how deep it was used shows.
class PaintedStack {
  public:
    PaintedStack() {
        EXPECT_NE(memory_, MAP_FAILED);
        EXPECT_EQ(mprotect(memory_, kGuard, PROT_NONE), 0);
    }
    ~PaintedStack() { munmap(memory_, kGuard + kBytes); }
    PaintedStack(const PaintedStack&) = delete;
    PaintedStack& operator=(const PaintedStack&) = delete;

    uint8_t* stack() const { return memory_ + kGuard; }
    // All of it below `from`, where nobody's frames are.
    void paint(uint8_t* from) const {
        for (volatile uint8_t* p = stack(); p < from; ++p) *p = kPaint;
    }
    const uint8_t* lowest_used() const {
        return std::find_if(stack(), stack() + kBytes, [](uint8_t b) { return b != kPaint; });
    }

    static constexpr size_t kGuard = 4096, kBytes = size_t{512} << 10;

  private:
    static constexpr uint8_t kPaint = 0xa7;
    uint8_t* const memory_ =
        static_cast<uint8_t*>(mmap(nullptr, kGuard + kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
};

struct Measured {
    const std::function<ta_status(ta_error*)>& call;
    const PaintedStack& stack;
    ta_status status = -1;
    ta_error err{};
    size_t used = 0;

    static void* body(void* user) {
        auto& m = *static_cast<Measured*>(user);
        auto* const here = static_cast<uint8_t*>(__builtin_frame_address(0));
        m.stack.paint(here - 1024);
        m.status = m.call(&m.err);
        m.used = size_t(here - m.stack.lowest_used());
        return nullptr;
    }
};

class StackNeedOfCalls : public ::testing::TestWithParam<std::pair<ta_cpu_isa, uint32_t>> {};

TEST_P(StackNeedOfCalls, NoCallTakesMoreThan32KiBOfItsCallersStack) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
    GTEST_SKIP() << "sanitizers and unoptimised code take more stack";
#endif
    const auto [isa, head_dim] = GetParam();
    const std::vector<ta_cpu_isa> here = available_isas();
    if (std::find(here.begin(), here.end(), isa) == here.end()) GTEST_SKIP() << "this CPU lacks the instruction set";
    size_t most = 0;
    std::string deepest;
    make_every_call(
        [&](const char* name, const std::function<ta_status(ta_error*)>& call) {
            const PaintedStack stack;
            Measured m{call, stack};
            void* result = nullptr;
            run_thread(Measured::body, &m, stack.stack(), PaintedStack::kBytes, &result);
            EXPECT_EQ(m.status, TA_OK) << name << ": " << m.err.message;
            EXPECT_LE(m.used, size_t{32} << 10) << name;
            if (m.used > most) most = m.used, deepest = name;
        },
        head_dim, isa);
    std::printf("deepest: %s, %zu bytes\n", deepest.c_str(), most);
}

// Begins that make room by taking bits from blocks, and begins that look for universal scales.
TEST(StackNeed, ABeginWithMuchToDoTakesNoMoreThan32KiB) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
    GTEST_SKIP() << "sanitizers and unoptimised code take more stack";
#endif
    const Context context = make_context(1);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 64 << 20;
    tiers.falling_precision = TA_ON;
    for (const ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        auto numerics = sized<ta_numerics>();
        numerics.profile = profile;
        numerics.sink_blocks = -1;
        auto options = pool_options(2, 2, 128, 8, &numerics);
        options.budget_bytes = 1 << 20;
        options.tiers = &tiers;
        const KvPool pool = make_pool(context, options);
        const Plan plan = make_plan(pool);
        std::vector<ta_seq> seqs;
        for (int i = 0; i < 12; ++i) seqs.push_back(make_sequence(pool));
        for (int round = 0; round < 2; ++round) {
            for (const ta_seq seq : seqs) {
                constexpr int32_t kNew = 120;
                ta_error err;
                if (round > 0) require(ta_seq_truncate(pool.get(), seq, length(pool, seq) - 10, &err), err);
                const PaintedStack stack;
                const std::function<ta_status(ta_error*)> call = [&](ta_error* e) {
                    return ta_plan_begin(plan.get(), 1, &seq, &kNew, nullptr, nullptr, e);
                };
                Measured m{call, stack};
                void* result = nullptr;
                run_thread(Measured::body, &m, stack.stack(), PaintedStack::kBytes, &result);
                EXPECT_LE(m.used, size_t{32} << 10) << "profile " << profile << ", round " << round;
                ASSERT_EQ(m.status, TA_OK) << m.err.message;
                Tensor k(std::vector<float>(kNew * 256, 1.0f), kNew, 2, 128),
                    v(std::vector<float>(kNew * 256, 1.0f), kNew, 2, 128);
                for (uint32_t layer = 0; layer < 2; ++layer) append(plan, layer, k, v);
                end(plan);
            }
        }
        EXPECT_GT(tier_stats(pool, TA_TIER_DEVICE).evicted_blocks, 0u) << "nothing had to go";
    }
}

INSTANTIATE_TEST_SUITE_P(Kernels, StackNeedOfCalls,
                         ::testing::Values(std::pair(TA_CPU_ISA_SCALAR, 128u), std::pair(TA_CPU_ISA_AVX2, 256u),
                                           std::pair(TA_CPU_ISA_AVX_VNNI, 256u), std::pair(TA_CPU_ISA_AVX512, 64u),
                                           std::pair(TA_CPU_ISA_AVX512, 256u), std::pair(TA_CPU_ISA_AMX, 256u)));

}  // namespace
}  // namespace ta::testing
