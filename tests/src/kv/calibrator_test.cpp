// The ranking of heads against the formula, computed in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "kernels/format/layout.h"
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

struct Shape {
    uint32_t layers, kv_heads, head_dim, v_head_dim = 0;
    std::vector<ta_layer_group> groups = {};
};
ta_layer_group group(uint32_t first, uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t v_head_dim) {
    auto g = sized<ta_layer_group>();
    g.first = first;
    g.layers = layers;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    g.v_head_dim = v_head_dim;
    return g;
}
ta_kv_pool_options options_of(const Shape& shape) {
    ta_kv_pool_options o = pool_options(shape.layers, shape.kv_heads, shape.head_dim, 0);
    o.v_head_dim = shape.v_head_dim;
    o.n_layer_groups = uint32_t(shape.groups.size());
    o.layer_groups = shape.groups.data();
    return o;
}
Calibrator make_calibrator(const Context& context, const Shape& shape) {
    ta_calibrator* made = nullptr;
    ta_error err;
    const ta_kv_pool_options options = options_of(shape);
    const bool is_even = shape.groups.empty() && shape.v_head_dim == 0;
    require(is_even ? ta_calibrator_create(context.get(), shape.layers, shape.kv_heads, shape.head_dim, &made, &err)
                    : ta_calibrator_create_for(context.get(), &options, &made, &err),
            err);
    return Calibrator(made);
}

using Bits = std::vector<uint8_t>;
struct Maps {
    Bits k, v;
};
Maps choose(const Calibrator& c, const std::vector<float>& k_costs, const std::vector<float>& v_costs, uint64_t room) {
    Maps maps{Bits(k_costs.size() / 3), Bits(v_costs.size() / 3)};
    ta_error err;
    require(ta_calibrator_choose(c.get(), k_costs.data(), v_costs.data(), room, maps.k.data(), maps.v.data(), &err), err);
    return maps;
}
size_t place_of(uint8_t bits) {
    return bits == 8 ? 0 : bits == 4 ? 1 : 2;
}
double cost_of(const std::vector<float>& costs, const Bits& bits) {
    double sum = 0.0;
    for (size_t i = 0; i < bits.size(); ++i) sum += double(costs[3 * i + place_of(bits[i])]);
    return sum;
}
uint64_t block_bytes(const Shape& s, const Maps& maps) {
    const Geometry g = std::move(Geometry::make({.layers = s.layers,
                                                 .kv_heads = s.kv_heads,
                                                 .head_dim = s.head_dim,
                                                 .v_head_dim = s.v_head_dim,
                                                 .k_bits = maps.k.data(),
                                                 .v_bits = maps.v.data(),
                                                 .groups = s.groups})
                                     .value());
    return g.has_channel_blocks() ? g.channel_slot_bytes : g.token_slot_bytes;
}

