// kill -9 at any moment: a child writes, overwrites and releases blocks and notes in a file what was acknowledged; after its
// death a persistent tier must have all of that, whole, and nothing that was never written.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <random>

#include "tiering/disk/model.h"

namespace ta {
namespace {

using testing::Collector;
using testing::Folder;
using testing::is_ok;
using testing::make_bytes;
using testing::make_identity;
using testing::read_block;
using testing::write_request;

constexpr size_t kBlocks = 24;

// Of a block, seen by the parent after the child's death. Contents count up; 0: none.
struct Note {
    std::atomic<uint64_t> begun;         // the newest content whose writing was begun
    std::atomic<uint64_t> acknowledged;  // the newest content that is owed; 0 as soon as it may be gone
};
struct Notes {
    Note blocks[kBlocks];
    std::atomic<uint64_t> oldest[kBlocks];  // contents before this one were gone for certain when the child began
    std::atomic<uint64_t> operations;
};

DiskTierOptions options(const std::string& path, bool uring) {
    DiskTierOptions o;
    o.persistent = true;
    o.path = path;
    o.budget = 600000;
    o.slot_bytes[0] = 12000;
    o.slot_bytes[1] = 5000;
    o.fingerprint = 3;
    o.use_uring = uring;
    o.threads = 2;
    return o;
}

// The work of the child until it is killed.
[[noreturn]] void work(const std::string& path, bool uring, uint64_t seed, Notes& notes) {
    Result<std::unique_ptr<DiskTier>> opened = DiskTier::open(system_files(), options(path, uring));
    if (!opened.ok()) _exit(3);
    DiskTier& tier = *opened.value();
    tier.keep_file();
    std::mt19937_64 random(seed);
    Slot slots[kBlocks];
    for (const RecoveredBlock& b : tier.recovered()) {
        const size_t i = b.identity.block_index;
        // Of two contents the older one lost its release to the last kill.
        if (b.identity.content_id == notes.blocks[i].acknowledged.load()) {
            slots[i] = b.slot;
        } else {
            tier.release({&b.slot, 1});
        }
    }
    for (;;) {
        std::vector<DiskRequest> requests;
        std::vector<std::vector<uint8_t>> bytes;
        std::vector<bool> used(kBlocks);
        for (int k = 0; k < 6; ++k) {
            const size_t i = random() % kBlocks;
            if (used[i]) continue;
            used[i] = true;
            Note& note = notes.blocks[i];
            if (slots[i].index != Slot::kNone && random() % 3 == 0) {
                note.acknowledged = 0;
                tier.release({&slots[i], 1});
                slots[i] = Slot{};
                continue;
            }
            if (slots[i].index == Slot::kNone) {
                const auto slot_class = uint8_t(random() % 2);
                Result<std::vector<Slot>> got = tier.acquire({&slot_class, 1});
                if (!got.ok()) continue;
                slots[i] = got.value()[0];
            }
            note.acknowledged = 0;  // written in place: the old content goes before the new one is there
            const BlockIdentity id = make_identity(i, ++note.begun);
            bytes.push_back(make_bytes(id, tier.slot_bytes(slots[i].slot_class)));
            requests.push_back(write_request(slots[i], id, bytes.back()));
        }
        for (size_t k = 0; k < requests.size(); ++k) {
            requests[k].memory = bytes[k].data();
            requests[k].tag = k;
        }
        struct Client final : DiskClient {
            Notes* notes;
            std::vector<DiskRequest>* requests;
            std::atomic<size_t> done{0};
            void on_done(DiskCompletion c) noexcept override {
                const BlockIdentity& id = (*requests)[c.tag].identity;
                if (!c.status.ok()) _exit(4);
                notes->blocks[id.block_index].acknowledged = id.content_id;
                ++notes->operations;
                ++done;
            }
        } client;
        client.notes = &notes;
        client.requests = &requests;
        if (!tier.submit(requests, client).ok()) _exit(5);
        while (client.done != requests.size()) usleep(20);
    }
}

class DiskKill : public ::testing::TestWithParam<bool> {};

TEST_P(DiskKill, WhatWasAcknowledgedIsThere) {
    const Folder folder;
    const std::string path = folder.file("tier");
    // The expected contents stand in a file that all children map.
    const int expected = open(folder.file("expected").c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    ASSERT_EQ(ftruncate(expected, sizeof(Notes)), 0);
    void* shared = mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED, expected, 0);
    ASSERT_NE(shared, MAP_FAILED);
    close(expected);
    Notes& notes = *new (shared) Notes{};
    const char* given = std::getenv("TA_KILL_ROUNDS");
    const int rounds = given ? std::atoi(given) : 25;
    std::mt19937_64 random(GetParam() ? 5 : 6);
    uint64_t kept = 0;
    for (int round = 0; round < rounds; ++round) {
        const pid_t child = fork();
        if (child == 0) work(path, GetParam(), random(), notes);
        random.discard(1);
        ASSERT_GT(child, 0);
        // Sometimes before the file is even made, mostly in the middle of it all.
        usleep(useconds_t(round % 5 == 0 ? random() % 3000 : 2000 + random() % 40000));
        kill(child, SIGKILL);
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with " << WEXITSTATUS(status);

        Result<std::unique_ptr<DiskTier>> opened = DiskTier::open(system_files(), options(path, GetParam()));
        ASSERT_TRUE(opened.ok()) << is_ok(std::move(opened).status()).message();
        DiskTier& tier = *opened.value();
        tier.keep_file();
        EXPECT_EQ(tier.refused_count(), 0u) << tier.refused()[0];
        std::vector<bool> found(kBlocks);
        std::vector<Slot> stale;
        for (const RecoveredBlock& b : tier.recovered()) {
            const size_t i = b.identity.block_index;
            ASSERT_LT(i, kBlocks);
            const uint64_t content = b.identity.content_id, owed = notes.blocks[i].acknowledged;
            EXPECT_TRUE(read_block(tier, b.slot, make_identity(i, content))) << "what is there is whole";
            EXPECT_LE(content, notes.blocks[i].begun.load());
            EXPECT_GE(content, notes.oldest[i].load()) << "block " << i << " came back from the dead";
            if (content == owed) {
                found[i] = true;
                ++kept;
            } else {
                stale.push_back(b.slot);
            }
        }
        for (size_t i = 0; i < kBlocks; ++i) {
            EXPECT_TRUE(found[i] || notes.blocks[i].acknowledged == 0)
                << "round " << round << ": block " << i << " content " << notes.blocks[i].acknowledged
                << " was acknowledged and is gone";
        }
        // Closed in peace, a release is for good.
        tier.release(stale);
        opened.value().reset();
        for (size_t i = 0; i < kBlocks; ++i) {
            const uint64_t owed = notes.blocks[i].acknowledged;
            notes.oldest[i] = owed ? owed : notes.blocks[i].begun + 1;
        }
        if (HasFailure()) break;
    }
    RecordProperty("operations", int(notes.operations));
    std::printf("%d kills, %llu writes acknowledged, %llu blocks found again\n", rounds,
                (unsigned long long)notes.operations.load(), (unsigned long long)kept);
    EXPECT_GT(notes.operations, uint64_t(rounds)) << "the children hardly wrote anything";
    munmap(shared, sizeof(Notes));
}

INSTANTIATE_TEST_SUITE_P(Engines, DiskKill, ::testing::Bool(),
                         [](const auto& uring) { return std::string(uring.param ? "uring" : "threads"); });

}  // namespace
}  // namespace ta
