// Layer-ahead staging: steps that copy pages in host memory to the GPU before they read them, beside a pool with all blocks in
// GPU memory. The same outputs to the bit. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>

#include "abi/tier_twins.h"
#include "support/gpu.h"

namespace ta::testing {
namespace {

struct Shape {
    ta_staging staging = TA_STAGING_ALWAYS;
    uint64_t slots = 0;  // of the ring, blocks' size; 0: the default
    uint32_t bits = 4, layers = 3, heads = 2, head_dim = 128, group = 4;
    ta_x_move_route route = TA_X_MOVE_ROUTE_AUTO;
    uint64_t device_blocks = 0;  // of the budget, beside 6 token blocks; 0: plenty
    bool falls = false;          // precision, on demotion; the plain pool has tiers for that, too
};

// Random values in GPU memory; tensors are anywhere in it.
class Noise {
  public:
    Noise() : values_(kValues / 8, 1, 8) { values_.set(random_.normals(kValues)); }
    ta_tensor take(int64_t tokens, int64_t heads, int64_t head_dim) {
        const auto n = uint64_t(tokens * heads * head_dim);
        EXPECT_LT(n, kValues);
        ta_tensor t = *values_.view();
        t.tokens = tokens;
        t.heads = heads;
        t.head_dim = head_dim;
        t.data = static_cast<uint16_t*>(t.data) + taken_++ * 12347 * 8 % (kValues - n) / 8 * 8;
        return t;
    }

  private:
    static constexpr uint64_t kValues = uint64_t{11} << 20;
    Random random_{5};
    DeviceTensor values_;
    uint64_t taken_ = 0;
};

// One layer's tensors of a step, for both pools.
struct LayerTensors {
    LayerTensors(const Shape& s, int64_t n_new, int64_t n_query, Noise& noise, bool with_lse)
        : k(noise.take(n_new, s.heads, s.head_dim)),
          v(noise.take(n_new, s.heads, s.head_dim)),
          q(noise.take(n_query, s.heads * s.group, s.head_dim)),
          out(n_query, s.heads * s.group, s.head_dim),
          plain_out(n_query, s.heads * s.group, s.head_dim) {
        if (!with_lse) return;
        rows = size_t(n_query) * s.heads * s.group;
        for (float** p : {&lse, &plain_lse})
            EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(p), rows * sizeof(float)), cudaSuccess);
    }
    ~LayerTensors() {
        cudaFree(lse);
        cudaFree(plain_lse);
    }
    LayerTensors(const LayerTensors&) = delete;
    LayerTensors& operator=(const LayerTensors&) = delete;
    void compare() const {
        const std::vector<float> x = out.get(), y = plain_out.get();
        ASSERT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0);
        if (!lse) return;
        std::vector<float> a(rows), b(rows);
        ASSERT_EQ(cudaMemcpy(a.data(), lse, rows * 4, cudaMemcpyDeviceToHost), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(b.data(), plain_lse, rows * 4, cudaMemcpyDeviceToHost), cudaSuccess);
        ASSERT_EQ(std::memcmp(a.data(), b.data(), rows * 4), 0);
    }
    ta_tensor k, v, q;
    DeviceTensor out, plain_out;
    float *lse = nullptr, *plain_lse = nullptr;
    size_t rows = 0;
};

