#include "engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace serve {
namespace {

constexpr int kBlock = 64;      // tokens
constexpr int kMostDrafts = 7;  // per request and step, besides the token that is certain
constexpr int kBranch = 4;      // drafts in one branch
constexpr size_t kRepeats = 3;  // bytes that must repeat before a draft is made

template <class T>
T sized() {
    T x{};
    x.struct_size = sizeof x;
    return x;
}

ta_status check(ta_status status, const ta_error& err, ta_status but = TA_OK) {
    if (status == TA_OK || status == but) return status;
    throw std::runtime_error(std::string(ta_status_name(status)) + ": " + err.message);
}

ta_kv_pool_options pool_options(const tinylm::AttentionShape& shape, int bits) {
    auto o = sized<ta_kv_pool_options>();
    o.layers = uint32_t(shape.layers);
    o.kv_heads = uint32_t(shape.kv_heads);
    o.head_dim = uint32_t(shape.head_dim);
    o.bits = uint32_t(bits);
    o.budget_bytes = uint64_t{1} << 30;
    return o;
}

}  // namespace

uint64_t Engine::bytes_of_blocks(const tinylm::Model& model, int bits, int blocks) {
    ta_error err;
    ta_context* context = nullptr;
    ta_kv_pool* pool = nullptr;
    check(ta_context_create(nullptr, &context, &err), err);
    const ta_kv_pool_options o = pool_options(model.attention_shape(1), bits);
    check(ta_kv_pool_create(context, &o, &pool, &err), err);
    auto s = sized<ta_kv_pool_stats>();
    check(ta_kv_pool_get_stats(pool, &s, &err), err);
    ta_kv_pool_destroy(pool);
    ta_context_destroy(context);
    return uint64_t(blocks) * std::max(s.channel_block_bytes, bits == 8 ? s.token_block_bytes : 0) + 4 * s.token_block_bytes;
}

Engine::Engine(std::span<tinylm::Model* const> models, const Options& options) : options_(options) {
    for (tinylm::Model* model : models) {
        const tinylm::AttentionShape shape = model->attention_shape(1), first = models[0]->attention_shape(1);
        if (shape.layers != first.layers || shape.kv_heads != first.kv_heads || shape.head_dim != first.head_dim) {
            throw std::runtime_error("the models' caches have different shapes: each needs a pool of its own");
        }
        models_.push_back({model, shape});
    }
    if (options.gpu) gpu_memory_ = tinylm::make_gpu_memory();
    ta_error err;
    auto context = sized<ta_context_options>();
    context.threads = options.threads;
    if (options.gpu) context.device = TA_DEVICE_CUDA;
    check(ta_context_create(&context, &context_, &err), err);
    ta_kv_pool_options o = pool_options(models_[0].shape, options.bits);
    o.budget_bytes = options.device_bytes;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = options.host_bytes;
    if (options.host_bytes > 0) o.tiers = &tiers;
    auto numerics = sized<ta_numerics>();
    numerics.batch_invariant = options.batch_invariant ? TA_ON : TA_OFF;
    o.numerics = &numerics;
    check(ta_kv_pool_create(context_, &o, &pool_, &err), err);
    for (size_t i = 0; i < models_.size(); ++i) {
        check(ta_plan_create(pool_, nullptr, &models_[i].plan, &err), err);
        auto space = sized<ta_namespace_options>();
        std::memcpy(space.salt, "one tenant, and nothing secret..", sizeof space.salt);
        space.salt[0] = uint8_t(i);
        check(ta_namespace_create(pool_, &space, &models_[i].space, &err), err);
    }
}

Engine::~Engine() {
    for (const Served& served : models_) ta_plan_destroy(served.plan);
    ta_kv_pool_destroy(pool_);
    ta_context_destroy(context_);
}

// ------------------------------------------------------------------------------------------------------------- admission

// Admits waiting requests in their order. If one finds no room, it waits until others end. If it arrived before the latest one
// that runs, that one is preempted.
void Engine::admit() {
    while (!waiting_.empty() && running_.size() < size_t(options_.most_running)) {
        Member& next = waiting_.front();
        if (!take_in(next)) {
            ++counters_.refused;
            if (!make_way()) return;
            continue;
        }
        running_.push_back(std::move(next));
        waiting_.pop_front();
    }
}

// Gives the request a sequence, with the published blocks of its prompt, and reserves room for all that is still to come.
// False: no room.
bool Engine::take_in(Member& m) {
    ta_error err;
    if (m.seq == 0) {
        const int shared = options_.prefixes ? (m.size() - 1) / kBlock : 0;
        const std::vector<uint8_t> keys = keys_of(m, shared * kBlock);
        int64_t length = 0;
        check(ta_seq_match_prefix(pool_, models_[m.request->model].space, keys.data(), uint64_t(shared), &m.seq, &length, &err),
              err);
        m.fed = int(length);
        counters_.reused_tokens += length;
    }
    if (!options_.reserve) return true;
    const int64_t to_come = int64_t(m.request->prompt.size()) + m.request->most - m.fed + kMostDrafts;
    return check(ta_seq_reserve(pool_, m.seq, to_come, -1, &err), err, TA_E_TIER_FULL) == TA_OK;
}

