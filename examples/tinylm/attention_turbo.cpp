#include "attention_turbo.h"

#include <turboattention.h>
#include <turboattention_experimental.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>

#include "gpu_memory.h"
#include "model.h"
#include "parallel.h"
#include "safetensors.h"

namespace tinylm {
namespace {

using json = nlohmann::json;

void check(const char* call, ta_status status, const ta_error& err) {
    if (status == TA_OK) return;
    std::string text = std::string(call) + ": " + ta_status_name(status) + ": " + err.message;
    if (err.layer >= 0) text += ", layer " + std::to_string(err.layer);
    if (err.head >= 0) text += ", head " + std::to_string(err.head);
    if (err.token >= 0) text += ", token " + std::to_string(err.token);
    throw std::runtime_error(text);
}

// The library's handles may be destroyed in any order.
struct Destroy {
    void operator()(ta_context* p) const { ta_context_destroy(p); }
    void operator()(ta_kv_pool* p) const { ta_kv_pool_destroy(p); }
    void operator()(ta_plan* p) const { ta_plan_destroy(p); }
    void operator()(ta_calibrator* p) const { ta_calibrator_destroy(p); }
};
template <typename T>
using Handle = std::unique_ptr<T, Destroy>;

Handle<ta_context> make_context(int threads, bool gpu = false) {
    ta_context_options options{};
    options.struct_size = sizeof options;
    options.threads = threads;
    if (gpu) options.device = TA_DEVICE_CUDA;
    ta_context* context = nullptr;
    ta_error err{};
    check("ta_context_create", ta_context_create(&options, &context, &err), err);
    return Handle<ta_context>(context);
}

ta_tensor tensor(const float* data, int tokens, int heads, int head_dim) {
    return ta_tensor_make(data, TA_DTYPE_F32, tokens, heads, head_dim);
}

// Room for the sequence even if all blocks stay at 8 bits: twice their codes, plus padding, which counts most for small blocks.
uint64_t pool_budget(const AttentionShape& shape) {
    const uint64_t blocks = static_cast<uint64_t>(shape.max_tokens) / 64 + 3;
    return blocks * (2ull * 64 * 2 * shape.layers * shape.kv_heads * shape.head_dim + 65536);
}

class TurboAttention final : public AttentionBackend {
  public:
    TurboAttention(const AttentionShape& shape, const TurboOptions& options)
        : shape_(shape), description_(describe(options)), context_(make_context(options.threads, options.gpu)) {
        if (options.gpu) gpu_memory_ = make_gpu_memory();
        create_pool(options);
        ta_plan* plan = nullptr;
        ta_error err{};
        check("ta_plan_create", ta_plan_create(pool_.get(), nullptr, &plan, &err), err);
        plan_.reset(plan);
        check("ta_seq_create", ta_seq_create(pool_.get(), &seq_, &err), err);
    }

    void reset() override {
        ta_error err{};
        check("ta_seq_truncate", ta_seq_truncate(pool_.get(), seq_, 0, &err), err);
        taken_out_ = 0;
    }

    // The library's ranges include tokens that were removed before: each range begins where the previous one did, and is
    // longer.
    void shift(int first, int n) override {
        ta_error err{};
        taken_out_ += n;
        check("ta_seq_shift", ta_seq_shift(pool_.get(), seq_, first, taken_out_, &err), err);
    }

    void begin(int n_new) override {
        ta_error err{};
        n_new_ = n_new;
        ta_step_options in_order{};  // each layer attends right after it got its K and V
        in_order.struct_size = sizeof in_order;
        in_order.layers_in_order = TA_ON;
        check("ta_plan_begin", ta_plan_begin(plan_.get(), 1, &seq_, &n_new_, nullptr, &in_order, &err), err);
    }

