// Dense attention whose heads a root scatters over ranks on GPUs: the bits of one GPU alone. Two GPUs where there are two, else two
// contexts on one. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>

#include "support/gpu.h"
#include "support/scattered.h"

namespace ta::testing {
namespace {

using namespace scattered;

constexpr ta_dense_variant kVariants[] = {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF, TA_DENSE_DISTR};

class GpuScatter : public ::testing::Test {
  protected:
    void SetUp() override {
        if (cudaGetDeviceCount(&gpus_) != cudaSuccess || gpus_ == 0)
            GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
    }
    void TearDown() override {
        if (IsSkipped()) return;
        for (int i = 0; i < gpus_; ++i) {
            EXPECT_EQ(cudaSetDevice(i), cudaSuccess);
            EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        }
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }

    Context make_gpu(int ordinal) const {
        auto options = sized<ta_context_options>();
        options.threads = 2;
        options.device = TA_DEVICE_CUDA;
        options.device_ordinal = ordinal % gpus_;
        return make_context(options);
    }
    template <class Change>
    std::vector<Member> make(uint32_t n, Change&& change) const {
        std::vector<Context> contexts;
        for (uint32_t r = 0; r < n; ++r) contexts.push_back(make_gpu(int(r)));
        return make_members(std::move(contexts), change);
    }
    std::vector<Member> make(uint32_t n) const {
        return make(n, [](ta_group_options&) {});
    }
    // The root's memory is on its GPU.
    void expect(const std::vector<Member>& members, const Problem& p, const Asked& asked = {}) const {
        EXPECT_EQ(cudaSetDevice(int(asked.root) % gpus_), cudaSuccess);
        expect_bits<DeviceCopy>(members, p, asked);
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    }

    // INT8's keys are cut into parts by how much work a call has: what one call for each round gives, on the root.
    void expect_rounds(const std::vector<Member>& members, const Problem& p, const Asked& asked) const {
        EXPECT_EQ(cudaSetDevice(int(asked.root) % gpus_), cudaSuccess);
        const Inputs<DeviceCopy> inputs(p), expected(p);
        const std::vector<Given> given = call_all(members, inputs, asked);
        uint32_t first = 0;
        for (const Given& g : given) {
            EXPECT_EQ(g.status, TA_OK) << g.text;
            for (uint32_t done = 0; done < g.info.heads; done += g.info.heads_per_round) {
                const uint32_t n = std::min(g.info.heads_per_round, g.info.heads - done);
                const auto part = [&](const ta_tensor* whole, int64_t group) {
                    ta_tensor t = *whole;
                    t.stride_token = t.heads * t.head_dim;
                    t.stride_head = t.head_dim;
                    t.data =
                        static_cast<uint8_t*>(t.data) + (first + done) * group * t.head_dim * int64_t(dtype_bytes(t.dtype));
                    t.heads = n * group;
                    return t;
                };
                const ta_tensor q = part(expected.q(), p.group), k = part(expected.k(), 1), v = part(expected.v(), 1),
                                out = part(expected.out(), p.group);
                ta_error err;
                require(ta_attend_dense(members[asked.root].context.get(), &q, &k, &v, &out, nullptr, &expected.options, &err),
                        err);
            }
            first += g.info.heads;
        }
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_TRUE(same_bits(inputs.results(), expected.results())) << p.name();
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    }

