// The ranking of heads against the formula, computed in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "src/page/geometry.h"
#include "support/handles.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 3, kHeads = 4, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;

Calibrator make_calibrator(const Context& context) {
    ta_calibrator* c = nullptr;
    ta_error err;
    require(ta_calibrator_create(context.get(), kLayers, kHeads, kDim, &c, &err), err);
    return Calibrator(c);
}

struct Ranking {
    std::vector<uint8_t> k_bits = std::vector<uint8_t>(kLayers * kHeads), v_bits = k_bits;
    std::vector<float> k_priority = std::vector<float>(kLayers * kHeads), v_priority = k_priority;
    bool operator==(const Ranking&) const = default;
};
Ranking finish(const Calibrator& c, uint32_t n_low) {
    Ranking r;
    ta_error err;
    require(
        ta_calibrator_finish(c.get(), n_low, r.k_bits.data(), r.v_bits.data(), r.k_priority.data(), r.v_priority.data(), &err),
        err);
    return r;
}

void observe(const Calibrator& c, uint32_t layer, Tensor& k, Tensor& v) {
    ta_error err;
    require(ta_calibrator_observe(c.get(), layer, k.view(), v.view(), &err), err);
}

// (max - min over the head) * standard deviation over the channels of (max - min of the channel).
double priority(const std::vector<float>& x, uint32_t head) {
    std::vector<double> ranges;
    double low = 1e300, high = -1e300;
    for (int64_t c = 0; c < kDim; ++c) {
        double channel_low = 1e300, channel_high = -1e300;
        for (size_t t = 0; t < x.size() / size_t(kRow); ++t) {
            const double value = x[t * size_t(kRow) + head * kDim + size_t(c)];
            channel_low = std::min(channel_low, value);
            channel_high = std::max(channel_high, value);
        }
        ranges.push_back(channel_high - channel_low);
        low = std::min(low, channel_low);
        high = std::max(high, channel_high);
    }
    const double mean = std::accumulate(ranges.begin(), ranges.end(), 0.0) / kDim;
    double variance = 0.0;
    for (double r : ranges) variance += (r - mean) * (r - mean) / kDim;
    return (high - low) * std::sqrt(variance);
}

// Heads whose channels differ more and more.
std::vector<float> head_values(Random& random, int64_t tokens, const std::vector<double>& spread) {
    std::vector<float> x;
    for (int64_t t = 0; t < tokens; ++t) {
        for (uint32_t h = 0; h < kHeads; ++h) {
            for (uint32_t c = 0; c < kDim; ++c) x.push_back(random.normal() * float(1.0 + spread[h] * (c % 8)));
        }
    }
    return x;
}

TEST(CalibratorTest, PrioritiesAreTheFormula) {
    const Context context = make_context(1);
    const Calibrator c = make_calibrator(context);
    Random random(1);
    std::vector<std::vector<float>> k, v;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        k.push_back(head_values(random, 50, {0.1, 0.7, 0.3, 0.5}));
        v.push_back(head_values(random, 50, {0.9, 0.2, 0.0, 0.4}));
        Tensor kt(k.back(), 50, kHeads, kDim), vt(v.back(), 50, kHeads, kDim);
        observe(c, layer, kt, vt);
    }
    const Ranking r = finish(c, 2);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t h = 0; h < kHeads; ++h) {
            EXPECT_NEAR(r.k_priority[layer * kHeads + h] / priority(k[layer], h), 1.0, 1e-5);
            EXPECT_NEAR(r.v_priority[layer * kHeads + h] / priority(v[layer], h), 1.0, 1e-5);
        }
        // The two heads that are most even get 2 bits, K and V apart.
        const std::vector<uint8_t> k_bits(r.k_bits.begin() + layer * kHeads, r.k_bits.begin() + (layer + 1) * kHeads);
        const std::vector<uint8_t> v_bits(r.v_bits.begin() + layer * kHeads, r.v_bits.begin() + (layer + 1) * kHeads);
        EXPECT_EQ(k_bits, (std::vector<uint8_t>{2, 4, 2, 4}));
        EXPECT_EQ(v_bits, (std::vector<uint8_t>{4, 2, 2, 4}));
    }
}

TEST(CalibratorTest, EveryCountOfLowHeads) {
    const Context context = make_context(1);
    const Calibrator c = make_calibrator(context);
    Random random(2);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        Tensor t(head_values(random, 20, {0.1, 0.7, 0.3, 0.5}), 20, kHeads, kDim);
        observe(c, layer, t, t);
    }
    for (uint32_t n = 0; n <= kHeads; ++n) {
        const Ranking r = finish(c, n);
        EXPECT_EQ(r.k_bits, r.v_bits);
        EXPECT_EQ(std::count(r.k_bits.begin(), r.k_bits.end(), uint8_t{2}), int64_t(n) * kLayers);
        EXPECT_EQ(std::count(r.k_bits.begin(), r.k_bits.end(), uint8_t{4}), int64_t(kHeads - n) * kLayers);
    }
    // A pool takes the maps as they are.
    const Ranking r = finish(c, 2);
    auto options = pool_options(kLayers, kHeads, kDim, 0);
    options.k_bits = r.k_bits.data();
    options.v_bits = r.v_bits.data();
    EXPECT_LT(stats(make_pool(context, options)).channel_bits_per_element, 4.0);
}

