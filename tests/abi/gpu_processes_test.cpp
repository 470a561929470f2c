// Ranks that are processes of their own, each on its GPU, or on one: over the host's memory, and over NCCL. Processes that see
// their own GPU alone, too. Skipped where there is no GPU; NCCL needs one for each rank.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "support/gpu.h"
#include "support/processes.h"
#include "support/spread.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using namespace spread;

constexpr int64_t kSecond = 1000000000;

// The number of GPUs, asked in a process of its own: what has used CUDA cannot be forked.
int gpus() {
    const pid_t pid = fork();
    if (pid == 0) {
        int n = 0;
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? n : 0);
    }
    int s = 0;
    waitpid(pid, &s, 0);
    return WEXITSTATUS(s);
}

struct Way {
    const char* name;
    bool sees_all;
    ta_group_kind kind;
    bool apart;  // as if they were on two hosts
};
void PrintTo(const Way& w, std::ostream* out) {
    *out << w.name;
}

class GpuProcesses : public ::testing::TestWithParam<Way> {
  protected:
    void SetUp() override {
        gpus_ = gpus();
        if (gpus_ == 0) GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
        if (over_nccl() && (gpus_ < 2 || !dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)))
            GTEST_SKIP() << "needs two GPUs and NCCL";
    }
    static bool over_nccl() { return GetParam().kind == TA_GROUP_NCCL; }
    ProcessGroup make(uint32_t n) const {
        return {n, pool_shape(),
                [this](uint32_t rank) {
                    const int wanted = int(rank) % gpus_;
                    const bool own = !GetParam().sees_all;
                    if (own) setenv("CUDA_VISIBLE_DEVICES", std::to_string(wanted).c_str(), 1);
                    auto options = sized<ta_context_options>();
                    options.threads = 2;
                    options.device = TA_DEVICE_CUDA;
                    options.device_ordinal = own ? 0 : wanted;
                    EXPECT_EQ(cudaSetDevice(options.device_ordinal), cudaSuccess);
                    return make_context(options);
                },
                [](ta_group_options& o) {
                    o.kind = GetParam().kind;
                    o.hosts_apart = GetParam().apart;
                    o.silence_ms = 2000;
                }};
    }
    int gpus_ = 0;
};

Given run(const Plan& plan, const std::vector<ta_seq>& seqs, const Asked& asked) {
    Asked explicit_exp = asked;
    explicit_exp.options.exp = TA_EXP_POLY;
    return try_step<DeviceCopy>({plan, seqs, explicit_exp}, [] { EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess); });
}

ta_seq filled(const Rank& rank, int32_t tokens, uint64_t seed) {
    const ta_seq seq = make_sequence(rank.pool);
    EXPECT_EQ(run(rank.plan, {seq}, {tokens, 1, seed}).status, TA_OK);
    return seq;
}

Stored stored(const Rank& rank, ta_seq seq) {
    return dequantize(rank.pool, seq, 1, 0, length(rank.pool, seq), kRow);
}

TEST_P(GpuProcesses, SequencesGoBothWays) {
    const ProcessGroup ranks = make(2);
    const auto body = [](uint32_t me) {
        return [me](const Rank& r, const auto&) {
            const ta_seq own = filled(r, 5000, 7);
            for (uint64_t tag = 1; tag <= 5; ++tag) {
                const ta_ticket out = send(r, own, 1 - me, tag), in = receive(r, 1 - me, tag);
                const ta_transfer_info sent = wait(r, out, 60 * kSecond), got = wait(r, in, 60 * kSecond);
                EXPECT_EQ(sent.state, TA_MOVE_DONE) << sent.reason;
                EXPECT_EQ(got.state, TA_MOVE_DONE) << got.reason;
                if (got.state != TA_MOVE_DONE) return false;
                EXPECT_TRUE(stored(r, got.seq) == stored(r, own));
                verify(r.pool, got.seq);
            }
            return true;
        };
    };
    const Process a = ranks.start(0, body(0)), b = ranks.start(1, body(1));
    EXPECT_EQ(a.status(), 0);
    EXPECT_EQ(b.status(), 0);
}

Given whole_or_spread(const Rank& r, bool spread, uint64_t tag) {
    const ta_seq seq = make_sequence(r.pool);
    ta_error err;
    const auto options = partition_options(tag);
    if (spread) require(ta_seq_partition(r.group.get(), r.pool.get(), seq, &options, &err), err);
    Given all;
    for (const int32_t n : {700, 1, 64, 3, 1, 1}) {
        const Given g = run(r.plan, {seq}, {n, std::min(n, 20), uint64_t(n)});
        EXPECT_EQ(g.status, TA_OK) << g.text;
        all.out.insert(all.out.end(), g.out.begin(), g.out.end());
    }
    return all;
}