    void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
        if (!gpu_memory_) return run(layer, q, k, v, out);
        const std::size_t rows = static_cast<std::size_t>(n_new_) * shape_.head_dim, n_q = rows * shape_.heads,
                          n_kv = rows * shape_.kv_heads;
        run_on_gpu(*gpu_memory_, n_q, n_kv, q, k, v, out,
                   [&](const float* q_at, const float* k_at, const float* v_at, float* out_at) {
                       run(layer, q_at, k_at, v_at, out_at);
                   });
    }

    void end() override {
        ta_error err{};
        check("ta_plan_end", ta_plan_end(plan_.get(), nullptr, &err), err);
    }

    void rest() override {
        if (!tiers_) return;
        ta_ticket ticket = 0;
        ta_move_info info{};
        info.struct_size = sizeof info;
        ta_error err{};
        const ta_residency r = residency();
        const uint64_t blocks = r.device_blocks + r.host_blocks + r.disk_blocks;
        check("ta_seq_move", ta_seq_move(pool_.get(), seq_, 0, blocks, TA_TIER_DISK, &ticket, &err), err);
        check("ta_move_wait", ta_move_wait(pool_.get(), ticket, -1, &info, &err), err);
        if (info.failed > 0) throw std::runtime_error(std::string("a move failed: ") + ta_status_name(info.status));
    }

    KvStats stats() const override {
        const ta_kv_pool_stats s = pool_stats();
        KvStats out{.description = description_, .bytes = s.bytes_used, .tokens = s.tokens - static_cast<uint64_t>(taken_out_)};
        if (!tiers_) return out;
        const ta_residency r = residency();
        ta_move_stats moves{};
        moves.struct_size = sizeof moves;
        ta_error err{};
        check("ta_kv_pool_get_move_stats", ta_kv_pool_get_move_stats(pool_.get(), &moves, &err), err);
        out.bytes = r.device_bytes + r.host_bytes + r.disk_bytes;
        out.device_blocks = r.device_blocks;
        out.host_blocks = r.host_blocks;
        out.disk_blocks = r.disk_blocks;
        out.evicted_bytes = moves.bytes_evicted;
        out.disk_bytes = moves.bytes_asked;
        out.returned_bytes = moves.bytes_needed;
        return out;
    }

  private:
    void run(int layer, const float* q, const float* k, const float* v, float* out) {
        const ta_tensor k_new = tensor(k, n_new_, shape_.kv_heads, shape_.head_dim);
        const ta_tensor v_new = tensor(v, n_new_, shape_.kv_heads, shape_.head_dim);
        const ta_tensor query = tensor(q, n_new_, shape_.heads, shape_.head_dim);
        const ta_tensor result = tensor(out, n_new_, shape_.heads, shape_.head_dim);
        ta_error err{};
        check("ta_append", ta_append(plan_.get(), layer, &k_new, &v_new, &err), err);
        check("ta_attend", ta_attend(plan_.get(), layer, &query, &result, nullptr, nullptr, &err), err);
    }

    // "4"; "4/2" if heads differ.
    static std::string bits_text(const std::vector<uint8_t>& bits) {
        std::string text;
        for (const uint8_t b : {8, 4, 2}) {
            if (std::find(bits.begin(), bits.end(), b) == bits.end()) continue;
            if (!text.empty()) text += '/';
            text += std::to_string(b);
        }
        return text;
    }
    static std::string describe(const TurboOptions& options) {
        const HeadMap& map = options.head_map;
        const std::string k = bits_text(map.k_bits), v = bits_text(map.v_bits);
        const std::string bits = map.empty() ? std::to_string(options.bits) + " bits"
                                 : k == v    ? "mixed " + k + " bits"
                                             : "K " + k + ", V " + v + " bits";
        const std::string queries = options.q_bits > 0 ? ", queries of " + std::to_string(options.q_bits) + " bits" : "";
        return "turbo, " + options.profile + ", " + bits + queries + (options.gpu ? ", on a GPU" : "");
    }