class GpuStaging : public GpuTest {
  protected:
    void make_pools(const Shape& s) {
        shape = s;
        seqs.clear();
        plain_seqs.clear();
        plan.reset();
        plain_plan.reset();
        auto options = pool_options(s.layers, s.heads, s.head_dim, s.bits);
        options.budget_bytes = uint64_t{512} << 20;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{128} << 20;
        if (s.falls) {
            tiers.disk_bytes = uint64_t{64} << 20;
            tiers.falling_precision = TA_ON;
            tiers.staging = TA_STAGING_NEVER;
            options.tiers = &tiers;
        }
        plain_pool = make_pool(gpu, options);
        const ta_kv_pool_stats blocks = stats(plain_pool);
        tiers.staging = s.staging;
        auto tuning = sized<ta_x_tier_tuning>();
        tuning.staging_bytes = s.slots * (s.bits == 8 ? blocks.token_block_bytes : blocks.channel_block_bytes);
        tuning.route = s.route;
        tiers.tuning = &tuning;
        options.tiers = &tiers;
        if (s.device_blocks > 0)
            options.budget_bytes = 6 * blocks.token_block_bytes + s.device_blocks * blocks.channel_block_bytes;
        pool = make_pool(gpu, options);
        plan = plan_on(pool, stream);
        plain_plan = plan_on(plain_pool, stream);
    }
    static Plan plan_on(const KvPool& of, cudaStream_t on) {
        Plan p = make_plan(of);
        ta_error err;
        require(ta_plan_set_stream(p.get(), on, &err), err);
        return p;
    }
    // A sequence of `blocks` full blocks and some tokens, blocks [first, first + n) of it in host memory.
    size_t add(int64_t blocks, uint64_t first, uint64_t n) {
        seqs.push_back(make_sequence(pool));
        plain_seqs.push_back(make_sequence(plain_pool));
        const size_t s = seqs.size() - 1;
        step({s}, {int32_t(blocks * 64 + 5)}, {0});
        away(s, first, n, TA_TIER_HOST);
        return s;
    }
    void away(size_t s, uint64_t first, uint64_t n, ta_tier tier) {
        const ta_move_info info = move_now(pool, seqs[s], first, n, tier);
        ASSERT_EQ(info.moved + info.present, n) << ta_status_name(info.status);
    }
    // Blocks go to `lowest`, where they lose bits, and back: to host memory, in the plain pool to the GPU's.
    void fall(size_t s, uint64_t first, uint64_t n, ta_tier lowest) {
        away(s, first, n, lowest);
        away(s, first, n, TA_TIER_HOST);
        for (const ta_tier tier : {lowest, ta_tier(TA_TIER_DEVICE)})
            ASSERT_EQ(move_now(plain_pool, plain_seqs[s], first, n, tier).moved, n);
    }
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, std::vector<int32_t> n_query = {},
              const ta_attend_options* options = nullptr, bool with_lse = false) {
        if (n_query.empty()) n_query = n_new;
        std::vector<ta_seq> a, b;
        int64_t all_new = 0, all_query = 0;
        for (size_t i = 0; i < members.size(); ++i) {
            a.push_back(seqs[members[i]]);
            b.push_back(plain_seqs[members[i]]);
            all_new += n_new[i];
            all_query += n_query[i];
        }
        std::vector<std::unique_ptr<LayerTensors>> tensors;
        for (uint32_t layer = 0; layer < shape.layers; ++layer)
            tensors.push_back(std::make_unique<LayerTensors>(shape, all_new, all_query, *noise, with_lse));
        // One pool after the other, so that nothing between the layers gives copies time.
        for (const bool plain : {false, true}) {
            const Plan& p = plain ? plain_plan : plan;
            begin(p, plain ? b : a, n_new, n_query);
            for (uint32_t layer = 0; layer < shape.layers; ++layer) {
                LayerTensors& t = *tensors[layer];
                ta_error err;
                if (all_new > 0) require(ta_append(p.get(), layer, &t.k, &t.v, &err), err);
                if (all_query > 0) attend(p, layer, t, plain, options);
            }
            end(p);
        }
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        for (uint32_t layer = 0; layer < shape.layers && all_query > 0; ++layer) {
            SCOPED_TRACE("layer " + std::to_string(layer));
            tensors[layer]->compare();
        }
    }
    static void attend(const Plan& p, uint32_t layer, LayerTensors& t, bool plain, const ta_attend_options* options = nullptr) {
        ta_error err;
        require(ta_attend(p.get(), layer, &t.q, plain ? t.plain_out.view() : t.out.view(), plain ? t.plain_lse : t.lse, options,
                          &err),
                err);
    }
    ta_move_stats counted() const { return move_stats(pool); }

    Shape shape;
    KvPool pool, plain_pool;
    Plan plan, plain_plan;
    std::vector<ta_seq> seqs, plain_seqs;
    static void TearDownTestSuite() { noise.reset(); }
    void SetUp() override {
        GpuTest::SetUp();
        if (!IsSkipped() && !noise) noise = std::make_unique<Noise>();
    }
    static inline std::unique_ptr<Noise> noise;
};

