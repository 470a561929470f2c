#include "head_costs.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>

namespace tinylm {
namespace {

using json = nlohmann::ordered_json;

std::size_t place(std::size_t head, int bits) {
    return head * std::size(kBitsOfCosts) + (bits == 8 ? 0 : bits == 4 ? 1 : 2);
}

}  // namespace

double MeasuredCosts::sum(const HeadMap& map) const {
    double sum = 0;
    for (std::size_t head = 0; head < map.k_bits.size(); ++head)
        sum += double{mean.k[place(head, map.k_bits[head])]} + double{mean.v[place(head, map.v_bits[head])]};
    return sum;
}

std::vector<double> MeasuredCosts::sum_of_blocks(const HeadMap& map) const {
    std::vector<double> sums(positions.size());
    const auto add = [&](const std::vector<double>& blocks) {
        for (std::size_t b = 0; b < blocks.size(); ++b) sums[b] += blocks[b];
    };
    for (std::size_t head = 0; head < map.k_bits.size(); ++head) {
        add(k_blocks[place(head, map.k_bits[head])]);
        add(v_blocks[place(head, map.v_bits[head])]);
    }
    return sums;
}

void MeasuredCosts::write(const std::filesystem::path& path, const AttentionShape& shape) const {
    const auto nested = [&](std::size_t n, const auto& value) {  // [layers][kv heads][3]
        json layers = json::array();
        for (std::size_t i = 0; i < n; ++i) {
            const std::size_t head = i / std::size(kBitsOfCosts), heads = static_cast<std::size_t>(shape.kv_heads);
            layers[head / heads][head % heads].push_back(value(i));
        }
        return layers;
    };
    const auto means = [&](const std::vector<float>& of) {
        return nested(of.size(), [&](std::size_t i) { return std::isinf(of[i]) ? json() : json(of[i]); });
    };
    const auto blocks = [&](const std::vector<std::vector<double>>& of) {
        return nested(of.size(), [&](std::size_t i) { return of[i].empty() ? json() : json(of[i]); });
    };
    json out{{"head_dim", shape.head_dim}, {"k", means(mean.k)}, {"v", means(mean.v)}};
    if (positions.size() > 1)
        out.update({{"block_tokens", positions}, {"k_blocks", blocks(k_blocks)}, {"v_blocks", blocks(v_blocks)}});
    std::ofstream file(path);
    file << out.dump() << '\n';
    if (!file.flush()) throw std::runtime_error(path.string() + ": cannot be written");
}

Certainty certainty_of(const MeasuredCosts& costs, const HeadMap& map, const Choose& choose) {
    constexpr int kDraws = 200;
    const std::size_t blocks = costs.positions.size(), run = run_of(blocks);
    Certainty certainty{std::vector<double>(map.k_bits.size()), std::vector<double>(map.k_bits.size())};
    if (blocks < 2) {
        certainty.regret = std::numeric_limits<double>::infinity();
        return certainty;
    }
    std::mt19937_64 random(1);
    std::vector<HeadCosts> draws(kDraws, costs.mean);
    for (HeadCosts& draw : draws) {
        std::vector<double> positions(blocks);
        for (std::size_t i = 0, b = 0; i < blocks; ++i) {
            b = i % run == 0 ? random() % blocks : (b + 1) % blocks;
            positions[b] += costs.positions[b];
        }
        for (const auto& [mean, of_blocks] : {std::pair{&draw.k, &costs.k_blocks}, {&draw.v, &costs.v_blocks}})
            for (std::size_t i = 0; i < mean->size(); ++i)
                if (!(*of_blocks)[i].empty()) (*mean)[i] = static_cast<float>(weighted_mean((*of_blocks)[i], positions));
    }
    for (const HeadMap& other : choose(draws)) {
        for (std::size_t head = 0; head < map.k_bits.size(); ++head) {
            certainty.k_kept[head] += other.k_bits[head] == map.k_bits[head];
            certainty.v_kept[head] += other.v_bits[head] == map.v_bits[head];
        }
        certainty.regret += (costs.sum(other) - costs.sum(map)) / kDraws;
    }
    for (auto* kept : {&certainty.k_kept, &certainty.v_kept})
        for (double& n : *kept) n /= kDraws;
    return certainty;
}

}  // namespace tinylm