    void create_pool(const TurboOptions& options) {
        ta_numerics numerics{};
        numerics.struct_size = sizeof numerics;
        numerics.profile = options.profile == "paper" ? TA_PROFILE_PAPER : TA_PROFILE_ACCURATE;
        numerics.q_bits = options.q_bits;
        ta_kv_pool_options po{};
        po.struct_size = sizeof po;
        po.layers = shape_.layers;
        po.kv_heads = shape_.kv_heads;
        po.head_dim = shape_.head_dim;
        po.bits = options.bits;
        if (!options.head_map.empty()) {
            po.k_bits = options.head_map.k_bits.data();
            po.v_bits = options.head_map.v_bits.data();
        }
        po.budget_bytes = pool_budget(shape_);
        po.numerics = &numerics;
        std::vector<double> angles;
        for (int i = 0; i < shape_.head_dim / 2; ++i) angles.push_back(std::pow(shape_.rope_theta, -2.0 * i / shape_.head_dim));
        const ta_rotary rotary{sizeof rotary, TA_ROTARY_HALVES, static_cast<uint32_t>(shape_.head_dim), 1, angles.data()};
        po.rotary = &rotary;
        ta_error err{};
        const auto create = [&] {
            ta_kv_pool* pool = nullptr;
            check("ta_kv_pool_create", ta_kv_pool_create(context_.get(), &po, &pool, &err), err);
            pool_.reset(pool);
        };
        create();
        if (options.device_percent == 0 && options.keep_percent == 0) return;
        // Create it again with tiers, now that the size of a block is known: a share of the context, plus the blocks that stay
        // at 8 bits.
        const ta_kv_pool_stats s = pool_stats();
        const uint64_t block = s.channel_block_bytes > 0 ? s.channel_block_bytes : s.token_block_bytes,
                       blocks = shape_.max_tokens / 64 + 1;
        ta_tier_options tiers{};
        tiers.struct_size = sizeof tiers;
        ta_x_tier_tuning tuning{};
        tuning.struct_size = sizeof tuning;
        tuning.attention_half_life = options.half_life;
        tiers.tuning = &tuning;
        tiers.eviction = options.eviction == "attention" ? TA_EVICT_ATTENTION : TA_EVICT_LRU;
        tiers_ = options.device_percent > 0;
        if (tiers_) {
            tiers.host_bytes = tiers.disk_bytes = (blocks + 64) * (block + 8192) * 5 / 4;
        } else {
            tiers.drop_coldest = TA_ON;
        }
        const int percent = tiers_ ? options.device_percent : options.keep_percent;
        po.budget_bytes = blocks * block * percent / 100 + 4 * s.token_block_bytes;
        po.tiers = &tiers;
        create();
    }

    ta_kv_pool_stats pool_stats() const {
        ta_kv_pool_stats s{};
        s.struct_size = sizeof s;
        ta_error err{};
        check("ta_kv_pool_get_stats", ta_kv_pool_get_stats(pool_.get(), &s, &err), err);
        return s;
    }

    ta_residency residency() const {
        ta_residency r{};
        r.struct_size = sizeof r;
        ta_error err{};
        check("ta_seq_residency", ta_seq_residency(pool_.get(), seq_, &r, &err), err);
        return r;
    }

    AttentionShape shape_;
    std::string description_;
    bool tiers_ = false;
    Handle<ta_context> context_;
    Handle<ta_kv_pool> pool_;
    Handle<ta_plan> plan_;
    std::unique_ptr<GpuMemory> gpu_memory_;  // null on a CPU
    ta_seq seq_ = 0;
    int32_t n_new_ = 0;
    int64_t taken_out_ = 0;
};

Handle<ta_calibrator> make_calibrator(const Handle<ta_context>& context, const AttentionShape& shape) {
    ta_calibrator* calibrator = nullptr;
    ta_error err{};
    const ta_status status =
        ta_calibrator_create(context.get(), shape.layers, shape.kv_heads, shape.head_dim, &calibrator, &err);
    check("ta_calibrator_create", status, err);
    return Handle<ta_calibrator>(calibrator);
}

HeadMap empty_map(const AttentionShape& shape) {
    const std::size_t heads = static_cast<std::size_t>(shape.layers) * shape.kv_heads;
    return {std::vector<uint8_t>(heads), std::vector<uint8_t>(heads)};
}

// Exact attention that also shows its inputs to a calibrator.
class ObservedAttention final : public AttentionBackend {
  public:
    ObservedAttention(const AttentionShape& shape, Workers& workers)
        : shape_(shape),
          exact_(make_exact_attention(shape, workers)),
          context_(make_context(workers.count())),
          calibrator_(make_calibrator(context_, shape)) {}