TEST_F(GpuStaging, SameBitsAsInPlace) {
    for (const Shape& s : {Shape{}, Shape{.bits = 2}, Shape{.bits = 8}, Shape{.head_dim = 64}, Shape{.head_dim = 256}}) {
        SCOPED_TRACE(std::to_string(s.bits) + " bits, head_dim " + std::to_string(s.head_dim));
        make_pools(s);
        const size_t a = add(70, 1, 60), b = add(40, 0, 31), c = add(3, 0, 0);  // of b a sink too
        // A sink's page, of 8 bits, does not fit a slot of the ring where that has 2 bits for all layers: it is read in place.
        const uint64_t pages = (60 + (s.bits == 2 ? 30 : 31)) * s.layers;
        step({a, b, c}, {300, 70, 200});
        step({a, c, b}, {1, 1, 1});
        step({a, b}, {17, 200}, {}, nullptr, true);
        EXPECT_EQ(counted().staged_pages, 3 * pages);
        EXPECT_EQ(counted().staged_steps, 3u);
        auto full = sized<ta_attend_options>();
        full.mask = TA_MASK_FULL;
        step({b, a}, {100, 60}, {}, &full);
        step({a, b}, {0, 0}, {150, 2});
        EXPECT_EQ(counted().staged_pages, 5 * pages);
        // A step expects the window of the step before: pages beyond that window are read in place.
        auto window = sized<ta_attend_options>();
        window.window = 3000;
        for (const ta_attend_options* options : {&window, &window, static_cast<ta_attend_options*>(nullptr)})
            step({a, b}, {50, 50}, {}, options);
        EXPECT_EQ(counted().staged_steps, 8u);
        EXPECT_GT(counted().staged_pages, 6 * pages);
        EXPECT_LT(counted().staged_pages, 8 * pages);
        EXPECT_EQ(counted().host_steps, 8u);
        for (const ta_seq seq : seqs) {
            ta_error err;
            require(ta_seq_verify(pool.get(), seq, &err), err);
        }
    }
}

// Pages that fell are staged as they are, of several widths in one ring.
TEST_F(GpuStaging, PagesThatFell) {
    for (const Shape& s : {Shape{.bits = 8, .falls = true}, Shape{.bits = 4, .falls = true},
                           Shape{.slots = 9, .bits = 8, .head_dim = 64, .falls = true}}) {
        SCOPED_TRACE(std::to_string(s.bits) + " bits, head_dim " + std::to_string(s.head_dim));
        make_pools(s);
        const size_t a = add(70, 0, 0), b = add(40, 0, 0);
        fall(a, 1, 20, TA_TIER_DISK);
        fall(a, 21, 30, TA_TIER_HOST);
        fall(b, 5, 20, TA_TIER_DISK);
        const ta_tier_stats host = tier_stats(pool, TA_TIER_HOST);
        ASSERT_EQ(host.low_blocks, 40u);  // of 2 bits
        ASSERT_EQ(host.channel_blocks, 30u);
        ASSERT_EQ(tier_stats(plain_pool, TA_TIER_DEVICE).low_blocks, 40u);
        ASSERT_EQ(tier_stats(plain_pool, TA_TIER_HOST).blocks, 0u);
        step({a, b}, {300, 70});
        step({b, a}, {1, 1});
        step({a, b}, {0, 0}, {150, 2});
        EXPECT_EQ(counted().staged_steps, 3u);
        if (s.slots == 0) {
            EXPECT_EQ(counted().staged_pages, 3u * 70 * s.layers);
        }
        for (const ta_seq seq : seqs) {
            ta_error err;
            require(ta_seq_verify(pool.get(), seq, &err), err);
        }
    }
}

