// Ranks of a group that are processes of their own.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

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

// The work of a process; all is well if it returns true. say() sends a byte.
using ProcessBody = std::function<bool(const std::function<void()>& say)>;

// Before the caller has threads.
inline Process start_process(const ProcessBody& body) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        bool good = false;
        try {
            good = body([&] { (void)!write(ends[1], "", 1); });
        } catch (const std::exception& e) {
            std::fprintf(stderr, "%s\n", e.what());
        }
        std::fflush(nullptr);
        _exit(good && !::testing::Test::HasFailure() ? 0 : 1);
    }
    close(ends[1]);
    return {pid, ends[0]};
}

class ProcessGroup {
  public:
    using MakeContext = std::function<Context(uint32_t rank)>;
    using Change = std::function<void(ta_group_options&)>;
    // `change` is called in the process of the rank.
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
        ta_group_options o = group_options(shared_->id.value, rank, n_);
        o.kind = TA_GROUP_HOST;
        change_(o);
        return o;
    }
    Rank join(
        uint32_t rank, const Change& change = [](ta_group_options&) {}) const {
        Rank r;
        r.context = context_(rank);
        r.pool = make_pool(r.context, pool_);
        r.plan = make_plan(r.pool);
        ta_group_options o = options(rank);
        change(o);
        agree(shared_->id, rank, [&o](ta_group_id* id) {
            ta_error err;
            require(ta_group_make_id(o.kind, id, &err), err);
        });
        r.group = make_group(r.context, o);
        return r;
    }
    // A process that joins; body(rank, say) runs when the group is ready.
    template <class Body>
    Process start(
        uint32_t rank, Body&& body, const Change& change = [](ta_group_options&) {}) const {
        return start_process([&](const auto& say) {
            const Rank r = join(rank, change);
            return poll(r.group) == TA_GROUP_READY && body(r, say);
        });
    }

    // 128 bytes that rank 0 chooses, once, and the others get.
    ta_group_id agree(uint32_t rank, const std::function<void(ta_group_id*)>& choose) const {
        return agree(shared_->other, rank, choose);
    }
    // All have come so far, or half a minute is over: who leaves a group ends it for all.
    void meet() const {
        ++shared_->came;
        for (int i = 0; i < 30000 && shared_->came < n_; ++i) usleep(1000);
    }

  private:
    struct Choice {
        ta_group_id value{};
        std::atomic<bool> made{false};
    };
    // By all processes.
    struct Shared {
        Choice id, other;
        std::atomic<uint32_t> came{0};
    };
    static ta_group_id agree(Choice& choice, uint32_t rank, const std::function<void(ta_group_id*)>& choose) {
        if (rank == 0) {
            choose(&choice.value);
            choice.made = true;
        }
        while (!choice.made) usleep(1000);
        return choice.value;
    }

    uint32_t n_;
    ta_kv_pool_options pool_;
    MakeContext context_;
    Change change_;
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
