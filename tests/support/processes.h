// Ranks of a group that are processes of their own.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <utility>

#include "support/groups.h"

namespace ta::testing {

// A rank's process. Its pipe brings a byte for each time that it said so.
struct Process {
    pid_t pid = -1;
    int from = -1;
    void kill() const { ::kill(pid, SIGKILL); }
    bool wait_for_word() const {
        char c;
        return read(from, &c, 1) == 1;
    }
    // Once it has ended: 0, where it says that all is well.
    int status() const {
        int s = 0;
        waitpid(pid, &s, 0);
        close(from);
        return s;
    }
};

class ProcessGroup {
  public:
    using MakeContext = std::function<Context(uint32_t rank)>;
    using Change = std::function<void(ta_group_options&)>;
    ProcessGroup(
        uint32_t n, ta_kv_pool_options pool, MakeContext context = [](uint32_t) { return make_context(1); },
        Change change = [](ta_group_options&) {})
        : n_(n), pool_(pool), context_(std::move(context)), change_(std::move(change)) {
        void* const page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        EXPECT_NE(page, MAP_FAILED);
        shared_ = new (page) Shared;
    }
    ~ProcessGroup() { munmap(shared_, sizeof(Shared)); }
    ProcessGroup(const ProcessGroup&) = delete;
    ProcessGroup& operator=(const ProcessGroup&) = delete;

    ta_group_options options(uint32_t rank) const {
        ta_group_options o = group_options(shared_->id, rank, n_);
        o.kind = TA_GROUP_HOST;
        change_(o);
        return o;
    }
    // All have come so far, or half a minute is over: who leaves a group ends it for all.
    void meet() const {
        ++shared_->came;
        for (int i = 0; i < 30000 && shared_->came < n_; ++i) usleep(1000);
    }
    // What rank 0 chooses and the others get; before they join.
    using Bytes = std::array<uint8_t, 128>;
    Bytes agree(uint32_t rank, const std::function<Bytes()>& choose) const {
        if (rank == 0) {
            shared_->chosen = choose();
            shared_->is_chosen = true;
        }
        while (!shared_->is_chosen) usleep(1000);
        return shared_->chosen;
    }
    Rank join(uint32_t rank) const {
        Rank r;
        r.context = context_(rank);
        r.pool = make_pool(r.context, pool_);
        r.plan = make_plan(r.pool);
        ta_group_options o = options(rank);
        if (adopt_) o.nccl_comm = adopt_(*this, rank);
        ta_error err;
        if (rank == 0) require(ta_group_make_id(o.kind, &shared_->id, &err), err);
        if (rank == 0) shared_->made = true;
        while (!shared_->made) usleep(1000);
        r.group = make_group(r.context, o);
        return r;
    }
    // Joins with the communicator that this gives.
    using Adopt = std::function<void*(const ProcessGroup&, uint32_t rank)>;
    void set_adopt(Adopt adopt) { adopt_ = std::move(adopt); }
    // A process that joins and runs body(rank, say), where say() sends a byte; all is well where it returns true. Before the caller
    // has threads.
    template <class Body>
    Process start(uint32_t rank, Body&& body) const {
        int ends[2];
        EXPECT_EQ(pipe(ends), 0);
        const pid_t pid = fork();
        if (pid == 0) {
            close(ends[0]);
            bool good = false;
            try {
                const Rank r = join(rank);
                good = poll(r.group) == TA_GROUP_READY && body(r, [&] { (void)!write(ends[1], "", 1); });
            } catch (const std::exception& e) {
                std::fprintf(stderr, "rank %u: %s\n", rank, e.what());
            }
            std::fflush(nullptr);
            _exit(good && !::testing::Test::HasFailure() ? 0 : 1);
        }
        close(ends[1]);
        return {pid, ends[0]};
    }

  private:
    // Of all processes; rank 0 makes the id.
    struct Shared {
        ta_group_id id{};
        std::atomic<bool> made{false};
        std::atomic<uint32_t> came{0};
        Bytes chosen{};
        std::atomic<bool> is_chosen{false};
    };
    uint32_t n_;
    ta_kv_pool_options pool_;
    MakeContext context_;
    Change change_;
    Adopt adopt_;
    Shared* shared_;
};

// Files of groups that not all ranks have joined.
inline size_t shared_files() {
    size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
        n += entry.path().filename().string().starts_with("turboattention-");
    return n;
}

// How many of each kind: TA_TEST_KILLS.
inline int kills() {
    const char* const given = std::getenv("TA_TEST_KILLS");
    return given ? std::atoi(given) : 6;
}

}  // namespace ta::testing