TEST_F(GpuStaging, RingSmallerThanNeeded) {
    for (const uint64_t slots :
         {uint64_t{30}, uint64_t{7}, uint64_t{1}}) {  // of blocks of 3 layers: one part, some of the pages
        SCOPED_TRACE(std::to_string(slots) + " slots");
        make_pools({.slots = slots});
        const size_t a = add(70, 1, 60), b = add(40, 1, 30);
        step({a, b}, {300, 70});
        step({a, b}, {1, 1});
        step({a, b}, {0, 0}, {9, 120});
        EXPECT_EQ(counted().staged_steps, 3u);
        EXPECT_LE(counted().staged_pages, 3 * 3 * std::min<uint64_t>(90, 3 * slots));
        EXPECT_GE(counted().staged_pages, 3 * 3 * std::min<uint64_t>(90, 2 * slots));  // places are larger than pages
    }
}

// Blocks leave for the host because the device is full: a ring has what room happens to be left, or none.
TEST_F(GpuStaging, BesideAFullDevice) {
    for (const uint64_t channel_blocks : {1, 3, 10}) {
        make_pools({.device_blocks = channel_blocks});
        const size_t a = add(0, 0, 0);
        for (int i = 0; i < 45; ++i) step({a}, {i % 4 == 3 ? 1 : 64});
        EXPECT_GT(residency(pool, seqs[a]).host_blocks, 5u);
        EXPECT_LE(stats(pool).bytes_peak, stats(pool).bytes_budget);
    }
}

TEST_F(GpuStaging, LayersInAnyOrder) {
    for (const uint64_t slots : {0, 25}) {
        make_pools({.slots = slots});
        const size_t a = add(70, 1, 60);
        std::vector<std::unique_ptr<LayerTensors>> tensors;
        for (uint32_t layer = 0; layer < shape.layers; ++layer)
            tensors.push_back(std::make_unique<LayerTensors>(shape, 0, 100, *noise, false));
        step({a}, {0}, {100});  // what the calls are like is known from here on
        for (const std::vector<uint32_t>& order :
             {std::vector<uint32_t>{2, 0, 1}, {0, 0, 1, 1, 2, 2}, {1, 2}, {2, 1, 0}, {}, {0, 2, 0, 2}}) {
            for (const bool plain : {false, true}) {
                const Plan& p = plain ? plain_plan : plan;
                begin(p, {plain ? plain_seqs[a] : seqs[a]}, {0}, {100});
                for (const uint32_t layer : order) attend(p, layer, *tensors[layer], plain);
                end(p);
            }
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            for (const uint32_t layer : order) tensors[layer]->compare();
        }
        EXPECT_EQ(counted().staged_steps, 6u);  // all but the empty one
    }
}

TEST_F(GpuStaging, CapturedCallsReadInPlace) {
    make_pools({});
    const size_t a = add(70, 1, 60);
    std::vector<std::unique_ptr<LayerTensors>> tensors;
    for (uint32_t layer = 0; layer < shape.layers; ++layer)
        tensors.push_back(std::make_unique<LayerTensors>(shape, 0, 100, *noise, false));
    step({a}, {0}, {100});
    EXPECT_EQ(counted().staged_steps, 1u);
    CapturedGraph graph;
    for (int i = 0; i < 3; ++i) {
        begin(plan, {seqs[a]}, {0}, {100});
        if (i == 0) {
            graph.capture(stream, [&] {
                for (uint32_t layer = 0; layer < shape.layers; ++layer) attend(plan, layer, *tensors[layer], false);
            });
        }
        ASSERT_EQ(graph.launch(stream), cudaSuccess);
        end(plan);
        begin(plain_plan, {plain_seqs[a]}, {0}, {100});
        for (uint32_t layer = 0; layer < shape.layers; ++layer) attend(plain_plan, layer, *tensors[layer], true);
        end(plain_plan);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        for (const auto& t : tensors) t->compare();
        away(a, 1, uint64_t(20 * (i + 1)), i == 1 ? TA_TIER_HOST : TA_TIER_DEVICE);
    }
    EXPECT_EQ(counted().staged_steps, 1u);
    away(a, 1, 60, TA_TIER_HOST);
    step({a}, {0}, {100});  // not left to the graph
    EXPECT_EQ(counted().staged_steps, 2u);
}

