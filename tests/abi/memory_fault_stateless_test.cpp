// Memory that runs out in calls that need no pool: dense attention, merges of parts, calibration.
#include "abi/memory_faults.h"

namespace ta::testing {
namespace {

TEST_P(MemoryFaults, DenseAttention) {
    for_every_fault(
        [](Life& r) { r.make_context(); },
        [](Life& r) {
            const int64_t q_offsets[] = {0, 1, 30}, k_offsets[] = {0, 70, 170};
            for (ta_dense_variant variant : {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF, TA_DENSE_DISTR}) {
                Tensor q(r.random.normals(30 * kQHeads * kDim), 30, kQHeads, kDim), out(30, kQHeads, kDim);
                Tensor k(r.random.normals(170 * kRow), 170, kHeads, kDim), v(r.random.normals(170 * kRow), 170, kHeads, kDim);
                auto options = sized<ta_dense_options>();
                options.variant = variant;
                options.batch = 2;
                options.q_offsets = q_offsets;
                options.k_offsets = k_offsets;
                r.call("ta_attend_dense", [&](ta_error* err) {
                    const ta_status status =
                        ta_attend_dense(r.context.get(), q.view(), k.view(), v.view(), out.view(), nullptr, &options, err);
                    EXPECT_TRUE(status == TA_OK || out.all_poison()) << "a call that failed has written its output";
                    return status;
                });
                r.keep(out.values());
            }
        },
        10);
}

TEST_P(MemoryFaults, MergingNeedsNone) {
    for_every_fault([](Life& r) { r.make_context(); },
                    [](Life& r) {
                        Tensor a(r.random.normals(30 * kRow), 30, kHeads, kDim, TA_DTYPE_F16), out(30, kHeads, kDim);
                        const std::vector<ta_tensor> parts(3, *a.view());
                        const std::vector<float> lse(30 * kHeads, 1.0f);
                        const std::vector<const float*> lses(3, lse.data());
                        r.call_without_memory("ta_merge_states", [&](ta_error* err) {
                            return ta_merge_states(r.context.get(), 3, parts.data(), lses.data(), out.view(), nullptr, nullptr,
                                                   err);
                        });
                        r.keep(out.values());
                    },
                    0);
}

TEST_P(MemoryFaults, Calibration) {
    for_every_fault(
        [](Life& r) { r.make_context(); },
        [](Life& r) {
            r.call("ta_calibrator_create", [&](ta_error* err) {
                ta_calibrator* p = nullptr;
                const ta_status status = ta_calibrator_create(r.context.get(), 1, kHeads, kDim, &p, err);
                r.calibrator.reset(p);
                return status;
            });
            r.call("ta_calibrator_create_for", [&](ta_error* err) {
                auto group = sized<ta_layer_group>();
                group.layers = 1;
                ta_kv_pool_options options = pool_options(1, kHeads, kDim);
                options.layer_groups = &group;
                options.n_layer_groups = 1;
                ta_calibrator* p = nullptr;
                const ta_status status = ta_calibrator_create_for(r.context.get(), &options, &p, err);
                if (status == TA_OK) r.calibrator.reset(p);
                return status;
            });
            Tensor k(r.random.normals(5 * kRow), 5, kHeads, kDim), v(r.random.normals(5 * kRow), 5, kHeads, kDim);
            r.call("ta_calibrator_observe",
                   [&](ta_error* err) { return ta_calibrator_observe(r.calibrator.get(), 0, k.view(), v.view(), err); });
            uint8_t k_bits[kHeads] = {}, v_bits[kHeads] = {};
            std::vector<float> priorities(2 * kHeads, -1.0f);
            r.call("ta_calibrator_finish", [&](ta_error* err) {
                const ta_status status = ta_calibrator_finish(r.calibrator.get(), 1, k_bits, v_bits, priorities.data(),
                                                              priorities.data() + kHeads, err);
                const bool untouched = k_bits[0] + k_bits[1] + v_bits[0] + v_bits[1] == 0 &&
                                       std::all_of(priorities.begin(), priorities.end(), [](float x) { return x == -1.0f; });
                EXPECT_TRUE(status == TA_OK || untouched) << "a call that failed has written its output";
                return status;
            });
            r.call("ta_calibrator_choose", [&](ta_error* err) {
                const float costs[3 * kHeads] = {0, 1, 4, 0, 2, 9};
                std::fill(k_bits, k_bits + kHeads, uint8_t{0});
                const ta_status status = ta_calibrator_choose(r.calibrator.get(), costs, costs, 1 << 30, k_bits, v_bits, err);
                EXPECT_TRUE(status == TA_OK || k_bits[0] == 0) << "a call that failed has written its output";
                return status;
            });
            r.keep(priorities);
        },
        5);
}

}  // namespace
}  // namespace ta::testing
