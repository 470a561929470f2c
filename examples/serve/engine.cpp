#include "engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace serve {
namespace {

constexpr int kBlock = 64;      // tokens
constexpr int kMostDrafts = 7;  // of a step and request, the token that is sure beside them
constexpr int kBranch = 4;      // drafts of a branch
constexpr size_t kRepeats = 3;  // bytes that a draft's past has in common with the present

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

Engine::Engine(tinylm::Model& model, const Options& options)
    : model_(model), shape_(model.attention_shape(1)), options_(options) {
    ta_error err;
    auto context = sized<ta_context_options>();
    context.threads = options.threads;
    check(ta_context_create(&context, &context_, &err), err);
    ta_kv_pool_options o = pool_options(shape_, options.bits);
    o.budget_bytes = options.device_bytes;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = options.host_bytes;
    if (options.host_bytes > 0) o.tiers = &tiers;
    auto numerics = sized<ta_numerics>();
    numerics.batch_invariant = options.batch_invariant ? TA_ON : TA_OFF;
    o.numerics = &numerics;
    check(ta_kv_pool_create(context_, &o, &pool_, &err), err);
    check(ta_plan_create(pool_, nullptr, &plan_, &err), err);
    auto space = sized<ta_namespace_options>();
    std::memcpy(space.salt, "one tenant, and nothing secret..", sizeof space.salt);
    check(ta_namespace_create(pool_, &space, &space_, &err), err);
}

Engine::~Engine() {
    ta_plan_destroy(plan_);
    ta_kv_pool_destroy(pool_);
    ta_context_destroy(context_);
}

// ------------------------------------------------------------------------------------------------------------- admission

// The requests that wait are admitted in their order. One that finds no room waits for others to end; if it came before the last
// one that runs, that one makes way.
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

// A sequence for the request, with what others have published of its prompt, and room for all that is still to come.
bool Engine::take_in(Member& m) {
    ta_error err;
    if (m.seq == 0) {
        const int shared = options_.prefixes ? (m.size() - 1) / kBlock : 0;
        const std::vector<uint8_t> keys = keys_of(m, shared * kBlock);
        int64_t length = 0;
        check(ta_seq_match_prefix(pool_, space_, keys.data(), uint64_t(shared), &m.seq, &length, &err), err);
        m.fed = int(length);
        counters_.reused_tokens += length;
    }
    if (!options_.reserve) return true;
    const int64_t to_come = int64_t(m.request->prompt.size()) + m.request->most - m.fed + kMostDrafts;
    return check(ta_seq_reserve(pool_, m.seq, to_come, -1, &err), err, TA_E_TIER_FULL) == TA_OK;
}

// The request that was admitted last leaves the device and waits again, if it came after the one that waits.
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

// 32 bytes for each block: what identifies all tokens up to its end. A program with more than one tenant takes a cryptographic hash.
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
    check(ta_seq_publish(pool_, m.seq, space_, keys.data(), uint64_t(tokens / kBlock), &err), err);
}

// ------------------------------------------------------------------------------------------------------------------ steps

// The step's tokens: one for each request that generates, with drafts, and chunks of prompts, in whole blocks where they go on.
void Engine::fill_nodes() {
    int left = options_.step_tokens;
    batch_.clear();
    for (const bool prompts : {false, true}) {
        for (Member& m : running_) {
            if (m.feeds_prompt() != prompts) continue;
            m.nodes.clear();
            int n = 1;
            if (prompts) {
                n = std::min(m.size() - m.fed, left);
                if (options_.drafts) n = std::min(n, kBlock);  // what is promised is for so many in a step with drafts
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

// Drafts the bytes that followed the last few bytes when they stood in the text before, twice: two branches.
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

// False: the batch does not fit. Without reservations the request that came last gives back what it has, and starts anew later.
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
        const ta_status s = check(ta_plan_begin(plan_, uint32_t(seqs.size()), seqs.data(), n_new.data(), nullptr, &o, &err),
                                  err, options_.reserve ? TA_OK : TA_E_TIER_FULL);
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
    const auto rows = int64_t(rows_);
    const auto tensor = [&](const float* x, int heads) {
        return ta_tensor_make(x, TA_DTYPE_F32, rows, heads, shape_.head_dim);
    };
    const ta_tensor tk = tensor(k, shape_.kv_heads), tv = tensor(v, shape_.kv_heads), tq = tensor(q, shape_.heads),
                    to = tensor(out, shape_.heads);
    ta_error err;
    check(ta_append(plan_, uint32_t(layer), &tk, &tv, &err), err);
    check(ta_attend(plan_, uint32_t(layer), &tq, &to, nullptr, nullptr, &err), err);
}

bool Engine::step(Clock::time_point start) {
    admit();
    fill_nodes();
    if (!open_step()) return false;
    run_step(start);
    return true;
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
    const std::span<const float> hidden = model_.forward(bytes, positions, *this);
    std::vector<float> logits(rows_ * tinylm::kVocab);
    model_.logits(hidden, logits.data());
    const double now = std::chrono::duration<double>(Clock::now() - start).count();
    std::vector<int32_t> keep;
    for (Member* m : batch_) keep.push_back(take_tokens(*m, logits.data() + m->first_row * tinylm::kVocab, now));
    ta_error err;
    check(ta_plan_end(plan_, options_.drafts ? keep.data() : nullptr, &err), err);
    ++counters_.steps;
    for (size_t i = running_.size(); i-- > 0;) {
        Member& m = running_[i];
        const Request& r = *m.request;
        if (m.fed >= int(r.prompt.size()) && r.text.size() == 1) publish(m);
        if (int(r.text.size()) < r.most && !r.cancelled) continue;
        finish(m);
        running_.erase(running_.begin() + ptrdiff_t(i));
    }
}

// The most likely byte behind each token that was right: drafts that foresaw it stay. Returns 1 + the index of the last one.
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