TEST_F(GpuStaging, WhatIsPredicted) {
    make_pools({.staging = TA_STAGING_AUTO});
    const size_t a = add(300, 1, 200), b = add(3, 0, 0);
    step({b}, {1});
    EXPECT_EQ(counted().host_steps, 0u);
    step({a, b}, {1, 1});
    step({a, b}, {4, 1});
    EXPECT_EQ(counted().host_steps, 2u);
    EXPECT_EQ(counted().staged_steps, 0u);
    step({a, b}, {1024, 1});
    step({a}, {1}, {1000});
    EXPECT_EQ(counted().staged_steps, 2u);
    EXPECT_EQ(counted().staged_pages, 2u * 200 * shape.layers);

    make_pools({.staging = TA_STAGING_NEVER});
    const size_t c = add(300, 1, 200);
    step({c}, {1024});
    EXPECT_EQ(counted().host_steps, 1u);
    EXPECT_EQ(counted().staged_steps, 0u);
}

// Copies that take longer than a layer, in steps behind one another: what is read too early is another layer's.
TEST_F(GpuStaging, CopiesAreWaitedFor) {
    for (const ta_x_move_route route : {TA_X_MOVE_ROUTE_COPY_ENGINE, TA_X_MOVE_ROUTE_KERNEL}) {
        for (const uint64_t slots : {0, 70}) {
            make_pools({.slots = slots, .layers = 6, .heads = 4, .group = 2, .route = route});
            const size_t a = add(320, 1, 300);
            step({a}, {0}, {4});
            std::vector<std::unique_ptr<LayerTensors>> tensors;
            for (uint32_t i = 0; i < 4 * shape.layers; ++i)
                tensors.push_back(std::make_unique<LayerTensors>(shape, 0, 4, *noise, false));
            for (const bool plain : {false, true}) {
                const Plan& p = plain ? plain_plan : plan;
                for (uint32_t i = 0; i < 4; ++i) {
                    begin(p, {plain ? plain_seqs[a] : seqs[a]}, {0}, {4});
                    for (uint32_t layer = 0; layer < shape.layers; ++layer)
                        attend(p, layer, *tensors[i * shape.layers + layer], plain);
                    end(p);
                }
            }
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            for (const auto& t : tensors) t->compare();
            EXPECT_EQ(counted().staged_steps, 5u);
        }
    }
}

// Two plans on two streams, whose rings are slots that the other has just given back.
TEST_F(GpuStaging, PlansBesideOneAnother) {
    make_pools({.slots = 90});
    const size_t a = add(70, 1, 60), b = add(80, 5, 60);
    cudaStream_t other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    Plan second = plan_on(pool, other);
    std::vector<std::unique_ptr<LayerTensors>> tensors;
    for (uint32_t i = 0; i < 12 * shape.layers; ++i)
        tensors.push_back(std::make_unique<LayerTensors>(shape, 0, 40, *noise, false));
    for (uint32_t i = 0; i < 12; ++i) {
        const Plan& p = i % 2 ? second : plan;
        begin(p, {seqs[i % 2 ? b : a]}, {0}, {40});
        begin(plain_plan, {plain_seqs[i % 2 ? b : a]}, {0}, {40});
        for (uint32_t layer = 0; layer < shape.layers; ++layer) {
            attend(p, layer, *tensors[i * shape.layers + layer], false);
            attend(plain_plan, layer, *tensors[i * shape.layers + layer], true);
        }
        end(p);
        end(plain_plan);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const auto& t : tensors) t->compare();
    EXPECT_EQ(counted().staged_steps, 12u);
    second.reset();
    cudaStreamDestroy(other);
}

}  // namespace
}  // namespace ta::testing
