// Every scenario with every operation failing: the k-th allocation, file operation or copy, once and from then on. No crash,
// hang, leak or wrong byte; a call that fails has changed nothing, and afterwards all goes on. TA_FAULTS_ALL=1 takes every k,
// on plain memory and on the simulated device, with io_uring and without; else the k are spread. Each line that begins with
// "fault-matrix" is a row of the table in docs/testing.md.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "faults/scenarios.h"

namespace ta::testing {
namespace {

using Clock = std::chrono::steady_clock;

#if defined(__SANITIZE_ADDRESS__)
constexpr int kSlower = 4;
#elif defined(__SANITIZE_THREAD__)
constexpr int kSlower = 8;
#else
constexpr int kSlower = 1;
#endif

// Ends the program when a case takes longer than anything in it may.
class Watchdog {
  public:
    Watchdog() : thread_([this] { watch(); }) {}
    ~Watchdog() {
        stop_ = true;
        thread_.join();
    }
    void start_case(const std::string& what) {
        std::lock_guard lock(mutex_);
        what_ = what;
        started_ = Clock::now();
    }

  private:
    void watch() {
        while (!stop_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            std::lock_guard lock(mutex_);
            if (Clock::now() - started_ < std::chrono::seconds(60)) continue;
            std::fprintf(stderr, "hangs: %s\n", what_.c_str());
            std::abort();
        }
    }
    std::mutex mutex_;
    std::string what_;
    Clock::time_point started_ = Clock::now();
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

// How many k of a kind are tried, each once and from then on.
uint64_t tries(FaultKind kind, const Scenario& scenario) {
    if (std::getenv("TA_FAULTS_ALL")) return UINT64_MAX;
    uint64_t n = scenario.shape.persistent ? 6 : 12;  // each run of a persistent disk opens three pools
    if (kind == FaultKind::kNew) n *= 2;
    if (kind == FaultKind::kStall || kind == FaultKind::kCopyLate) n = 6;
    return std::max<uint64_t>(n / kSlower, 2);
}

class Faults : public ::testing::TestWithParam<int> {
  protected:
    const Scenario& scenario() const { return scenarios()[size_t(GetParam())]; }

    // The operations of the kind that the script made, and in `failures` calls and moves that failed.
    uint64_t run(const FaultPlan& fault, bool on_device, bool uring, uint64_t& failures) {
        const std::string what = std::string(scenario().name) + ": " + name_of(fault.kind) + " at operation " +
                                 std::to_string(fault.at) + (fault.forever ? " and all after it" : "") +
                                 (on_device ? ", simulated device" : "") + (uring ? "" : ", no io_uring");
        SCOPED_TRACE(what);
        watchdog_.start_case(what);
        World world(scenario().shape, inputs_, &reference_, fault, on_device, uring);
        try {
            scenario().prepare(world);
            world.begin_faults();
            scenario().script(world);
        } catch (const LostPrefix&) {
            EXPECT_NE(fault.kind, FaultKind::kNone) << "published blocks are gone, and nothing failed";
            world.lost_prefix();
        } catch (const std::exception& e) {
            ADD_FAILURE() << e.what();
        }
        world.finish();
        failures += world.failures();
        return world.operations();
    }

    void sweep(FaultKind kind, bool on_device, bool uring) {
        uint64_t ignored = 0, failures[2] = {0, 0}, runs = 0;
        uint64_t operations = 0;  // threads race: not the same in each run
        for (int i = 0; i < 2; ++i) operations = std::max(operations, run({.counts = kind}, on_device, uring, ignored));
        const uint64_t stride = std::max<uint64_t>((operations + tries(kind, scenario()) - 1) / tries(kind, scenario()), 1);
        for (bool forever : {false, true}) {
            for (uint64_t at = 0; at < operations && !HasFailure(); at += stride) {
                run({.kind = kind, .at = at, .forever = forever}, on_device, uring, failures[forever]);
                ++runs;
            }
        }
        std::printf("fault-matrix | %s | %s | %llu | %llu | %llu | %llu |\n", scenario().name, name_of(kind),
                    (unsigned long long)operations, (unsigned long long)runs, (unsigned long long)failures[0],
                    (unsigned long long)failures[1]);
        std::fflush(stdout);
    }

    Watchdog watchdog_;
    Inputs inputs_;
    Reference reference_;
};

TEST_P(Faults, Sweep) {
    {
        World plain(scenario().shape, inputs_, nullptr, {}, false, false);
        scenario().prepare(plain);
        scenario().script(plain);
        plain.finish();
        reference_ = plain.take_record();
    }
    uint64_t failures = 0;
    for (const bool on_device : {false, true}) run({}, on_device, true, failures);
    ASSERT_EQ(failures, 0u) << "something fails by itself";
    ASSERT_FALSE(HasFailure());
    const char* only = std::getenv("TA_FAULTS_KIND");
    for (int k = 1; k < kFaultKinds && !HasFailure(); ++k) {
        const auto kind = FaultKind(k);
        if (only && std::string(only) != name_of(kind)) continue;
        const bool all = std::getenv("TA_FAULTS_ALL") != nullptr;
        for (const bool on_device : {false, true}) {
            for (const bool uring : {false, true}) {
                // Without the wish for all: copies on the device, and the engines take turns.
                const bool wanted = all || (on_device == is_copy(kind) && uring == ((k + GetParam()) % 2 == 0));
                if (wanted && (on_device || !is_copy(kind)) && !HasFailure()) sweep(kind, on_device, uring);
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, Faults, ::testing::Range(0, int(scenarios().size())),
                         [](const auto& i) { return std::string(scenarios()[size_t(i.param)].name); });

}  // namespace
}  // namespace ta::testing
