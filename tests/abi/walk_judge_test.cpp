// What the judge of the twin walks lets pass, on data of which all is known: normal rows over some hundred keys, attention in
// float64 as the truth, and errors of a size in all rows at once. Bounds that excuse anything would pass the walks, too.
#include "abi/walk_judge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "support/numbers.h"

namespace ta::testing {
namespace {

constexpr int64_t kDim = 128, kQueryHeads = 2;

struct Scene {
    explicit Scene(bool by_prefill_kernel, int64_t n_keys) {
        Random random(5);
        call.n_query = by_prefill_kernel ? 64 : 8, call.n_keys = n_keys;
        call.group = kQueryHeads, call.head_dim = kDim;
        call.scale = 1.0 / std::sqrt(double(kDim));
        call.by_prefill_kernel = by_prefill_kernel, call.with_lse = true, call.rotated = true;
        const int64_t rows = call.n_query * kQueryHeads;
        k = random.normals(n_keys * kDim, 1.0f), v = random.normals(n_keys * kDim, 1.0f), q = random.normals(rows * kDim, 1.5f);
        for (int64_t row = 0; row < rows; ++row) attend(row);
        call.k = k.data(), call.v = v.data(), call.q = q.data();
        call.truth = call.beside = truth.data(), call.truth_lse = lse.data();
        call.read_codes = [rows](const float* x) { return std::vector<float>(x, x + rows * kDim); };
    }
    void attend(int64_t row) {
        const int64_t end = call.n_keys - call.n_query + row / kQueryHeads + 1;
        std::vector<double> o(size_t(kDim), 0.0);
        double l = 0.0;
        for (int64_t j = 0; j < end; ++j) {
            double product = 0.0;
            for (int64_t c = 0; c < kDim; ++c) product += double(q[size_t(row * kDim + c)]) * double(k[size_t(j * kDim + c)]);
            const double w = std::exp(product * call.scale);
            l += w;
            for (int64_t c = 0; c < kDim; ++c) o[size_t(c)] += w * double(v[size_t(j * kDim + c)]);
        }
        for (const double x : o) truth.push_back(float(x / l));
        lse.push_back(float(std::log(l)));
    }
    // All of O times `factor`, LSE and `more`.
    std::string judged(float factor, float more = 0.0f) {
        std::vector<float> got = truth, got_lse = lse;
        for (float& x : got) x *= factor;
        for (float& x : got_lse) x += more;
        call.got = got.data(), call.got_lse = got_lse.data();
        Shares shares;
        return judge(call, shares);
    }

    JudgedCall call;
    std::vector<float> k, v, q, truth, lse;
};

TEST(WalkJudge, LetsPassWhatRoundingMakes) {
    for (const bool by_prefill_kernel : {false, true}) {
        for (const int64_t n_keys : {300, 1200}) {
            Scene scene(by_prefill_kernel, n_keys);
            EXPECT_EQ(scene.judged(1.0f), "");
            EXPECT_EQ(scene.judged(by_prefill_kernel ? 1.008f : 1.001f, by_prefill_kernel ? 4e-3f : 5e-4f), "");
        }
    }
}

TEST(WalkJudge, FindsErrorsOfAllRows) {
    for (const bool by_prefill_kernel : {false, true}) {
        for (const int64_t n_keys : {300, 1200}) {
            SCOPED_TRACE((by_prefill_kernel ? "prefill, " : "decode, ") + std::to_string(n_keys) + " keys");
            Scene scene(by_prefill_kernel, n_keys);
            for (const float factor : {by_prefill_kernel ? 1.25f : 1.1f, 0.5f, 0.0f, -1.0f})
                EXPECT_NE(scene.judged(factor), "") << factor;
            EXPECT_NE(scene.judged(1.0f, by_prefill_kernel ? 8e-3f : 2e-3f), "");
        }
    }
}

}  // namespace
}  // namespace ta::testing