    void reset() override { exact_->reset(); }
    void begin(int n_new) override {
        n_new_ = n_new;
        exact_->begin(n_new);
    }
    void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
        const ta_tensor k_new = tensor(k, n_new_, shape_.kv_heads, shape_.head_dim);
        const ta_tensor v_new = tensor(v, n_new_, shape_.kv_heads, shape_.head_dim);
        ta_error err{};
        check("ta_calibrator_observe", ta_calibrator_observe(calibrator_.get(), layer, &k_new, &v_new, &err), err);
        exact_->attend(layer, q, k, v, out);
    }
    void end() override { exact_->end(); }
    void shift(int first, int n) override { exact_->shift(first, n); }
    KvStats stats() const override { return exact_->stats(); }

    HeadMap finish(int low_heads) const {
        HeadMap map = empty_map(shape_);
        ta_error err{};
        const ta_status status =
            ta_calibrator_finish(calibrator_.get(), low_heads, map.k_bits.data(), map.v_bits.data(), nullptr, nullptr, &err);
        check("ta_calibrator_finish", status, err);
        return map;
    }

  private:
    AttentionShape shape_;
    std::unique_ptr<AttentionBackend> exact_;
    Handle<ta_context> context_;
    Handle<ta_calibrator> calibrator_;
    int n_new_ = 0;
};

std::vector<uint8_t> random_bits(const AttentionShape& shape, int low_heads, std::mt19937_64& rng) {
    std::vector<uint8_t> bits;
    for (int layer = 0; layer < shape.layers; ++layer) {
        std::vector<uint8_t> row(shape.kv_heads, 4);
        std::fill_n(row.begin(), low_heads, uint8_t{2});
        for (std::size_t i = row.size(); i > 1; --i)
            std::swap(row[i - 1], row[rng() % i]);  // gives the same order on every
                                                    // system
        bits.insert(bits.end(), row.begin(), row.end());
    }
    return bits;
}

void check_low_heads(const AttentionShape& shape, int low_heads) {
    if (low_heads >= 0 && low_heads <= shape.kv_heads) return;
    throw std::runtime_error("--low-heads must be from 0 to " + std::to_string(shape.kv_heads));
}

std::vector<uint8_t> parse_bits(const json& rows, const AttentionShape& shape) {
    std::vector<uint8_t> bits;
    if (rows.size() != static_cast<std::size_t>(shape.layers)) throw std::runtime_error("one row for each layer is expected");
    for (const json& row : rows) {
        if (row.size() != static_cast<std::size_t>(shape.kv_heads)) {
            throw std::runtime_error("one entry for each kv head is expected");
        }
        for (const json& b : row) {
            if (b != 8 && b != 4 && b != 2) throw std::runtime_error("an entry must be 8, 4 or 2");
            bits.push_back(b.get<uint8_t>());
        }
    }
    return bits;
}

json bits_json(const std::vector<uint8_t>& bits, int kv_heads) {
    json rows = json::array();
    for (auto row = bits.begin(); row != bits.end(); row += kv_heads) rows.push_back(std::vector<int>(row, row + kv_heads));
    return rows;
}

}  // namespace

std::unique_ptr<AttentionBackend> make_turbo_attention(const AttentionShape& shape, const TurboOptions& options) {
    return std::make_unique<TurboAttention>(shape, options);
}