TEST_P(GpuProcesses, AStepOverAllIsThatOfOne) {
    for (const uint32_t n : {2u, 3u}) {
        if (over_nccl() && int(n) > gpus_) break;
        const ProcessGroup ranks = make(n);
        std::vector<Process> processes;
        for (uint32_t rank = 0; rank < n; ++rank) {
            processes.push_back(ranks.start(rank, [&ranks](const Rank& r, const auto&) {
                const Given expected = whole_or_spread(r, false, 0), given = whole_or_spread(r, true, 4);
                EXPECT_LT(largest_difference(given.out, expected.out), 1e-4);
                ranks.meet();
                return true;
            }));
        }
        for (const Process& p : processes) EXPECT_EQ(p.status(), 0) << n << " ranks";
    }
}

// An application that takes and frees memory of the GPU all the time. cudaFree waits for all kernels, and other calls of CUDA for it.
class TakesAndFrees {
  public:
    explicit TakesAndFrees(int device) {
        thread_ = std::thread([this, device] {
            EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
            void* memory = nullptr;
            while (!ends_ && cudaMalloc(&memory, size_t{1} << 20) == cudaSuccess) cudaFree(memory);
        });
    }
    ~TakesAndFrees() {
        ends_ = true;
        thread_.join();
    }

  private:
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

// At any moment of transfers both ways and of spread steps, and of either beside a thread that frees memory. The survivor hears of
// it, and its pool goes on.
TEST_P(GpuProcesses, APeerMayBeKilled) {
    Random random(std::random_device{}());
    for (int i = 0; i < kills(); ++i) {
        const ProcessGroup ranks = make(2);
        const bool transfers = i % 2 == 0, frees = i % 3 == 0;
        const auto work = [transfers, frees](uint32_t me) {
            return [me, transfers, frees](const Rank& r, const auto& say) {
                const ta_seq own = filled(r, 3000, 3), apart = make_sequence(r.pool);
                const Stored before = stored(r, own);
                auto options = partition_options(4);
                ta_error err;
                require(ta_seq_partition(r.group.get(), r.pool.get(), apart, &options, &err), err);
                std::optional<TakesAndFrees> beside;  // not before: NCCL may hang where it connects beside cudaFree
                if (frees) beside.emplace(info(r.context).device_ordinal);
                say();
                ta_status s = TA_OK;
                for (uint64_t tag = 1; s == TA_OK; ++tag) {
                    if (!transfers) {
                        const Given g = run(r.plan, {apart}, {5, 5});
                        s = g.status;
                        EXPECT_EQ(s, s == TA_OK ? TA_OK : TA_E_PEER_LOST) << g.text;
                        continue;
                    }
                    ta_ticket out, in;
                    s = ta_seq_send(r.group.get(), r.pool.get(), own, 1 - me, tag, TA_SEND_COPY, &out, &err);
                    if (s == TA_OK) s = ta_seq_receive(r.group.get(), r.pool.get(), 1 - me, tag, &in, &err);
                    if (s != TA_OK) break;
                    const ta_transfer_info sent = wait(r, out, 20 * kSecond), got = wait(r, in, 20 * kSecond);
                    s = sent.status != TA_OK ? sent.status : got.status;
                    EXPECT_EQ(s, s == TA_OK ? TA_OK : TA_E_PEER_LOST) << sent.reason << got.reason;
                    if (got.state != TA_MOVE_DONE) continue;
                    EXPECT_TRUE(stored(r, got.seq) == before) << "other bytes have arrived";
                    EXPECT_EQ(ta_seq_release(r.pool.get(), got.seq, nullptr), TA_OK);
                }
                EXPECT_TRUE(stored(r, own) == before);
                EXPECT_EQ(run(r.plan, {own}, {1, 1}).status, TA_OK);
                return s == TA_E_PEER_LOST;
            };
        };
        const Process survivor = ranks.start(0, work(0)), victim = ranks.start(1, work(1));
        ASSERT_TRUE(victim.wait_for_word() && survivor.wait_for_word());
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(60000)));
        victim.kill();
        victim.status();
        EXPECT_EQ(survivor.status(), 0);
    }
    std::printf("%d kills of a peer\n", kills());
}

