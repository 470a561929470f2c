#include "tools/ta/calibrate.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "tools/ta/cost_file.h"
#include "tools/ta/machine.h"
#include "tools/ta/text_file.h"

namespace ta::tools {
namespace {

using nlohmann::json;

constexpr int kDraws = 200;
constexpr double kCertain = 0.95;  // share of draws

struct Maps {
    std::vector<uint8_t> k_bits, v_bits;  // [layers, kv_heads]
};

// Bytes of a block with this average of bits: interpolated between blocks whose heads all have the next fewer and the next more
// bits.
uint64_t block_bytes_for(const ModelShape& shape, double bits) {
    const int low = bits <= 4 ? 2 : 4, high = 2 * low;
    const auto of_low = double(full_block_bytes(shape, low)), of_high = double(full_block_bytes(shape, high));
    return uint64_t(of_low + (bits - low) / (high - low) * (of_high - of_low));
}

class Chooser {
  public:
    Chooser(const ModelShape& shape, uint64_t block_bytes) : shape_(shape), block_bytes_(block_bytes) {
        ta_context* context = nullptr;
        auto one_thread = sized<ta_context_options>();
        one_thread.threads = 1;
        TA_CHECK(ta_context_create(&one_thread, &context, &error));
        context_.reset(context);
        ta_calibrator* calibrator = nullptr;
        TA_CHECK(ta_calibrator_create(context, shape.layers, shape.kv_heads, shape.head_dim, &calibrator, &error));
        calibrator_.reset(calibrator);
    }
    Maps choose(const std::vector<float>& k, const std::vector<float>& v) const {
        const size_t heads = k.size() / std::size(kBits);
        Maps maps{std::vector<uint8_t>(heads), std::vector<uint8_t>(heads)};
        if (ta_calibrator_choose(calibrator_.get(), k.data(), v.data(), block_bytes_, maps.k_bits.data(), maps.v_bits.data(),
                                 &error) != TA_OK)
            throw WrongInput(shape_.name + ": " + error.message);
        return maps;
    }