HeadMap calibrate_head_map(Model& model, Workers& workers, std::span<const uint8_t> text, int low_heads) {
    constexpr std::size_t kChunk = 512;
    const AttentionShape shape = model.attention_shape(static_cast<int>(text.size()));
    check_low_heads(shape, low_heads);
    ObservedAttention attention(shape, workers);
    for (std::size_t at = 0; at < text.size(); at += kChunk) {
        model.forward(text.subspan(at, std::min(kChunk, text.size() - at)), static_cast<int>(at), attention);
    }
    return attention.finish(low_heads);
}

HeadMap complement_of(HeadMap map) {
    for (std::vector<uint8_t>* bits : {&map.k_bits, &map.v_bits}) {
        for (uint8_t& b : *bits) b = b == 4 ? 2 : b == 2 ? 4 : b;
    }
    return map;
}

std::vector<HeadMap> choose_head_maps(const AttentionShape& shape, std::span<const HeadCosts> costs, int low_heads) {
    check_low_heads(shape, low_heads);
    const auto context = make_context(1);
    const HeadMap like = random_head_map(shape, low_heads, "0");
    ta_kv_pool_options po{};
    po.struct_size = sizeof po;
    po.layers = shape.layers;
    po.kv_heads = shape.kv_heads;
    po.head_dim = shape.head_dim;
    po.k_bits = like.k_bits.data();
    po.v_bits = like.v_bits.data();
    po.budget_bytes = pool_budget(shape);
    ta_kv_pool* made = nullptr;
    ta_error err{};
    check("ta_kv_pool_create", ta_kv_pool_create(context.get(), &po, &made, &err), err);
    const Handle<ta_kv_pool> pool(made);
    ta_kv_pool_stats s{};
    s.struct_size = sizeof s;
    check("ta_kv_pool_get_stats", ta_kv_pool_get_stats(pool.get(), &s, &err), err);

    const auto calibrator = make_calibrator(context, shape);
    std::vector<HeadMap> maps(costs.size(), empty_map(shape));
    for (std::size_t i = 0; i < costs.size(); ++i) {
        const ta_status status =
            ta_calibrator_choose(calibrator.get(), costs[i].k.data(), costs[i].v.data(), s.channel_block_bytes,
                                 maps[i].k_bits.data(), maps[i].v_bits.data(), &err);
        check("ta_calibrator_choose", status, err);
    }
    return maps;
}

HeadMap same_head_map(const AttentionShape& shape, int k_bits, int v_bits) {
    const std::size_t heads = static_cast<std::size_t>(shape.layers) * shape.kv_heads;
    return {std::vector<uint8_t>(heads, static_cast<uint8_t>(k_bits)),
            std::vector<uint8_t>(heads, static_cast<uint8_t>(v_bits))};
}

HeadMap random_head_map(const AttentionShape& shape, int low_heads, const std::string& seed_text) {
    check_low_heads(shape, low_heads);
    uint64_t seed = 0;
    const char* end = seed_text.data() + seed_text.size();
    if (seed_text.empty() || std::from_chars(seed_text.data(), end, seed).ptr != end) {
        throw std::runtime_error("random:" + seed_text + ": the seed must be a whole number");
    }
    std::mt19937_64 rng(seed);
    HeadMap map;
    map.k_bits = random_bits(shape, low_heads, rng);
    map.v_bits = random_bits(shape, low_heads, rng);
    return map;
}

HeadMap read_head_map(const std::filesystem::path& path, const AttentionShape& shape) {
    constexpr std::size_t kMaxBytes = 1 << 24;
    try {
        const json map = json::parse(read_file(path, kMaxBytes));
        return {parse_bits(map.at("k_bits"), shape), parse_bits(map.at("v_bits"), shape)};
    } catch (const std::exception& e) {
        throw std::runtime_error("head map " + path.string() + ": " + e.what());
    }
}

std::string head_map_json(const HeadMap& map, const AttentionShape& shape) {
    return json{{"k_bits", bits_json(map.k_bits, shape.kv_heads)}, {"v_bits", bits_json(map.v_bits, shape.kv_heads)}}.dump();
}

}  // namespace tinylm
