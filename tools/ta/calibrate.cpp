#include "tools/ta/calibrate.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <vector>

#include "tools/ta/machine.h"
#include "tools/ta/sizes.h"

namespace ta::tools {
namespace {

using nlohmann::json;

constexpr int kBits[] = {8, 4, 2};  // of the costs of a head, in their order

// Costs of K or of V, [layers, kv_heads, 3].
struct Costs {
    std::vector<float> all;
    float of(size_t head, int bits) const { return all[head * 3 + (bits == 8 ? 0 : bits == 4 ? 1 : 2)]; }
};

struct CostFile {
    ModelShape shape;
    Costs k, v;
};

// null: never with these bits.
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

CostFile read_file(const std::string& path) {
    std::ifstream in(path);
    if (!in) throw WrongInput(path + ": cannot be read");
    const json file = json::parse(in, nullptr, false);
    if (!file.is_object() || !file.contains("k") || !file.contains("v") || !file.value("head_dim", json()).is_number_unsigned())
        throw WrongInput(path + " is no JSON object with head_dim, k and v");
    CostFile costs;
    costs.shape.name = path;
    const auto head_dim = file["head_dim"].get<uint64_t>();
    if (head_dim > 256) throw WrongInput(path + ": head_dim is above 256");
    costs.shape.head_dim = uint32_t(head_dim);
    costs.k = read_costs(file["k"], path + ": k", costs.shape);
    costs.v = read_costs(file["v"], path + ": v", costs.shape);
    return costs;
}

// Of a block with so many bits on average: between those whose heads all have the next fewer and the next more bits.
uint64_t block_bytes_for(const ModelShape& shape, double bits) {
    const int low = bits <= 4 ? 2 : 4, high = 2 * low;
    const auto of_low = double(full_block_bytes(shape, low)), of_high = double(full_block_bytes(shape, high));
    return uint64_t(of_low + (bits - low) / (high - low) * (of_high - of_low));
}

// null where a head must not have these bits.
Json sum_of(const CostFile& file, const std::vector<uint8_t>& k_bits, const std::vector<uint8_t>& v_bits, size_t first,
            size_t n) {
    double sum = 0;
    for (size_t i = first; i < first + n; ++i) sum += double(file.k.of(i, k_bits[i])) + double(file.v.of(i, v_bits[i]));
    return std::isfinite(sum) ? Json(sum) : Json();
}

std::string text_of(const Json& bits) {
    std::string text;
    for (const Json& b : bits) text += (text.empty() ? "" : " ") + b.dump();
    return text;
}

}  // namespace

Json calibrate(const CalibrateOptions& options) {
    if (!(options.bits >= 2 && options.bits <= 8)) throw WrongInput("--bits takes 2 to 8");
    const CostFile file = read_file(options.costs);
    const ModelShape& shape = file.shape;
    const size_t heads = size_t(shape.layers) * shape.kv_heads;
    const uint64_t most = block_bytes_for(shape, options.bits);

    ta_context* context = nullptr;
    auto one_thread = sized<ta_context_options>();
    one_thread.threads = 1;
    TA_CHECK(ta_context_create(&one_thread, &context, &error));
    const std::unique_ptr<ta_context, decltype(&ta_context_destroy)> keep(context, ta_context_destroy);
    ta_calibrator* made = nullptr;
    TA_CHECK(ta_calibrator_create(context, shape.layers, shape.kv_heads, shape.head_dim, &made, &error));
    const std::unique_ptr<ta_calibrator, decltype(&ta_calibrator_destroy)> calibrator(made, ta_calibrator_destroy);
    std::vector<uint8_t> k_bits(heads), v_bits(heads);
    if (ta_calibrator_choose(made, file.k.all.data(), file.v.all.data(), most, k_bits.data(), v_bits.data(), &error) != TA_OK)
        throw WrongInput(shape.name + ": " + error.message);

    Json rows = Json::array(), k_map = Json::array(), v_map = Json::array(), uniform = Json::array();
    size_t sum = 0;
    for (size_t layer = 0; layer < shape.layers; ++layer) {
        const size_t first = layer * shape.kv_heads;
        const auto of_layer = [&](const std::vector<uint8_t>& bits) {
            return Json(std::vector<int>(bits.begin() + ptrdiff_t(first), bits.begin() + ptrdiff_t(first + shape.kv_heads)));
        };
        k_map.push_back(of_layer(k_bits));
        v_map.push_back(of_layer(v_bits));
        rows.push_back({{"layer", layer},
                        {"k", k_map.back()},
                        {"v", v_map.back()},
                        {"cost", sum_of(file, k_bits, v_bits, first, shape.kv_heads)}});
        for (size_t i = first; i < first + shape.kv_heads; ++i) sum += size_t(k_bits[i]) + v_bits[i];
    }
    for (const int bits : kBits) {
        const std::vector<uint8_t> all(heads, uint8_t(bits));
        uniform.push_back({{"bits", bits}, {"cost", sum_of(file, all, all, 0, heads)}});
    }
    if (!options.output.empty()) {
        std::ofstream out(options.output);
        out << json{{"k_bits", k_map}, {"v_bits", v_map}}.dump() << '\n';
        if (!out.flush()) throw WrongInput(options.output + ": cannot be written");
    }
    return {{"layers", shape.layers},
            {"kv_heads", shape.kv_heads},
            {"head_dim", shape.head_dim},
            {"bits", double(sum) / double(2 * heads)},
            {"cost", sum_of(file, k_bits, v_bits, 0, heads)},
            {"uniform", uniform},
            {"k_bits", k_map},
            {"v_bits", v_map},
            {"rows", rows}};
}

void print_calibration(const Json& c) {
    std::printf("%u layers, %u kv heads of %u: %.2f bits on average, at a cost of %.4g\n", c["layers"].get<unsigned>(),
                c["kv_heads"].get<unsigned>(), c["head_dim"].get<unsigned>(), c["bits"].get<double>(), c["cost"].get<double>());
    for (const Json& u : c["uniform"]) {
        if (u["cost"].is_null()) continue;
        std::printf("%s everywhere: %.4g\n", (u["bits"].dump() + " bits").c_str(), u["cost"].get<double>());
    }
    std::vector<Json> rows;
    for (const Json& row : c["rows"]) {
        char cost[32];
        std::snprintf(cost, sizeof cost, "%.4g", row["cost"].get<double>());
        rows.push_back({{"layer", row["layer"]}, {"k", text_of(row["k"])}, {"v", text_of(row["v"])}, {"cost", cost}});
    }
    print_table(rows, {{"layer", "layer"}, {"k", "bits of K"}, {"v", "bits of V"}, {"cost", "cost"}});
}

}  // namespace ta::tools