    int gpus_ = 0;
};

TEST_F(GpuScatter, HeadsHaveTheBitsOfOneGpu) {
    for (const uint32_t n : {1u, 2u, 3u}) {
        const std::vector<Member> members = make(n);
        for (const ta_dense_variant variant : kVariants) {
            for (const int32_t group : {1, 4}) {
                for (const int64_t tokens : {130, 1000}) {
                    for (const int64_t d : {64, 128}) {
                        Problem p;
                        p.variant = variant;
                        p.group = group;
                        p.kv_heads = 7;
                        p.q_tokens = p.k_tokens = tokens;
                        p.d = d;
                        p.q = p.k = p.v = p.out = TA_DTYPE_F16;
                        Asked asked;
                        asked.root = n - 1;
                        asked.scatter.heads_per_round = tokens == 130 ? 1 : 0;
                        SCOPED_TRACE(std::to_string(n) + " ranks");
                        p.lse = variant == TA_DENSE_DISTR;
                        if (variant == TA_DENSE_DISTR) {
                            expect(members, p, asked);
                        } else {
                            expect_rounds(members, p, asked);
                        }
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

TEST_F(GpuScatter, EveryTypeAndLayout) {
    const std::vector<Member> members = make(2);
    for (const ta_dtype type : kDtypes) {
        for (const Layout layout : kLayouts) {
            Problem p;
            p.q_tokens = p.k_tokens = 150;
            p.q = type;
            p.k = type == TA_DTYPE_F16 ? TA_DTYPE_BF16 : type;
            p.v = type == TA_DTYPE_BF16 ? TA_DTYPE_F32 : type;
            p.out = type == TA_DTYPE_F32 ? TA_DTYPE_F16 : type;
            p.layout = layout;
            p.lse = type != TA_DTYPE_F32;
            expect(members, p);
            p.variant = TA_DENSE_INT8_PAGE;
            expect(members, p);
            if (HasFailure()) return;
        }
    }
}

TEST_F(GpuScatter, EveryOption) {
    const std::vector<Member> members = make(2);
    for (const ta_dense_variant variant : kVariants) {
        Problem p;
        p.variant = variant;
        p.group = 2;
        p.slopes = p.sinks = true;
        p.mask = TA_MASK_FULL;
        p.k_tokens = 100;
        expect(members, p);
        p.q_offsets = {0, 0, 13, 70};
        p.k_offsets = {0, 20, 20, 100};
        expect(members, p);
        p = {};
        p.variant = variant;
        p.q_tokens = 0;
        expect(members, p);
    }
}

// Of INT8 variants, whose keys are cut by how much work a call has, one call over all heads gives the same within rounding.
TEST_F(GpuScatter, OneCallAgrees) {
    const std::vector<Member> members = make(2);
    for (int i = 0; i < 8; ++i) {
        Problem p;
        p.variant = kVariants[i % 4];
        p.q_tokens = i < 4 ? 3 : 2000;
        p.k_tokens = 3000;
        const Inputs<DeviceCopy> inputs(p);
        for (const Given& g : call_all(members, inputs, {})) EXPECT_EQ(g.status, TA_OK) << g.text;
        const std::vector<float> got = inputs.results(), expected = whole<DeviceCopy>(members[0].context, p);
        double most = 0.0;
        for (size_t n = 0; n < got.size(); ++n) most = std::max(most, std::fabs(double(got[n]) - double(expected[n])));
        EXPECT_LT(most, 0.02) << p.name();
        std::printf("variant %d, %d queries: largest difference %.3g\n", p.variant, int(p.q_tokens), most);
    }
}

// Its inputs are still on their way when the call is made.
TEST_F(GpuScatter, WaitsForTheStream) {
    const std::vector<Member> members = make(2);
    Problem p;
    p.q_tokens = p.k_tokens = 500;
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (int i = 0; i < 5; ++i) {
        Inputs<DeviceCopy> inputs(p);
        inputs.options.stream = stream;
        Problem other = p;
        other.seed = 2;
        const Inputs<DeviceCopy> later(other);
        const size_t bytes = size_t(p.k_tokens * p.kv_heads * p.d) * sizeof(float);
        const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
        ASSERT_EQ(cudaLaunchHostFunc(stream, sleep, nullptr), cudaSuccess);
        for (const auto& [to, from] :
             {std::pair(inputs.q(), later.q()), std::pair(inputs.k(), later.k()), std::pair(inputs.v(), later.v())})
            ASSERT_EQ(cudaMemcpyAsync(to->data, from->data, bytes, cudaMemcpyDeviceToDevice, stream), cudaSuccess);
        for (const Given& g : call_all(members, inputs, {})) EXPECT_EQ(g.status, TA_OK) << g.text;
        EXPECT_TRUE(same_bits(inputs.results(), whole<DeviceCopy>(members[0].context, other)));
    }
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(GpuScatter, RefusesWhatAGpuDoesNotReach) {
    const std::vector<Member> members = make(2);
    const Problem p;
    const Inputs<> pageable(p);
    Given other;
    std::thread waiting([&] { other = call_elsewhere(members[1]); });
    const Given refused = call(members[0], &pageable, {});
    EXPECT_EQ(refused.status, TA_E_INVALID) << refused.text;
    EXPECT_EQ(refused.argument, 1);
    const Inputs<DeviceCopy> inputs(p);
    EXPECT_EQ(call(members[0], &inputs, {}).status, TA_OK);
    waiting.join();
    EXPECT_EQ(other.status, TA_OK) << other.text;
}

TEST_F(GpuScatter, ValuesThatAreNotFiniteFailTheCall) {
    const std::vector<Member> members = make(2);
    const Problem p;
    for (const int64_t head : {0, 4}) {  // of the root, of the other
        Tensor q(std::vector<float>(size_t(p.q_tokens * 5 * p.d), 1.0f), p.q_tokens, 5, p.d), out(p.q_tokens, 5, p.d);
        q.set(20, head, 3, INFINITY);
        const DeviceCopy gq(q), gout(out);
        auto options = sized<ta_dense_options>();
        options.variant = TA_DENSE_DISTR;
        Given other;
        std::thread waiting([&] { other = call_elsewhere(members[1]); });
        ta_error err;
        EXPECT_EQ(ta_x_group_attend_dense(members[0].group.get(), gq.view(), gq.view(), gq.view(), gout.view(), nullptr,
                                          &options, 0, nullptr, nullptr, &err),
                  TA_E_NONFINITE)
            << err.message;
        waiting.join();
        if (head == 4) {
            EXPECT_EQ(err.rank, 1);
            EXPECT_EQ(other.status, TA_E_NONFINITE) << other.text;
        }
        expect(members, p);
    }
}

TEST_F(GpuScatter, DevicesOfDifferentKindsAreRefused) {
    std::vector<Context> contexts;
    contexts.push_back(make_gpu(0));
    contexts.push_back(make_context(1));
    const std::vector<Member> members = make_members(std::move(contexts), [](ta_group_options&) {});
    const Problem p;
    const Inputs<DeviceCopy> inputs(p);
    for (const Given& g : call_all(members, inputs, {})) {
        EXPECT_EQ(g.status, TA_E_MISMATCH) << g.text;
        EXPECT_NE(g.text.find("devices of different kinds"), std::string::npos) << g.text;
    }
    EXPECT_TRUE(inputs.untouched());
}

TEST_F(GpuScatter, ARankThatLeavesEndsTheCall) {
    Problem p;
    p.q_tokens = p.k_tokens = 3000;
    p.kv_heads = 16;
    const Inputs<DeviceCopy> inputs(p);
    for (int i = 0; i < 10; ++i) {
        const std::vector<Member> members = make(2);
        Asked asked;
        asked.scatter.heads_per_round = 1;
        std::thread other([&] { (void)call_elsewhere(members[1], {}); });
        std::thread ends([&] {
            std::this_thread::sleep_for(std::chrono::microseconds(200 * i));
            EXPECT_EQ(ta_group_abort(members[1].group.get(), nullptr), TA_OK);
        });
        const Given given = call(members[0], &inputs, asked);
        EXPECT_TRUE(given.status == TA_OK || given.status == TA_E_PEER_LOST || given.status == TA_E_CANCELLED)
            << ta_status_name(given.status) << given.text;
        other.join();
        ends.join();
        // The GPUs go on.
        Problem small;
        EXPECT_EQ(whole<DeviceCopy>(members[0].context, small).size(), size_t(70 * 5 * 65));
    }
}

}  // namespace
}  // namespace ta::testing