  private:
    const ModelShape& shape_;
    const uint64_t block_bytes_;
    std::unique_ptr<ta_context, decltype(&ta_context_destroy)> context_{nullptr, ta_context_destroy};
    std::unique_ptr<ta_calibrator, decltype(&ta_calibrator_destroy)> calibrator_{nullptr, ta_calibrator_destroy};
};

// Sum of the costs of n heads from `first` on.
double sum_of(const CostFile& file, const Maps& maps, size_t first, size_t n) {
    double sum = 0;
    for (size_t i = first; i < first + n; ++i)
        sum += double(file.k.of(i, maps.k_bits[i])) + double(file.v.of(i, maps.v_bits[i]));
    return sum;
}

// The same as JSON: null if a head must not have these bits. Adds the standard error if the costs of blocks were measured.
Json cost_of(const CostFile& file, const Maps& maps, size_t first, size_t n) {
    const double sum = sum_of(file, maps, first, n);
    if (!std::isfinite(sum)) return {{"cost", nullptr}};
    std::vector<double> blocks;
    const auto add = [&](const Costs& costs, size_t head, int bits) {
        if (costs.blocks.empty()) return;
        const std::vector<double>& of_blocks = costs.blocks[Costs::place(head, bits)];
        blocks.resize(std::max(blocks.size(), of_blocks.size()));
        for (size_t b = 0; b < of_blocks.size(); ++b) blocks[b] += of_blocks[b];
    };
    for (size_t head = first; head < first + n; ++head) {
        add(file.k, head, maps.k_bits[head]);
        add(file.v, head, maps.v_bits[head]);
    }
    Json cost{{"cost", sum}};
    if (!blocks.empty()) cost["cost_error"] = standard_error(blocks, file.block_tokens);
    return cost;
}

// How much the maps depend on the text (the block bootstrap). Each draw takes runs of neighbouring blocks from the text with
// replacement, as many blocks as the text has, and the maps are chosen again by their costs.
struct Certainty {
    std::vector<double> k_kept, v_kept;  // share of draws in which a head keeps its bits: [layers, kv_heads]
    double regret = 0;                   // mean over draws: how much more a draw's maps cost by the costs of the whole text
};

Certainty certainty_of(const CostFile& file, const Maps& maps, const Chooser& chooser) {
    const size_t heads = maps.k_bits.size(), blocks = file.block_tokens.size(), run = run_of(blocks);
    Certainty certainty{std::vector<double>(heads), std::vector<double>(heads)};
    std::mt19937_64 random(1);
    for (int draw = 0; draw < kDraws; ++draw) {
        std::vector<double> tokens(blocks);
        for (size_t i = 0, b = 0; i < blocks; ++i) {
            b = i % run == 0 ? random() % blocks : (b + 1) % blocks;
            tokens[b] += file.block_tokens[b];
        }
        const auto drawn = [&](const Costs& costs) {
            std::vector<float> all = costs.all;
            for (size_t i = 0; i < all.size(); ++i)
                if (!costs.blocks[i].empty()) all[i] = float(weighted_mean(costs.blocks[i], tokens));
            return all;
        };
        const Maps others = chooser.choose(drawn(file.k), drawn(file.v));
        for (size_t head = 0; head < heads; ++head) {
            certainty.k_kept[head] += others.k_bits[head] == maps.k_bits[head];
            certainty.v_kept[head] += others.v_bits[head] == maps.v_bits[head];
        }
        certainty.regret += (sum_of(file, others, 0, heads) - sum_of(file, maps, 0, heads)) / kDraws;
    }
    for (std::vector<double>* kept : {&certainty.k_kept, &certainty.v_kept})
        for (double& n : *kept) n /= kDraws;
    return certainty;
}

// K or V of a head: its bits, the share of draws in which it keeps them, and its costs with 8, 4 and 2 bits.
Json unit_of(const char* tensor, size_t head, const CostFile& file, const Costs& costs, int bits, double kept) {
    Json of_bits = Json::array();
    for (const int b : kBits) {
        const float cost = costs.of(head, b);
        const std::vector<double>& blocks = costs.blocks[Costs::place(head, b)];
        of_bits.push_back({{"bits", b}, {"cost", std::isfinite(cost) ? Json(cost) : Json()}});
        if (!blocks.empty()) of_bits.back()["cost_error"] = standard_error(blocks, file.block_tokens);
    }
    return {{"tensor", tensor},
            {"layer", head / file.shape.kv_heads},
            {"head", head % file.shape.kv_heads},
            {"bits", bits},
            {"kept", kept},
            {"costs", of_bits}};
}

// "0.0034 +- 0.00012"
std::string cost_text(const Json& of) {
    char text[64];
    const int n = std::snprintf(text, sizeof text, "%.4g", of["cost"].get<double>());
    if (of.contains("cost_error")) std::snprintf(text + n, sizeof text - size_t(n), " +- %.2g", of["cost_error"].get<double>());
    return text;
}

std::string text_of(const Json& bits) {
    std::string text;
    for (const Json& b : bits) text += (text.empty() ? "" : " ") + b.dump();
    return text;
}

}  // namespace

Json calibrate(const CalibrateOptions& options) {
    if (!(options.bits >= 2 && options.bits <= 8)) throw WrongInput("--bits takes 2 to 8");
    const CostFile file = read_cost_file(options.costs);
    const ModelShape& shape = file.shape;
    const size_t heads = size_t(shape.layers) * shape.kv_heads;
    const uint64_t most = block_bytes_for(shape, options.bits);

    const Chooser chooser(shape, most);
    const Maps maps = chooser.choose(file.k.all, file.v.all);

    Json rows = Json::array(), k_map = Json::array(), v_map = Json::array(), uniform = Json::array();
    size_t sum = 0;
    for (size_t layer = 0; layer < shape.layers; ++layer) {
        const size_t first = layer * shape.kv_heads;
        const auto of_layer = [&](const std::vector<uint8_t>& bits) {
            return Json(std::vector<int>(bits.begin() + ptrdiff_t(first), bits.begin() + ptrdiff_t(first + shape.kv_heads)));
        };
        k_map.push_back(of_layer(maps.k_bits));
        v_map.push_back(of_layer(maps.v_bits));
        rows.push_back({{"layer", layer}, {"k", k_map.back()}, {"v", v_map.back()}});
        rows.back().update(cost_of(file, maps, first, shape.kv_heads));
        for (size_t i = first; i < first + shape.kv_heads; ++i) sum += size_t(maps.k_bits[i]) + maps.v_bits[i];
    }
    for (const int bits : kBits) {
        const std::vector<uint8_t> all(heads, uint8_t(bits));
        uniform.push_back({{"bits", bits}});
        uniform.back().update(cost_of(file, {all, all}, 0, heads));
    }
    if (!options.output.empty()) write_text(options.output, json{{"k_bits", k_map}, {"v_bits", v_map}}.dump() + '\n');
    Json result{{"layers", shape.layers},
                {"kv_heads", shape.kv_heads},
                {"head_dim", shape.head_dim},
                {"bits", double(sum) / double(2 * heads)}};
    result.update(cost_of(file, maps, 0, heads));
    result.update({{"uniform", uniform}, {"k_bits", k_map}, {"v_bits", v_map}, {"rows", rows}});
    if (!file.block_tokens.empty()) {
        const Certainty certainty = certainty_of(file, maps, chooser);
        Json units = Json::array();
        for (size_t head = 0; head < heads; ++head) {
            units.push_back(unit_of("k", head, file, file.k, maps.k_bits[head], certainty.k_kept[head]));
            units.push_back(unit_of("v", head, file, file.v, maps.v_bits[head], certainty.v_kept[head]));
        }
        const auto certain = std::ranges::count_if(units, [](const Json& u) { return u["kept"] >= kCertain; });
        result.update(
            {{"blocks", file.block_tokens.size()}, {"regret", certainty.regret}, {"certain", certain}, {"units", units}});
    }
    return result;
}

void print_calibration(const Json& c, bool all_units) {
    std::printf("%u layers, %u kv heads of %u: %.2f bits on average, at a cost of %s\n", c["layers"].get<unsigned>(),
                c["kv_heads"].get<unsigned>(), c["head_dim"].get<unsigned>(), c["bits"].get<double>(), cost_text(c).c_str());
    for (const Json& u : c["uniform"]) {
        if (!u["cost"].is_null()) std::printf("%s bits everywhere: %s\n", u["bits"].dump().c_str(), cost_text(u).c_str());
    }
    std::vector<Json> rows;
    for (const Json& row : c["rows"])
        rows.push_back({{"layer", row["layer"]}, {"k", text_of(row["k"])}, {"v", text_of(row["v"])}, {"cost", cost_text(row)}});
    print_table(rows, {{"layer", "layer"}, {"k", "bits of K"}, {"v", "bits of V"}, {"cost", "cost"}});
    if (!c.contains("units")) return;

    const double cost = c["cost"].get<double>(), regret = c["regret"].get<double>();
    const std::string blocks = c["blocks"].dump();
    char more[64];
    std::snprintf(more, sizeof more, "%.2g (%.2g%%)", regret, cost > 0 ? 100 * regret / cost : 0);
    std::printf("\n");
    print_wrapped("", "Chosen again " + std::to_string(kDraws) + " times, each time from " + blocks +
                          " blocks drawn from the text's " + blocks + ": " + c["certain"].dump() + " of " +
                          std::to_string(c["units"].size()) + " K and V keep their bits in " +
                          std::to_string(std::lround(100 * kCertain)) + "% of the draws. The maps are expected to cost " +
                          more + " more than the best of their size. Draws and errors take " +
                          std::to_string(run_of(c["blocks"].get<size_t>())) + " neighbouring blocks at a time.");
    std::vector<Json> units;
    for (const Json& u : c["units"]) {
        if (!all_units && u["kept"] >= kCertain) continue;
        units.push_back({{"layer", u["layer"]}, {"head", u["head"]}, {"tensor", u["tensor"]}, {"bits", u["bits"]}});
        units.back()["kept"] = std::to_string(int(100 * u["kept"].get<double>())) + "%";
        for (const Json& of : u["costs"])
            if (!of["cost"].is_null()) units.back()[of["bits"].dump()] = cost_text(of);
    }
    if (units.empty()) return;
    print_table(units, {{"layer", "layer"},
                        {"head", "head"},
                        {"tensor", "of"},
                        {"bits", "bits"},
                        {"kept", "kept in"},
                        {"8", "cost of 8 bits"},
                        {"4", "of 4"},
                        {"2", "of 2"}});
}

}  // namespace ta::tools
