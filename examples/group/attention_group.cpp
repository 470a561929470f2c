#include "attention_group.h"

#include <stdexcept>
#include <string>

#include "../tinylm/gpu_memory.h"

namespace group_example {
namespace {

using tinylm::AttentionBackend;
using tinylm::AttentionShape;
using tinylm::KvStats;

void check(const char* call, ta_status status, const ta_error& err) {
    if (status == TA_OK) return;
    std::string text = std::string(call) + ": " + ta_status_name(status) + ": " + err.message;
    if (err.rank >= 0) text += ", rank " + std::to_string(err.rank);
    throw std::runtime_error(text);
}

struct Destroy {
    void operator()(ta_context* p) const { ta_context_destroy(p); }
    void operator()(ta_kv_pool* p) const { ta_kv_pool_destroy(p); }
    void operator()(ta_plan* p) const { ta_plan_destroy(p); }
    void operator()(ta_group* p) const { ta_group_destroy(p); }
};
template <typename T>
using Handle = std::unique_ptr<T, Destroy>;

class GroupAttention final : public AttentionBackend {
  public:
    GroupAttention(const AttentionShape& shape, const Member& member) : shape_(shape) {
        if (member.gpu >= 0) gpu_memory_ = tinylm::make_gpu_memory(member.gpu);
        create_pool(member);
        join(member);
        start_sequence();
    }
    ~GroupAttention() override {
        // Ranks in a step learn of the end at once, and not by a timeout.
        if (open_) (void)ta_group_abort(group_.get(), nullptr);
    }

    void reset() override {
        ta_error err{};
        check("ta_seq_truncate", ta_seq_truncate(pool_.get(), seq_, 0, &err), err);
    }
    void begin(int n_new) override {
        ta_error err{};
        n_new_ = n_new;
        open_ = true;
        check("ta_plan_begin", ta_plan_begin(plan_.get(), 1, &seq_, &n_new_, nullptr, nullptr, &err), err);
    }
    void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
        if (!gpu_memory_) return run(layer, q, k, v, out);
        const auto rows = std::size_t(n_new_) * std::size_t(shape_.head_dim);
        const std::size_t n_q = rows * std::size_t(shape_.heads), n_kv = rows * std::size_t(shape_.kv_heads);
        tinylm::run_on_gpu(*gpu_memory_, n_q, n_kv, q, k, v, out,
                           [&](const float* q_at, const float* k_at, const float* v_at, float* out_at) {
                               run(layer, q_at, k_at, v_at, out_at);
                           });
    }
    void end() override {
        ta_error err{};
        check("ta_plan_end", ta_plan_end(plan_.get(), nullptr, &err), err);
        open_ = false;
    }
    KvStats stats() const override {
        ta_kv_pool_stats s{};
        s.struct_size = sizeof s;
        ta_residency r{};
        r.struct_size = sizeof r;
        ta_error err{};
        check("ta_kv_pool_get_stats", ta_kv_pool_get_stats(pool_.get(), &s, &err), err);
        check("ta_seq_residency", ta_seq_residency(pool_.get(), seq_, &r, &err), err);
        KvStats out{.description = "one rank", .bytes = s.bytes_used, .tokens = s.tokens};
        out.device_blocks = r.device_blocks;
        return out;
    }

  private:
    void create_pool(const Member& member) {
        ta_context_options co{};
        co.struct_size = sizeof co;
        co.threads = 1;
        if (member.gpu >= 0) {
            co.device = TA_DEVICE_CUDA;
            co.device_ordinal = member.gpu;
        }
        ta_error err{};
        ta_context* context = nullptr;
        check("ta_context_create", ta_context_create(&co, &context, &err), err);
        context_.reset(context);
        // A rank's share of the blocks, and the blocks of a step, which every rank quantizes.
        const uint64_t blocks = uint64_t(shape_.max_tokens) / 64 / member.ranks + 12;
        ta_kv_pool_options po{};
        po.struct_size = sizeof po;
        po.layers = uint32_t(shape_.layers);
        po.kv_heads = uint32_t(shape_.kv_heads);
        po.head_dim = uint32_t(shape_.head_dim);
        po.budget_bytes = blocks * (2ull * 64 * 2 * po.layers * po.kv_heads * po.head_dim + 65536);
        ta_kv_pool* pool = nullptr;
        check("ta_kv_pool_create", ta_kv_pool_create(context, &po, &pool, &err), err);
        pool_.reset(pool);
        ta_plan* plan = nullptr;
        check("ta_plan_create", ta_plan_create(pool, nullptr, &plan, &err), err);
        plan_.reset(plan);
    }
    void join(const Member& member) {
        ta_group_options options{};
        options.struct_size = sizeof options;
        options.kind = member.kind;
        options.id = &member.id;
        options.rank = member.rank;
        options.ranks = member.ranks;
        ta_error err{};
        ta_group* group = nullptr;
        check("ta_group_create", ta_group_create(context_.get(), &options, &group, &err), err);
        group_.reset(group);
        ta_group_state state = 0;
        check("ta_group_poll", ta_group_poll(group, -1, &state, &err), err);
        check("ta_group_health", ta_group_health(group, &err), err);
    }
    // All ranks append the same keys and values. Each rank keeps its own blocks and attends to them; all get the merged result.
    void run(int layer, const float* q, const float* k, const float* v, float* out) {
        const ta_tensor k_new = ta_tensor_make(k, TA_DTYPE_F32, n_new_, shape_.kv_heads, shape_.head_dim);
        const ta_tensor v_new = ta_tensor_make(v, TA_DTYPE_F32, n_new_, shape_.kv_heads, shape_.head_dim);
        const ta_tensor query = ta_tensor_make(q, TA_DTYPE_F32, n_new_, shape_.heads, shape_.head_dim);
        const ta_tensor result = ta_tensor_make(out, TA_DTYPE_F32, n_new_, shape_.heads, shape_.head_dim);
        ta_attend_options options{};
        options.struct_size = sizeof options;
        options.p = TA_P_U16;  // with 8 bits each rank would round P by a maximum of its own
        ta_error err{};
        check("ta_append", ta_append(plan_.get(), uint32_t(layer), &k_new, &v_new, &err), err);
        check("ta_attend", ta_attend(plan_.get(), uint32_t(layer), &query, &result, nullptr, &options, &err), err);
    }
    void start_sequence() {
        ta_error err{};
        check("ta_seq_create", ta_seq_create(pool_.get(), &seq_, &err), err);
        ta_partition_options options{};
        options.struct_size = sizeof options;
        options.tag = 1;
        check("ta_seq_partition", ta_seq_partition(group_.get(), pool_.get(), seq_, &options, &err), err);
    }

    const AttentionShape shape_;
    std::unique_ptr<tinylm::GpuMemory> gpu_memory_;  // nullptr: a CPU context
    Handle<ta_context> context_;
    Handle<ta_kv_pool> pool_;
    Handle<ta_plan> plan_;
    Handle<ta_group> group_;
    ta_seq seq_ = 0;
    int32_t n_new_ = 0;
    bool open_ = false;
};

}  // namespace

std::unique_ptr<AttentionBackend> make_group_attention(const AttentionShape& shape, const Member& member) {
    return std::make_unique<GroupAttention>(shape, member);
}

}  // namespace group_example
