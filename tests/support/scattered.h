// Dense attention whose heads a root scatters over the ranks of a group, beside ta_attend_dense over all of them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/groups.h"

namespace ta::testing::scattered {

// A rank without a pool.
struct Member {
    Context context;
    GroupHandle group;
};
template <class Change>
std::vector<Member> make_members(std::vector<Context> contexts, Change&& change) {
    const ta_group_id id = make_group_id();
    std::vector<Member> members(contexts.size());
    for (uint32_t r = 0; r < members.size(); ++r) {
        members[r].context = std::move(contexts[r]);
        ta_group_options o = group_options(id, r, uint32_t(members.size()));
        change(o);
        members[r].group = make_group(members[r].context, o);
    }
    for (Member& m : members) poll(m.group);
    return members;
}
template <class Change>
std::vector<Member> make_members(uint32_t n, Change&& change) {
    std::vector<Context> contexts;
    for (uint32_t r = 0; r < n; ++r) contexts.push_back(make_context(1));
    return make_members(std::move(contexts), change);
}
inline std::vector<Member> make_members(uint32_t n) {
    return make_members(n, [](ta_group_options&) {});
}

// The inputs of a call.
struct Problem {
    ta_dense_variant variant = TA_DENSE_DISTR;
    int64_t q_tokens = 70, k_tokens = 70, kv_heads = 5, d = 64;
    int32_t group = 1;
    ta_dtype q = TA_DTYPE_F32, k = TA_DTYPE_F32, v = TA_DTYPE_F32, out = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
    ta_mask mask = TA_MASK_CAUSAL;
    uint32_t group_size = 0;
    bool lse = true, slopes = false, sinks = false;
    std::vector<int64_t> q_offsets = {}, k_offsets = {};  // empty: one sequence
    ta_granularity v_granularity = TA_GRANULARITY_DEFAULT;
    uint64_t seed = 1;

    int64_t q_heads() const { return kv_heads * group; }
    std::string name() const {
        return "variant " + std::to_string(variant) + ", " + std::to_string(q_heads()) + "/" + std::to_string(kv_heads) +
               " heads, d " + std::to_string(d) + ", " + std::to_string(q_tokens) + "/" + std::to_string(k_tokens) +
               " tokens, layout " + std::to_string(int(layout));
    }
};

// Its tensors. Copy(tensor) lends one to a call with view(), and fetch() brings the results back; the default is a CPU's.
struct InPlace {
    explicit InPlace(Tensor& t) : tensor(t) {}
    const ta_tensor* view() const { return tensor.view(); }
    void fetch() const {}
    Tensor& tensor;
};

template <class Copy = InPlace>
class Inputs {
  public:
    explicit Inputs(const Problem& p)
        : p_(p),
          random_(p.seed),
          q_(random_.normals(p.q_tokens * p.q_heads() * p.d), p.q_tokens, p.q_heads(), p.d, p.q, p.layout),
          k_(random_.normals(p.k_tokens * p.kv_heads * p.d), p.k_tokens, p.kv_heads, p.d, p.k, p.layout),
          v_(random_.normals(p.k_tokens * p.kv_heads * p.d), p.k_tokens, p.kv_heads, p.d, p.v, p.layout),
          out_(p.q_tokens, p.q_heads(), p.d, p.out, p.layout),
          lse_(p.q_tokens, p.q_heads(), 1),
          slopes_(random_.normals(p.q_heads()), 1, p.q_heads(), 1),
          sinks_(random_.normals(p.q_heads()), 1, p.q_heads(), 1) {
        attend.mask = p.mask;
        if (p.slopes) attend.alibi_slopes = static_cast<const float*>(slopes_copy_.view()->data);
        if (p.sinks) attend.sinks = static_cast<const float*>(sinks_copy_.view()->data);
        options.variant = p.variant;
        options.group_size = p.group_size;
        options.v_granularity = p.v_granularity;
        options.attend = &attend;
        if (!p.q_offsets.empty()) {
            options.batch = uint32_t(p.q_offsets.size() - 1);
            options.q_offsets = p.q_offsets.data();
            options.k_offsets = p.k_offsets.data();
        }
    }
    const ta_tensor* q() const { return q_copy_.view(); }
    const ta_tensor* k() const { return k_copy_.view(); }
    const ta_tensor* v() const { return v_copy_.view(); }
    const ta_tensor* out() const { return out_copy_.view(); }
    float* lse() const { return p_.lse ? static_cast<float*>(lse_copy_.view()->data) : nullptr; }
    // O, then LSE.
    std::vector<float> results() const {
        out_copy_.fetch();
        std::vector<float> all = out_.values();
        if (!p_.lse) return all;
        lse_copy_.fetch();
        const std::vector<float> lse = lse_.values();
        all.insert(all.end(), lse.begin(), lse.end());
        return all;
    }
    bool untouched() const {
        out_copy_.fetch();
        lse_copy_.fetch();
        return out_.all_poison() && lse_.all_poison();
    }
    void set_q(int64_t token, int64_t head, float x) { q_.set(token, head, 0, x); }
    bool gaps_poison() const { return out_.gaps_poison(); }