// Against all maps of a small shape: none that fits costs less, and none of the same cost is smaller.
TEST(Calibrator, ChoosesTheMapOfLeastCost) {
    constexpr uint32_t kHeadsHere = 4, kChoices = 81;  // of K and of V each
    const Context context = make_context(1);
    Random random(4);
    Bits maps[kChoices];
    for (uint32_t choice = 0; choice < kChoices; ++choice) {
        for (uint32_t u = 0, rest = choice; u < kHeadsHere; ++u, rest /= 3) maps[choice].push_back(uint8_t(8 >> rest % 3));
    }
    std::vector<Shape> shapes{{2, 3, 64, 0, {group(1, 1, 1, 128, 96)}}, {2, 2, 256, 64, {group(0, 1, 0, 64, 64)}}};
    for (const uint32_t dim : {16u, 64u, 80u, 96u, 128u, 160u, 256u}) shapes.push_back({2, 2, dim});
    for (const Shape& shape : shapes) {  // at 96 sizes of K and V are not the same, and no sums
        const uint32_t dim = shape.head_dim;
        const Calibrator calibrator = make_calibrator(context, shape);
        std::vector<uint64_t> sizes;
        for (const Bits& k : maps) {
            for (const Bits& v : maps) sizes.push_back(block_bytes(shape, {k, v}));
        }
        for (int draw = 0; draw < 12; ++draw) {
            std::vector<float> costs[2];
            for (auto& of : costs) {
                of = random.normals(3 * maps[0].size());
                for (float& c : of) {
                    if (draw % 2) c = std::round(2.0f * c);  // many equal sums
                    if (draw % 3 == 2 && random.uniform() < 0.15f) c = std::numeric_limits<float>::infinity();
                }
                for (size_t i = 0; i < of.size(); i += 3) {
                    if (std::isinf(of[i]) && std::isinf(of[i + 1])) of[i + 2] = 0.5f;
                }
            }
            std::vector<double> k_sums, v_sums;
            for (const Bits& map : maps) {
                k_sums.push_back(cost_of(costs[0], map));
                v_sums.push_back(cost_of(costs[1], map));
            }
            std::map<uint64_t, double> best;  // of each size
            for (size_t i = 0; i < sizes.size(); ++i) {
                const double sum = k_sums[i / kChoices] + v_sums[i % kChoices];
                if (std::isinf(sum)) continue;
                double& known = best.try_emplace(sizes[i], sum).first->second;
                known = std::min(known, sum);
            }
            double least = std::numeric_limits<double>::infinity();
            uint64_t least_bytes = 0;
            for (const auto& [bytes, cost] : best) {
                if (cost < least - 1e-9) {
                    least = cost;
                    least_bytes = bytes;
                }
                const Maps chosen = choose(calibrator, costs[0], costs[1], bytes + 64);
                ASSERT_NEAR(cost_of(costs[0], chosen.k) + cost_of(costs[1], chosen.v), least, 1e-9)
                    << "head_dim " << dim << ", draw " << draw << ", " << bytes << " bytes";
                ASSERT_EQ(block_bytes(shape, chosen), least_bytes) << "head_dim " << dim << ", draw " << draw;
            }
            Maps none{Bits(maps[0].size()), Bits(maps[0].size())};
            ta_error err;
            ASSERT_EQ(ta_calibrator_choose(calibrator.get(), costs[0].data(), costs[1].data(), best.begin()->first - 1,
                                           none.k.data(), none.v.data(), &err),
                      TA_E_INVALID);
            EXPECT_EQ(err.bytes, 1u);
        }
    }
}

// Only K differs, in two sizes: the heads that save most get the larger one.
TEST(Calibrator, ChoosesForManyHeads) {
    constexpr uint32_t kMany = 64 * 64;
    constexpr float kNever = std::numeric_limits<float>::infinity();
    const Context context = make_context(1);
    const Shape shape{64, 64, 64};
    const Calibrator calibrator = make_calibrator(context, shape);
    Random random(5);
    std::vector<float> saved(kMany), k_costs, v_costs;
    for (float& s : saved) {
        s = std::abs(random.normal());
        k_costs.insert(k_costs.end(), {0.0f, kNever, s});
        v_costs.insert(v_costs.end(), {0.0f, 0.0f, 0.0f});
    }
    const Maps twos{Bits(kMany, 2), Bits(kMany, 2)};
    std::sort(saved.begin(), saved.end(), std::greater<>());
    const uint64_t more = ChannelLayout(64, 8, 2).bytes() - ChannelLayout(64, 2, 2).bytes();
    for (const size_t larger : {0, 1, 1000, 4000}) {
        const uint64_t room = block_bytes(shape, twos) + larger * more + more - 1;
        const Maps chosen = choose(calibrator, k_costs, v_costs, room);
        EXPECT_NEAR(cost_of(k_costs, chosen.k), std::accumulate(saved.begin() + int64_t(larger), saved.end(), 0.0), 1e-6);
        EXPECT_EQ(chosen.v, twos.v);
    }
    // Equal heads: as many as there is room for.
    for (uint32_t i = 0; i < kMany; ++i) k_costs[3 * i + 2] = 1.0f;
    const Maps chosen = choose(calibrator, k_costs, v_costs, block_bytes(shape, twos) + 1234 * more);
    EXPECT_EQ(std::count(chosen.k.begin(), chosen.k.end(), uint8_t{8}), 1234);
}

