// Scripts on the disk tier in which every file operation fails, once and from then on, in every way: no crash, hang, leak or
// wrong byte, and afterwards everything that was acknowledged.
#include <gtest/gtest.h>

#include <algorithm>

#include "tiering/disk/model.h"

namespace ta {
namespace {

using namespace std::chrono_literals;
using testing::DiskModel;
using testing::Fault;
using testing::FaultyFiles;
using testing::Folder;

constexpr std::chrono::milliseconds kDeadline = 10ms, kRetry = 2ms;
// A machine that is busy with sanitizers and other tests may take longer than that for an operation that does not stall.
constexpr std::chrono::milliseconds kPatience = 5000ms;

// Sanitizers make a run several times as slow; there every third or fifth operation has to do.
#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kStep = 3;
#elif defined(__SANITIZE_THREAD__)
constexpr uint64_t kStep = 5;
#else
constexpr uint64_t kStep = 1;
#endif

struct Run {
    using Clock = std::chrono::steady_clock;
    DiskModel model;
    std::shared_ptr<FaultyFiles> files;
    DiskTierOptions options;
    bool open() { return model.open(files, options); }
    // Also by threads that a stall left behind; as long as it lasts they stay.
    bool wait_until_closed(std::chrono::milliseconds patience) const {
        for (const auto end = Clock::now() + patience; files.use_count() > 1 && Clock::now() < end;)
            std::this_thread::sleep_for(200us);
        return files.use_count() == 1 && files->open_files() == 0;
    }
};

// Scripts. They stop early when a fault leaves nothing to go on with; what is acknowledged until then counts.
void write_and_read(Run& r) {
    if (!r.open()) return;
    r.model.add(6);
    r.model.write({0, 1, 2, 3, 4, 5});
    r.model.read_all();
}

void write_in_place(Run& r) {
    if (!r.open()) return;
    r.model.add(3);
    r.model.write({0, 1, 2});
    r.model.write({0, 2});
    r.model.write({2});
    r.model.read_all();
}

void release_and_reuse(Run& r) {
    if (!r.open()) return;
    r.model.add(5);
    r.model.write({0, 1, 2, 3, 4});
    r.model.release({0, 1, 3});
    r.model.add(4);
    r.model.write({5, 6, 7, 8});
    r.model.release({5});
    r.model.read_all();
}

void reopen(Run& r) {
    if (!r.open()) return;
    r.model.add(4);
    r.model.write({0, 1, 2, 3});
    r.model.tier.reset();
    if (!r.options.persistent) return;
    if (!r.wait_until_closed(50ms) || !r.open()) return;
    r.model.adopt_recovered();
    r.model.read_all();
    r.model.add(2);
    r.model.write({4, 5});
    r.model.tier.reset();
    if (!r.wait_until_closed(50ms) || !r.open()) return;
    r.model.adopt_recovered();
    r.model.read_all();
}

void flush_and_cancel(Run& r) {
    if (!r.open()) return;
    r.model.add(3);
    r.model.write({0, 1, 2});
    (void)r.model.tier->flush();
    testing::Collector collector;
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<DiskRequest> requests;
    for (size_t i = 0; i < 3; ++i) {
        if (r.model.blocks[i].must == 0) continue;
        bytes.emplace_back(r.model.tier->slot_bytes(r.model.blocks[i].slot.slot_class), uint8_t(0xee));
        requests.push_back(
            testing::read_request(r.model.blocks[i].slot, testing::make_identity(i, r.model.blocks[i].must), bytes.back()));
        requests.back().tag = i;
    }
    collector.expect(requests.size());
    Result<DiskBatch> batch = r.model.tier->submit(requests, collector);
    if (!batch.ok()) {
        collector.expect(-requests.size());
        return;
    }
    r.model.tier->cancel(batch.value());
    EXPECT_TRUE(collector.wait());
    for (const DiskRequest& q : requests) {
        const bool ok = collector.take(q.tag).status.ok();
        const auto expected = ok ? testing::make_bytes(q.identity, q.bytes) : std::vector<uint8_t>(q.bytes, 0xee);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), q.memory));
    }
    r.model.read_all();
}