    ta_attend_options attend = sized<ta_attend_options>();
    ta_dense_options options = sized<ta_dense_options>();

  private:
    Problem p_;
    Random random_;
    Tensor q_, k_, v_, out_, lse_, slopes_, sinks_;
    Copy q_copy_{q_}, k_copy_{k_}, v_copy_{v_}, out_copy_{out_}, lse_copy_{lse_}, slopes_copy_{slopes_}, sinks_copy_{sinks_};
};

// How one rank's call ended.
struct Given {
    ta_status status = TA_OK;
    int32_t rank = -1, argument = -1;
    std::string text;
    ta_x_scatter_info info = sized<ta_x_scatter_info>();
};

// One rank's arguments beside the tensors.
struct Asked {
    uint32_t root = 0;
    ta_x_scatter_options scatter = sized<ta_x_scatter_options>();
    bool calls = true;
    std::chrono::milliseconds later{0};  // than the others
};

template <class Copy = InPlace>
Given call(const Member& member, const Inputs<Copy>* of_root, const Asked& asked) {
    Given given;
    ta_error err{};
    if (of_root) {
        given.status =
            ta_x_group_attend_dense(member.group.get(), of_root->q(), of_root->k(), of_root->v(), of_root->out(),
                                    of_root->lse(), &of_root->options, asked.root, &asked.scatter, &given.info, &err);
    } else {
        given.status = ta_x_group_attend_dense(member.group.get(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                               asked.root, &asked.scatter, &given.info, &err);
    }
    if (given.status == TA_OK) return given;
    given.rank = err.rank;
    given.argument = err.argument;
    given.text = err.message;
    return given;
}

// By a rank that is not the root.
inline Given call_elsewhere(const Member& member, const Asked& asked = {}) {
    return call(member, static_cast<const Inputs<>*>(nullptr), asked);
}

// All ranks at once; `change` may alter what one of them asks.
template <class Copy = InPlace>
std::vector<Given> call_all(
    const std::vector<Member>& members, const Inputs<Copy>& inputs, const Asked& root_asks,
    const std::function<void(uint32_t rank, Asked&)>& change = [](uint32_t, Asked&) {}) {
    std::vector<Given> given(members.size());
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < members.size(); ++r) {
        Asked asked = root_asks;
        if (r != root_asks.root) asked.scatter.heads_per_round = 0, asked.scatter.rank_heads = nullptr;
        change(r, asked);
        if (!asked.calls) continue;
        threads.emplace_back([&, r, asked] {
            std::this_thread::sleep_for(asked.later);
            given[r] = call(members[r], asked.root == r ? &inputs : nullptr, asked);
        });
    }
    for (std::thread& t : threads) t.join();
    return given;
}

// By one call on one rank.
template <class Copy = InPlace>
std::vector<float> whole(const Context& context, const Problem& p) {
    const Inputs<Copy> inputs(p);
    ta_error err;
    require(
        ta_attend_dense(context.get(), inputs.q(), inputs.k(), inputs.v(), inputs.out(), inputs.lse(), &inputs.options, &err),
        err);
    return inputs.results();
}

template <class Copy = InPlace>
std::vector<Given> expect_bits(
    const std::vector<Member>& members, const Problem& p, const Asked& asked = {},
    const std::function<void(uint32_t rank, Asked&)>& change = [](uint32_t, Asked&) {}) {
    const Inputs<Copy> inputs(p);
    const std::vector<Given> given = call_all(members, inputs, asked, change);
    for (uint32_t r = 0; r < members.size(); ++r)
        EXPECT_EQ(given[r].status, TA_OK) << p.name() << ", rank " << r << ": " << given[r].text;
    EXPECT_TRUE(same_bits(inputs.results(), whole<Copy>(members[asked.root].context, p))) << p.name();
    EXPECT_TRUE(inputs.gaps_poison()) << p.name();
    return given;
}

}  // namespace ta::testing::scattered
