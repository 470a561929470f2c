// A decode step of a single thread makes no system call: it runs in a process that the kernel ends at the first one.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <iterator>

#include "support/handles.h"

namespace ta::testing {
namespace {

// From now on the kernel ends this process at any system call but exit.
bool refuse_system_calls() {
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    const sock_fprog filter{uint16_t(std::size(program)), program};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// Runs `body` in a child that may make none. 0: it came to its end; else what ended it.
template <class Prepare, class Body>
int without_system_calls(Prepare&& prepare, Body&& body) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        auto state = prepare();
        if (!refuse_system_calls()) _exit(100);
        body(state);
        syscall(SYS_exit, 0);  // _exit() ends all threads, which is another call
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
}

struct Decoder {
    static constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
    Context context = make_context(1);
    KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    Plan plan = make_plan(pool);
    ta_seq seq = make_sequence(pool);
    Tensor k{std::vector<float>(kHeads * kDim, 0.5f), 1, kHeads, kDim}, q = k, out{1, kHeads, kDim};

    explicit Decoder(int tokens) {
        for (int i = 0; i < tokens; ++i) step();
    }
    void step() {
        begin(plan, {seq}, {1});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            append(plan, layer, k, k);
            attend(plan, layer, q, out);
        }
        end(plan);
    }
};

TEST(FastPath, ADecodeStepMakesNoSystemCall) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    GTEST_SKIP() << "sanitizers make some";
#endif
    const auto look_at_clock = [](int) {
        for (int i = 0; i < 10; ++i) (void)std::chrono::steady_clock::now();
    };
    if (without_system_calls([] { return 0; }, look_at_clock) != 0)
        GTEST_SKIP() << "no such filters here, or a clock that is a system call";
    EXPECT_EQ(without_system_calls([] { return 0; }, [](int) { (void)getppid(); }), SIGSYS) << "the test sees one";
    const auto decode = [](Decoder& d) {
        for (int i = 0; i < 40; ++i) d.step();  // within an open block
    };
    EXPECT_EQ(without_system_calls([] { return Decoder(70); }, decode), 0) << SIGSYS << " is a system call";
}

}  // namespace
}  // namespace ta::testing