// A block of 8 bits throughout is a token block, which is a little smaller than a channel block would be.
TEST(Calibrator, EightBitsThroughoutFitIntoATokenBlock) {
    const Context context = make_context(1);
    const Shape shape{2, 2, 128};
    const Calibrator calibrator = make_calibrator(context, shape);
    const Maps eights{Bits(4, 8), Bits(4, 8)};
    const std::vector<float> costs{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2};
    const uint64_t room = block_bytes(shape, eights);
    EXPECT_EQ(choose(calibrator, costs, costs, room).k, eights.k);
    EXPECT_EQ(choose(calibrator, costs, costs, room).v, eights.v);
    const Maps chosen = choose(calibrator, costs, costs, room - 1);
    EXPECT_EQ(cost_of(costs, chosen.k) + cost_of(costs, chosen.v), 1.0);
}

// Layers of 3 heads of 64 channels, of 1 with K of 128 and V of 96, and of 3 again: each is ranked as it would be alone, and a pool takes
// the maps as they are.
TEST(Calibrator, RanksLayersOfDifferentShapes) {
    const Context context = make_context(1);
    const Shape shape{3, 3, 64, 0, {group(1, 1, 1, 128, 96)}};
    const Calibrator all = make_calibrator(context, shape);
    Random random(6);
    Ranking want{{}, {}, {}, {}};
    for (uint32_t layer = 0; layer < 3; ++layer) {
        const uint32_t heads = layer == 1 ? 1 : 3, k_dim = layer == 1 ? 128 : 64, v_dim = layer == 1 ? 96 : 64;
        Tensor k(random.normals(20 * heads * k_dim), 20, heads, k_dim), v(random.normals(20 * heads * v_dim), 20, heads, v_dim);
        observe(all, layer, k, v);
        for (const bool of_v : {false, true}) {
            const Calibrator alone = make_calibrator(context, {1, heads, of_v ? v_dim : k_dim});
            observe(alone, 0, of_v ? v : k, of_v ? v : k);
            Bits bits(heads), same(heads);
            std::vector<float> priorities(heads);
            ta_error err;
            require(ta_calibrator_finish(alone.get(), 1, bits.data(), same.data(), priorities.data(), nullptr, &err), err);
            Bits& all_bits = of_v ? want.v_bits : want.k_bits;
            std::vector<float>& all_priorities = of_v ? want.v_priority : want.k_priority;
            all_bits.insert(all_bits.end(), bits.begin(), bits.end());
            all_priorities.insert(all_priorities.end(), priorities.begin(), priorities.end());
        }
    }
    Ranking r{Bits(7), Bits(7), std::vector<float>(7), std::vector<float>(7)};
    const auto finish = [&](uint32_t n_low, ta_error* err) {
        return ta_calibrator_finish(all.get(), n_low, r.k_bits.data(), r.v_bits.data(), r.k_priority.data(),
                                    r.v_priority.data(), err);
    };
    ta_error err;
    require(finish(1, &err), err);
    EXPECT_EQ(r, want);
    EXPECT_EQ(finish(2, &err), TA_E_INVALID);  // layer 1 has one
    ta_kv_pool_options options = options_of(shape);
    options.k_bits = r.k_bits.data();
    options.v_bits = r.v_bits.data();
    EXPECT_EQ(stats(make_pool(context, options)).channel_block_bytes, block_bytes(shape, {r.k_bits, r.v_bits}));
}

}  // namespace
}  // namespace ta::testing