// Preempts the running request that arrived last: it leaves the device and waits again. False: none arrived after the request
// that waits, or preemption is impossible.
bool Engine::make_way() {
    if (!options_.reserve || options_.host_bytes == 0 || running_.size() < 2) return false;
    const auto last = std::max_element(running_.begin(), running_.end(), [](const Member& a, const Member& b) {
        return a.request->arrival < b.request->arrival;
    });
    if (last->request->arrival <= waiting_.front().request->arrival) return false;
    ta_error err;
    ta_ticket ticket = 0;
    check(ta_seq_suspend(pool_, last->seq, TA_TIER_HOST, &ticket, &err), err);
    auto info = sized<ta_move_info>();
    check(ta_move_wait(pool_, ticket, -1, &info, &err), err);
    ++counters_.preempted;
    waiting_.insert(waiting_.begin() + 1, std::move(*last));
    running_.erase(last);
    return true;
}

// A key of 32 bytes per block, which identifies all tokens up to the block's end. A program with several tenants uses a
// cryptographic hash.
std::vector<uint8_t> Engine::keys_of(const Member& m, int tokens) const {
    std::vector<uint8_t> keys(size_t(tokens / kBlock) * 32);
    std::array<uint64_t, 4> h{1, 2, 3, 4};
    for (int i = 0; i < tokens; ++i) {
        for (uint64_t& x : h) x = (x ^ m.at(i)) * 0x100000001b3u + (x >> 29);
        if (i % kBlock == kBlock - 1) std::memcpy(keys.data() + size_t(i / kBlock) * 32, h.data(), 32);
    }
    return keys;
}

void Engine::publish(const Member& m) {
    if (!options_.prefixes) return;
    const int tokens = int(m.request->prompt.size()) / kBlock * kBlock;
    const std::vector<uint8_t> keys = keys_of(m, tokens);
    ta_error err;
    check(ta_seq_publish(pool_, m.seq, models_[m.request->model].space, keys.data(), uint64_t(tokens / kBlock), &err), err);
}

// ------------------------------------------------------------------------------------------------------------------ steps

// Chooses the tokens of a model's step: one for each request that generates, plus drafts, and chunks of prompts. A chunk that
// does not end its prompt ends on a block boundary.
void Engine::fill_nodes(size_t model) {
    int left = options_.step_tokens;
    batch_.clear();
    for (const bool prompts : {false, true}) {
        for (Member& m : running_) {
            if (m.request->model != model || m.feeds_prompt() != prompts) continue;
            m.nodes.clear();
            int n = 1;
            if (prompts) {
                n = std::min(m.size() - m.fed, left);
                if (options_.drafts) n = std::min(n, kBlock);  // the reservation covers this many in a step with drafts
                if (m.fed + n < m.size()) n = std::max(0, (m.fed + n) / kBlock * kBlock - m.fed);
                if (n == 0) continue;
                left -= n;
            }
            for (int i = 0; i < n; ++i) m.nodes.push_back({m.at(m.fed + i), i - 1, i});
            if (!prompts && options_.drafts) add_drafts(m);
            batch_.push_back(&m);
        }
    }
}

// Looks for earlier places where the last few bytes occurred, and drafts the bytes that followed them: up to two branches.
void Engine::add_drafts(Member& m) {
    const int n = m.size(), most = options_.batch_invariant ? 1 : 2;
    int branches = 0;
    for (int at = n - 1; at >= int(kRepeats) && branches < most; --at) {
        bool same = true;
        for (int i = 1; same && i <= int(kRepeats); ++i) same = m.at(at - i) == m.at(n - i);
        if (!same) continue;
        const uint8_t first = m.at(at);
        if (branches == 1 && m.nodes[1].byte == first) continue;
        const int length = std::min({kBranch, n - at, kMostDrafts - int(m.nodes.size()) + 1});
        for (int i = 0; i < length; ++i) m.nodes.push_back({m.at(at + i), i == 0 ? 0 : int32_t(m.nodes.size()) - 1, i + 1});
        ++branches;
    }
    counters_.drafted += int64_t(m.nodes.size()) - 1;
}

// Begins the batch's step; false: the batch is empty. Without reservations, while the batch does not fit, the request that was
// admitted last is released and starts anew later.
bool Engine::open_step() {
    while (!batch_.empty()) {
        std::vector<ta_seq> seqs;
        std::vector<int32_t> n_new, parents;
        for (const Member* m : batch_) {
            seqs.push_back(m->seq);
            n_new.push_back(int32_t(m->nodes.size()));
            for (const Node& node : m->nodes) parents.push_back(node.parent);
        }
        auto o = sized<ta_step_options>();
        o.wait_ms = -1;
        o.layers_in_order = TA_ON;
        if (options_.drafts) o.tree_parent = parents.data();
        ta_error err;
        const ta_status s =
            check(ta_plan_begin(now_->plan, uint32_t(seqs.size()), seqs.data(), n_new.data(), nullptr, &o, &err), err,
                  options_.reserve ? TA_OK : TA_E_TIER_FULL);
        if (s == TA_OK) return true;
        ++counters_.refused;
        Member& last = running_.back();
        check(ta_seq_release(pool_, last.seq, &err), err);
        if (running_.size() == 1) throw std::runtime_error("one request alone does not fit the budgets");
        ++counters_.restarted;
        last.seq = 0;
        last.fed = 0;
        std::erase(batch_, &last);
        waiting_.push_front(std::move(last));
        running_.pop_back();
    }
    return false;
}

