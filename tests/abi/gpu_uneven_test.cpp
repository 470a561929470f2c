// Layers of different shapes in one pool on a GPU: each gives the bits of a GPU's pool of its shape alone. The CPU's own judge is
// uneven_test.cpp.
#include "abi/uneven.h"
#include "support/gpu.h"

namespace ta::testing {
namespace {

// With the names that Tensor has.
class DeviceRows : public DeviceTensor {
  public:
    DeviceRows(const std::vector<float>& values, int64_t tokens, int64_t heads, int64_t d)
        : DeviceTensor(tokens, heads, d, &values) {}
    using DeviceTensor::DeviceTensor;
    std::vector<float> values() const {
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        return get();
    }
};

class GpuUneven : public GpuTest {};

TEST_F(GpuUneven, EachLayerIsAsInAPoolOfItsShape) {
    for (const bool all_8_bits : {false, true}) {
        for (const bool has_tiers : {false, true}) {
            SCOPED_TRACE(std::string(all_8_bits ? "8 bits" : "all bits") + (has_tiers ? ", tiers" : ""));
            auto tiers = sized<ta_tier_options>();
            tiers.host_bytes = uint64_t{8} << 20;
            tiers.disk_bytes = uint64_t{32} << 20;
            UnevenTwins<DeviceRows> twins(gpu, all_8_bits, has_tiers ? &tiers : nullptr,
                                          has_tiers ? uint64_t{6} << 20 : uint64_t{64} << 20, stream);
            twins.walk(60, has_tiers ? std::optional(ta_tier(TA_TIER_HOST)) : std::nullopt);
            uint64_t passed = stats(twins.uneven.pool).passed_blocks;
            if (has_tiers) passed += tier_stats(twins.uneven.pool, TA_TIER_HOST).passed_blocks;
            EXPECT_GT(passed, 0u);
        }
    }
}

TEST_F(GpuUneven, EachLayerIsAsInAPoolOfItsShapeUnderBatchInvariant) {
    UnevenTwins<DeviceRows> twins(gpu, false, nullptr, uint64_t{64} << 20, stream, true);
    twins.walk(60, std::nullopt);
}

// One graph has the calls of all layers, whose queries have 2, 8 and 1 heads for each kv head.
TEST_F(GpuUneven, GraphsHoldLayersOfAllShapes) {
    UnevenTwins<DeviceRows> twins(gpu, false, nullptr, uint64_t{64} << 20, stream);
    twins.add();
    twins.step({0}, {60});
    twins.step({0}, {1});  // the plan knows all of a graph's calls
    struct Rows {
        DeviceTensor k, v, q, out, plain;
    };
    std::vector<std::unique_ptr<Rows>> rows;
    for (const UnevenLayer& l : kUneven) {
        const int64_t q_heads = int64_t(l.kv_heads) * l.group;
        rows.push_back(std::unique_ptr<Rows>(new Rows{{1, l.kv_heads, l.head_dim},
                                                      {1, l.kv_heads, l.v_head_dim},
                                                      {1, q_heads, l.head_dim},
                                                      {1, q_heads, l.v_head_dim},
                                                      {1, q_heads, l.v_head_dim}}));
    }
    ta_error err;
    const auto calls = [&](const Plan& plan, uint32_t layer, Rows& r, DeviceTensor& out, int64_t window) {
        auto options = sized<ta_attend_options>();
        options.window = window;
        require(ta_append(plan.get(), layer, r.k.view(), r.v.view(), &err), err);
        require(ta_attend(plan.get(), layer, r.q.view(), out.view(), nullptr, &options, &err), err);
    };
    const int32_t one = 1;
    Random random(3);
    CapturedGraph graph;
    for (int i = 0; i < 300; ++i) {
        if (i == 100) twins.step({0}, {70});  // a prompt by hand between replays
        for (uint32_t l = 0; l < kUnevenLayers; ++l) {
            const UnevenLayer& layer = kUneven[l];
            rows[l]->k.set(random.normals(layer.kv_heads * layer.head_dim));
            rows[l]->v.set(random.normals(layer.kv_heads * layer.v_head_dim));
            rows[l]->q.set(random.normals(layer.kv_heads * layer.group * layer.head_dim));
        }
        auto& side = twins.uneven;
        require(ta_plan_begin(side.plan.get(), 1, side.seqs.data(), &one, nullptr, nullptr, &err), err);
        if (!graph) {
            graph.capture(stream, [&] {
                for (uint32_t l = 0; l < kUnevenLayers; ++l) calls(side.plan, l, *rows[l], rows[l]->out, 0);
            });
        }
        ASSERT_EQ(graph.launch(stream), cudaSuccess);
        require(ta_plan_end(side.plan.get(), nullptr, &err), err);
        for (uint32_t l = 0; l < kUnevenLayers; ++l) {
            auto& alone = twins.alone[l];
            require(ta_plan_begin(alone.plan.get(), 1, alone.seqs.data(), &one, nullptr, nullptr, &err), err);
            calls(alone.plan, 0, *rows[l], rows[l]->plain, kUneven[l].window);
            require(ta_plan_end(alone.plan.get(), nullptr, &err), err);
        }
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        for (uint32_t l = 0; l < kUnevenLayers; ++l) ASSERT_TRUE(rows[l]->out.get() == rows[l]->plain.get()) << i << ", " << l;
    }
    twins.verify();
}

}  // namespace
}  // namespace ta::testing