TEST(CalibratorTest, HowTokensArriveDoesNotMatter) {
    const Context context = make_context(1);
    Random random(3);
    for (ta_dtype dtype : kDtypes) {
        const std::vector<float> k = head_values(random, 30, {0.1, 0.7, 0.3, 0.5}),
                                 v = head_values(random, 30, {0.5, 0.1, 0.6, 0.2});
        const Calibrator at_once = make_calibrator(context), bit_by_bit = make_calibrator(context);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor kt(k, 30, kHeads, kDim, dtype), vt(v, 30, kHeads, kDim, dtype);
            observe(at_once, layer, kt, vt);
        }
        for (uint32_t layer = kLayers; layer-- > 0;) {  // other order of layers, pieces, layouts; nothing in between
            Tensor none(0, kHeads, kDim, dtype);
            observe(bit_by_bit, layer, none, none);
            for (int64_t t = 0; t < 30; t += 6) {
                const auto rows = [&](const std::vector<float>& x) {
                    return std::span(x).subspan(size_t(t * kRow), size_t(6 * kRow));
                };
                const Layout layout = kLayouts[size_t(t / 6) % 4];
                Tensor kt(rows(k), 6, kHeads, kDim, dtype, layout), vt(rows(v), 6, kHeads, kDim, dtype, layout);
                observe(bit_by_bit, layer, kt, vt);
            }
        }
        EXPECT_EQ(finish(at_once, 2), finish(bit_by_bit, 2)) << "dtype " << dtype;
    }
}

TEST(CalibratorTest, EqualHeadsKeepTheirOrder) {
    const Context context = make_context(1);
    const Calibrator c = make_calibrator(context);
    Tensor zeros(std::vector<float>(size_t(kRow), 0.0f), 1, kHeads, kDim);
    for (uint32_t layer = 0; layer < kLayers; ++layer) observe(c, layer, zeros, zeros);
    const Ranking r = finish(c, 1);
    EXPECT_EQ(r.k_bits, (std::vector<uint8_t>{2, 4, 4, 4, 2, 4, 4, 4, 2, 4, 4, 4}));
    EXPECT_EQ(r.k_priority, std::vector<float>(kLayers * kHeads, 0.0f));
}

TEST(CalibratorTest, TokensOfNoLayerDoNotCount) {
    const Context context = make_context(1);
    const Calibrator c = make_calibrator(context);
    Tensor one(std::vector<float>(size_t(kRow), 1.0f), 1, kHeads, kDim), none(0, kHeads, kDim);
    observe(c, 0, one, one);
    observe(c, 1, one, one);
    observe(c, 2, none, none);
    Ranking r;
    ta_error err;
    EXPECT_EQ(ta_calibrator_finish(c.get(), 1, r.k_bits.data(), r.v_bits.data(), nullptr, nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.layer, 2);
}

TEST(CalibratorTest, TheLargestValuesDoNotOverflow) {
    const Context context = make_context(1);
    const Calibrator c = make_calibrator(context);
    std::vector<float> x(size_t(2 * kRow), 0x1p56f);
    for (size_t i = 0; i < x.size(); i += 2) x[i] = -0x1p56f;
    for (size_t i = 0; i < size_t(kRow); ++i) x[i] = i % 3 ? 0x1p56f : -0x1p56f;
    Tensor t(x, 2, kHeads, kDim);
    for (uint32_t layer = 0; layer < kLayers; ++layer) observe(c, layer, t, t);
    for (float p : finish(c, 1).k_priority) EXPECT_TRUE(std::isfinite(p));
}

// Against all maps of a small shape: none that fits costs less.
TEST(Calibrator, ChoosesTheMapOfLeastCost) {
    constexpr uint32_t kFew = 2;
    const Context context = make_context(1);
    Random random(4);
    for (const uint32_t dim : {64u, 96u}) {  // at 96 K and V of 2 bits have other sizes
        ta_calibrator* made = nullptr;
        ta_error err;
        require(ta_calibrator_create(context.get(), kFew, kFew, dim, &made, &err), err);
        const Calibrator calibrator(made);
        const auto block_bytes = [&](const uint8_t* k_bits, const uint8_t* v_bits) {
            Result<Geometry> g = Geometry::make(kFew, kFew, dim, 0, k_bits, v_bits);
            return uint64_t(g.value().channel_slot_bytes);
        };
        constexpr uint32_t kUnits = kFew * kFew;
        for (int draw = 0; draw < 20; ++draw) {
            std::vector<float> costs[2];
            for (auto& of : costs) of = random.normals(2 * kUnits);
            const uint8_t twos[kUnits] = {2, 2, 2, 2}, fours[kUnits] = {4, 4, 4, 4};
            const uint64_t least = block_bytes(twos, twos), most = block_bytes(fours, fours);
            for (uint64_t room = least; room <= most + 512; room += 128) {
                uint8_t bits[2][kUnits];
                require(ta_calibrator_choose(made, costs[0].data(), costs[1].data(), room, bits[0], bits[1], &err), err);
                const auto cost_of = [&](const uint8_t(&map)[2][kUnits]) {
                    double sum = 0.0;
                    for (int t = 0; t < 2; ++t) {
                        for (uint32_t u = 0; u < kUnits; ++u) sum += double(costs[t][2 * u + (map[t][u] == 2)]);
                    }
                    return sum;
                };
                double best = 1e300;
                for (uint32_t choice = 0; choice < 1 << 2 * kUnits; ++choice) {
                    uint8_t tried[2][kUnits];
                    for (uint32_t u = 0; u < 2 * kUnits; ++u) tried[u / kUnits][u % kUnits] = choice >> u & 1 ? 2 : 4;
                    if (block_bytes(tried[0], tried[1]) <= room) best = std::min(best, cost_of(tried));
                }
                ASSERT_LE(block_bytes(bits[0], bits[1]), room);
                ASSERT_NEAR(cost_of(bits), best, 1e-9) << "head_dim " << dim << ", " << room << " bytes";
            }
        }
    }
}

}  // namespace
}  // namespace ta::testing