// Once the fault is over, the tier serves as if nothing had been.
void recover(Run& r) {
    if (!r.open()) return;
    r.model.add(3);
    r.model.write({0, 1, 2});
    r.files->heal();
    for (int i = 0; i < 5000 && r.model.tier->stats().in_flight > 0; ++i) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(kRetry + 1ms);
    if (r.model.blocks[0].slot.index == Slot::kNone) return;
    // On a busy machine a healthy operation may miss the short deadline of a run with stalls.
    const auto all_written = [&] {
        return std::all_of(r.model.blocks.begin(), r.model.blocks.end(), [](const auto& b) { return b.must != 0; });
    };
    for (int i = 0; i < 100 && (i == 0 || (r.options.deadline == kDeadline && !all_written())); ++i) {
        r.model.write({0, 1, 2});
        std::this_thread::sleep_for(kRetry);
    }
    for (size_t i = 0; i < 3; ++i)
        EXPECT_NE(r.model.blocks[i].must, 0u) << testing::is_ok(r.model.why).message() << r.model.tier->health().reason;
    r.model.read_all();
}

struct Script {
    const char* name;
    void (*run)(Run&);
};
constexpr Script kScripts[] = {{"write_and_read", write_and_read},       {"write_in_place", write_in_place},
                               {"release_and_reuse", release_and_reuse}, {"reopen", reopen},
                               {"flush_and_cancel", flush_and_cancel},   {"recover", recover}};

struct Setting {
    Script script;
    bool uring, persistent;
    bool nameless = true;  // files without a name: where there are none, a persistent one is made otherwise
};
void PrintTo(const Setting& s, std::ostream* out) {
    *out << s.script.name << (s.uring ? " io_uring" : " threads") << (s.persistent ? " persistent" : " anonymous")
         << (s.nameless ? "" : " by name");
}

// Returns how many file operations the script did.
uint64_t run_script(const Setting& setting, Fault fault, uint64_t at, bool forever) {
    Folder folder;
    Run run;
    run.files = std::make_shared<FaultyFiles>(fault, at, forever);
    run.files->has_nameless = setting.nameless;
    run.options.persistent = setting.persistent;
    run.options.path = setting.persistent ? folder.file("tier") : folder.path();
    run.options.budget = 130000;
    run.options.use_uring = setting.uring;
    run.options.threads = 2;
    run.options.buffer_bytes = 64000;
    run.options.deadline = fault == Fault::kStall ? kDeadline : kPatience;
    run.options.retry_after = kRetry;
    setting.script.run(run);
    run.model.tier.reset();
    run.files->heal();
    EXPECT_TRUE(run.wait_until_closed(20s)) << "a file is still open";
    const uint64_t operations = run.files->operations();
    if (!setting.persistent) {
        // With unlink failing a nameless file keeps its name; nothing else may leave one.
        EXPECT_EQ(folder.entries(), 0u);
        return operations;
    }
    run.files = std::make_shared<FaultyFiles>();
    run.files->has_nameless = setting.nameless;
    run.options.deadline = kPatience;
    const bool opened = run.open();
    EXPECT_TRUE(opened) << testing::is_ok(run.model.why).message();
    if (opened) run.model.judge();
    EXPECT_EQ(folder.entries(), 1u);
    return operations;
}

class DiskFaults : public ::testing::TestWithParam<Setting> {};

TEST_P(DiskFaults, EveryOperationFailsOnceAndFromThenOn) {
    const uint64_t operations = run_script(GetParam(), Fault::kNone, 0, false);
    ASSERT_GT(operations, 5u);
    uint64_t runs = 0;
    for (const Fault fault : testing::kFaults) {
        for (const bool forever : {false, true}) {
            // A stall takes its deadline each time, and operations in a row stall alike.
            const uint64_t step = fault == Fault::kStall ? std::max(kStep, uint64_t{7}) : kStep;
            for (uint64_t at = uint64_t(fault) % step; at < operations; at += step) {
                SCOPED_TRACE(std::string(testing::name_of(fault)) + (forever ? " from operation " : " at operation ") +
                             std::to_string(at));
                run_script(GetParam(), fault, at, forever);
                ++runs;
                if (HasFailure()) return;
            }
        }
    }
    RecordProperty("runs", int(runs));
}

std::vector<Setting> settings() {
    std::vector<Setting> all;
    for (const Script& script : kScripts) {
        for (const bool uring : {true, false}) {
            for (const bool persistent : {true, false}) all.push_back({script, uring, persistent});
        }
    }
    all.push_back({kScripts[3], false, true, false});
    return all;
}

INSTANTIATE_TEST_SUITE_P(Scripts, DiskFaults, ::testing::ValuesIn(settings()), [](const auto& setting) {
    return std::string(setting.param.script.name) + (setting.param.uring ? "_uring" : "_threads") +
           (setting.param.persistent ? "_persistent" : "_anonymous") + (setting.param.nameless ? "" : "_by_name");
});

}  // namespace
}  // namespace ta
