#include "tools/ta/cost_file.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "tools/ta/machine.h"
#include "tools/ta/text_file.h"

namespace ta::tools {

using nlohmann::json;

double weighted_mean(const std::vector<double>& values, const std::vector<double>& weights) {
    double sum = 0, all = 0;
    for (size_t i = 0; i < values.size(); ++i) sum += weights[i] * values[i], all += weights[i];
    return sum / all;
}

size_t run_of(size_t n) {
    return size_t(std::sqrt(double(n)));
}

double standard_error(const std::vector<double>& means, const std::vector<double>& tokens) {
    const size_t n = means.size(), run = run_of(n);
    const double mean = weighted_mean(means, tokens);
    double squares = 0, all = 0;
    for (size_t first = 0; first < n; ++first) {
        double sum = 0;
        for (size_t i = first; i < first + run; ++i) sum += tokens[i % n] * (means[i % n] - mean);
        squares += sum * sum;
        all += tokens[first];
    }
    return std::sqrt(squares / double(run) * double(n) / double(n - run)) / all;
}

namespace {

// null: the head must not have these bits.
float read_cost(const json& cost, const std::string& where) {
    if (cost.is_null()) return std::numeric_limits<float>::infinity();
    if (!cost.is_number()) throw WrongInput(where + " is no number and not null");
    const auto value = cost.get<double>();
    if (!(std::abs(value) <= double(std::numeric_limits<float>::max()))) throw WrongInput(where + " is too large");
    return float(value);
}

Costs read_costs(const json& given, const std::string& name, ModelShape& shape) {
    const auto refuse = [&] {
        throw WrongInput(name + " is not a list of layers with a list of heads with costs of 8, 4 and 2 bits");
    };
    if (!given.is_array() || given.empty() || !given[0].is_array()) refuse();
    if (shape.layers == 0) {
        shape.layers = uint32_t(given.size());
        shape.kv_heads = uint32_t(given[0].size());
    }
    if (given.size() != shape.layers) throw WrongInput(name + " has another number of layers than k");
    Costs costs;
    for (size_t layer = 0; layer < given.size(); ++layer) {
        if (!given[layer].is_array()) refuse();
        if (given[layer].size() != shape.kv_heads) throw WrongInput(name + " has layers of different numbers of heads");
        for (size_t head = 0; head < shape.kv_heads; ++head) {
            const json& of_head = given[layer][head];
            if (!of_head.is_array() || of_head.size() != std::size(kBits)) refuse();
            const std::string where = name + "[" + std::to_string(layer) + "][" + std::to_string(head) + "]";
            for (const json& cost : of_head) costs.all.push_back(read_cost(cost, where));
        }
    }
    return costs;
}

// Reads the means of blocks, and checks that they average to the costs.
void read_blocks(const json& given, const std::string& name, const std::vector<double>& tokens, Costs& costs) {
    std::vector<json> flat;
    for (const json& layer : given)
        for (const json& head : layer)
            for (const json& blocks : head) flat.push_back(blocks);
    if (flat.size() != costs.all.size()) throw WrongInput(name + " has not the shape of the costs");
    costs.blocks.resize(flat.size());
    for (size_t i = 0; i < flat.size(); ++i) {
        if (flat[i].is_null()) continue;
        const std::string where = name + ", list " + std::to_string(i);
        if (!flat[i].is_array() || flat[i].size() != tokens.size()) throw WrongInput(where + " has not a cost for each block");
        double size = 0;
        for (const json& cost : flat[i]) {
            costs.blocks[i].push_back(double(read_cost(cost, where)));
            size += std::abs(costs.blocks[i].back());
        }
        // The allowance is for rounding in the file. A null among the blocks makes the sum infinite.
        const double allowed = 1e-3 * size / double(tokens.size());
        if (!(std::abs(weighted_mean(costs.blocks[i], tokens) - double(costs.all[i])) <= allowed && std::isfinite(size)))
            throw WrongInput(where + " has another mean than its cost");
    }
}

}  // namespace

CostFile read_cost_file(const std::string& path) {
    const json file = json::parse(read_text(path), nullptr, false);
    if (!file.is_object() || !file.contains("k") || !file.contains("v") || !file.value("head_dim", json()).is_number_unsigned())
        throw WrongInput(path + " is no JSON object with head_dim, k and v");
    CostFile costs;
    costs.shape.name = path;
    const auto head_dim = file["head_dim"].get<uint64_t>();
    if (head_dim > 256) throw WrongInput(path + ": head_dim is above 256");
    costs.shape.head_dim = uint32_t(head_dim);
    costs.k = read_costs(file["k"], path + ": k", costs.shape);
    costs.v = read_costs(file["v"], path + ": v", costs.shape);
    if (!file.contains("block_tokens")) return costs;
    const json& tokens = file["block_tokens"];
    const auto is_count = [](const json& n) { return n.is_number() && n > 0; };
    if (!tokens.is_array() || tokens.size() < 2 || !std::ranges::all_of(tokens, is_count) || !file.contains("k_blocks") ||
        !file.contains("v_blocks"))
        throw WrongInput(path +
                         ": block_tokens is no list of two numbers above 0 or more, or there is no k_blocks or v_blocks");
    tokens.get_to(costs.block_tokens);
    read_blocks(file["k_blocks"], path + ": k_blocks", costs.block_tokens, costs.k);
    read_blocks(file["v_blocks"], path + ": v_blocks", costs.block_tokens, costs.v);
    return costs;
}

}  // namespace ta::tools