void Engine::attend(int layer, const float* q, const float* k, const float* v, float* out) {
    if (!gpu_memory_) return run_layer(layer, q, k, v, out);
    const size_t row = rows_ * size_t(now_->shape.head_dim);
    tinylm::run_on_gpu(*gpu_memory_, row * size_t(now_->shape.heads), row * size_t(now_->shape.kv_heads), q, k, v, out,
                       [&](const float* q_at, const float* k_at, const float* v_at, float* out_at) {
                           run_layer(layer, q_at, k_at, v_at, out_at);
                       });
}

void Engine::run_layer(int layer, const float* q, const float* k, const float* v, float* out) {
    const tinylm::AttentionShape& shape = now_->shape;
    const auto tensor = [&](const float* x, int heads) {
        return ta_tensor_make(x, TA_DTYPE_F32, int64_t(rows_), heads, shape.head_dim);
    };
    const ta_tensor tk = tensor(k, shape.kv_heads), tv = tensor(v, shape.kv_heads), tq = tensor(q, shape.heads),
                    to = tensor(out, shape.heads);
    ta_error err;
    check(ta_append(now_->plan, uint32_t(layer), &tk, &tv, &err), err);
    check(ta_attend(now_->plan, uint32_t(layer), &tq, &to, nullptr, nullptr, &err), err);
}

bool Engine::step(Clock::time_point start) {
    admit();
    bool any = false;
    for (size_t model = 0; model < models_.size(); ++model) {
        now_ = &models_[model];
        fill_nodes(model);
        if (!open_step()) continue;
        run_step(start);
        any = true;
    }
    return any;
}

void Engine::run_step(Clock::time_point start) {
    std::vector<uint8_t> bytes;
    std::vector<int> positions;
    for (Member* m : batch_) {
        m->first_row = bytes.size();
        for (const Node& node : m->nodes) {
            bytes.push_back(node.byte);
            positions.push_back(m->fed + node.depth);
        }
    }
    rows_ = bytes.size();
    const std::span<const float> hidden = now_->model->forward(bytes, positions, *this);
    std::vector<float> logits(rows_ * tinylm::kVocab);
    now_->model->logits(hidden, logits.data());
    const double now = std::chrono::duration<double>(Clock::now() - start).count();
    std::vector<int32_t> keep;
    for (Member* m : batch_) keep.push_back(take_tokens(*m, logits.data() + m->first_row * tinylm::kVocab, now));
    ta_error err;
    check(ta_plan_end(now_->plan, options_.drafts ? keep.data() : nullptr, &err), err);
    ++counters_.steps;
    for (size_t i = running_.size(); i-- > 0;) {
        Member& m = running_[i];
        const Request& r = *m.request;
        if (now_ != &models_[r.model]) continue;
        if (m.fed >= int(r.prompt.size()) && r.text.size() == 1) publish(m);
        if (int(r.text.size()) < r.most && !r.cancelled) continue;
        finish(m);
        running_.erase(running_.begin() + ptrdiff_t(i));
    }
}

// Takes the most likely byte after each token that was right; drafts that predicted it are kept. Returns 1 + the index of the
// last kept token.
int Engine::take_tokens(Member& m, const float* logits, double now) {
    Request& r = *m.request;
    const bool was_prompt = m.feeds_prompt();
    const auto best_after = [&](int node) {
        const float* row = logits + size_t(node) * tinylm::kVocab;
        return uint8_t(std::max_element(row, row + tinylm::kVocab) - row);
    };
    int last = was_prompt ? int(m.nodes.size()) - 1 : 0;
    m.fed += last + 1;
    if (m.fed < m.size()) return last + 1;  // the prompt goes on
    for (;;) {
        const uint8_t next = best_after(last);
        r.text.push_back(char(next));
        r.times.push_back(now);
        r.cancelled = r.cancel_after >= 0 && int(r.text.size()) >= r.cancel_after;
        if (int(r.text.size()) >= r.most || r.cancelled) break;
        int child = -1;
        for (int i = last + 1; i < int(m.nodes.size()) && child < 0; ++i) {
            if (m.nodes[size_t(i)].parent == last && m.nodes[size_t(i)].byte == next) child = i;
        }
        if (was_prompt || child < 0) break;
        last = child;
        ++m.fed;
        ++counters_.accepted;
    }
    return last + 1;
}

void Engine::finish(Member& m) {
    ta_error err;
    check(ta_seq_release(pool_, m.seq, &err), err);
}

}  // namespace serve