TEST_P(GpuProcesses, SayHowTheyReachEachOther) {
    if (gpus_ < 2) GTEST_SKIP() << "needs two GPUs";
    const ProcessGroup ranks = make(2);
    const auto body = [&ranks](uint32_t me) {
        return [&ranks, me](const Rank& r, const auto&) {
            auto peer = sized<ta_group_peer>();
            auto info = sized<ta_group_info>();
            EXPECT_EQ(ta_group_get_peer(r.group.get(), 1 - me, &peer, nullptr), TA_OK);
            EXPECT_EQ(ta_group_get_info(r.group.get(), &info, nullptr), TA_OK);
            EXPECT_EQ(peer.route, GetParam().apart ? TA_ROUTE_NCCL : TA_ROUTE_GPU_MEMORY) << peer.why;
            EXPECT_EQ(info.nccl_version > 22700, over_nccl());
            if (me == 0)
                std::printf("route %d, %.0f GB/s, NCCL %d %s\n", peer.route, 1e-9 * double(peer.bytes_per_s), info.nccl_version,
                            peer.why);
            ranks.meet();
            return true;
        };
    };
    const Process a = ranks.start(0, body(0)), b = ranks.start(1, body(1));
    EXPECT_EQ(a.status(), 0);
    EXPECT_EQ(b.status(), 0);
}

TEST_P(GpuProcesses, ARankThatNeverJoinsIsNamed) {
    const ProcessGroup ranks = make(2);
    const Process alone = start_process([&](const auto&) {
        const Rank r = ranks.join(0, [](ta_group_options& o) { o.connect_ms = 1500; });
        ta_error err;
        EXPECT_EQ(poll(r.group), TA_GROUP_ENDED);
        EXPECT_EQ(ta_group_health(r.group.get(), &err), TA_E_TIMEOUT) << err.message;
        EXPECT_EQ(err.rank, 1);
        return filled(r, 100, 1) != 0;
    });
    EXPECT_EQ(alone.status(), 0);
}

// An ncclComm_t, made by what NCCL's header declares.
void* make_comm(const ProcessGroup& ranks, uint32_t rank) {
    struct Id {
        char bytes[128];
    };
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    const auto get_id = reinterpret_cast<int (*)(Id*)>(dlsym(library, "ncclGetUniqueId"));
    const auto init = reinterpret_cast<int (*)(void**, int, Id, int)>(dlsym(library, "ncclCommInitRank"));
    const ta_group_id chosen = ranks.agree(rank, [&](ta_group_id* to) { EXPECT_EQ(get_id(reinterpret_cast<Id*>(to)), 0); });
    Id id;
    std::memcpy(&id, &chosen, sizeof id);
    void* comm = nullptr;
    EXPECT_EQ(init(&comm, 2, id, int(rank)), 0);
    return comm;
}

TEST_P(GpuProcesses, ACommunicatorIsAdopted) {
    if (!over_nccl()) GTEST_SKIP() << "not of NCCL";
    const ProcessGroup ranks = make(2);
    const auto adopt = [&ranks](ta_group_options& o) { o.nccl_comm = make_comm(ranks, o.rank); };
    const auto body = [](uint32_t me) {
        return [me](const Rank& r, const auto&) {
            const ta_seq own = filled(r, 1000, 7);
            const ta_ticket out = send(r, own, 1 - me, 1), in = receive(r, 1 - me, 1);
            EXPECT_EQ(wait(r, out, 60 * kSecond).state, TA_MOVE_DONE);
            const ta_transfer_info got = wait(r, in, 60 * kSecond);
            EXPECT_EQ(got.state, TA_MOVE_DONE) << got.reason;
            return got.state == TA_MOVE_DONE && stored(r, got.seq) == stored(r, own);
        };
    };
    const Process a = ranks.start(0, body(0), adopt), b = ranks.start(1, body(1), adopt);
    EXPECT_EQ(a.status(), 0);
    EXPECT_EQ(b.status(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, GpuProcesses,
                         ::testing::Values(Way{"host", true, TA_GROUP_HOST, false},
                                           Way{"host_own", false, TA_GROUP_HOST, false},
                                           Way{"nccl", true, TA_GROUP_NCCL, false},
                                           Way{"nccl_own", false, TA_GROUP_NCCL, false},
                                           Way{"nccl_apart", true, TA_GROUP_NCCL, true}),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace ta::testing
