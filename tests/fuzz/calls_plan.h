// Calls that compute: on plans, dense attention, merges of parts, calibration.
#pragma once

#include <bit>
#include <cmath>

#include "tests/fuzz/calls_prefix.h"

namespace ta::fuzz {

class PlanCalls : public PrefixCalls {
  protected:
    using PrefixCalls::PrefixCalls;

    ta_status plan_create(ta_error* err) {
        ta_plan* out = nullptr;
        if (plans_.size() == kMostHandles) return TA_OK;
        const ta_status s = ta_plan_create(pool(), odd() ? this : nullptr, or_null(&out), err);
        if (s == TA_OK) plans_.push_back(std::make_unique<Plan>(Plan{out}));
        return s;
    }
    ta_status plan_destroy(ta_error*) {
        if (plans_.empty()) return TA_OK;
        const size_t i = plain_ ? plans_.size() - 1 : in_.below(plans_.size());
        ta_plan_destroy(plans_[i]->handle);
        plans_.erase(plans_.begin() + ptrdiff_t(i));
        return TA_OK;
    }
    ta_status plan_set_stream(ta_error* err) { return ta_plan_set_stream(handle(plan()), nullptr, err); }
    ta_status plan_begin(ta_error* err) { return plan_begin_with(false, err); }
    ta_status plan_begin_at(ta_error* err) { return plan_begin_with(true, err); }
    ta_status plan_begin_with(bool positions, ta_error* err) {
        Plan* p = plan();
        const auto n = uint32_t(plain_ ? 1 : in_.below(4));
        auto* seqs = items<ta_seq>(n);
        int32_t *n_new = items<int32_t>(n), *n_query = items<int32_t>(n);
        for (uint32_t i = 0; i < n; ++i) {
            seqs[i] = id(seqs_);
            n_new[i] = int32_t(number(kTokens));
            n_query[i] = int32_t(number(2));
        }
        n_new = array(n_new), n_query = array(n_query);
        ta_step_options how{};
        how.wait_ms = -1;
        how.drafts = ta_switch(number(0));
        how.layers_in_order = ta_switch(number(0));
        int64_t total = 0;  // of tokens that can have a parent
        for (uint32_t i = 0; i < n && n_new && reinterpret_cast<uintptr_t>(n_new) % alignof(int32_t) == 0; ++i)
            total += std::max(n_new[i], 0);
        if (odd() && total <= 4 * kTokens) {
            auto* parents = items<int32_t>(size_t(total));
            for (int64_t i = 0; i < total; ++i) parents[i] = int32_t(number(i % 5 - 1));
            how.tree_parent = array(parents);
        }
        int64_t queries = 0;
        for (uint32_t i = 0; i < n && positions && n_query && reinterpret_cast<uintptr_t>(n_query) % alignof(int32_t) == 0; ++i)
            queries += std::max(n_query[i], 0);
        if (positions && n_query && queries <= 4 * kTokens) {
            auto* at = items<int64_t>(size_t(queries));
            for (int64_t i = 0; i < queries; ++i) at[i] = number(i % 50);
            how.query_positions = array(at);
        }
        const ta_step_options* options = plain_ && !positions ? nullptr : sized(how);
        const ta_status s = ta_plan_begin(handle(p), n, array(seqs), n_new, n_query, options, err);
        if (s != TA_OK) return s;
        p->n_new = p->n_query = p->next_layer = 0;
        for (uint32_t i = 0; i < n; ++i) {
            p->n_new += n_new ? n_new[i] : 0;
            p->n_query += n_query ? n_query[i] : n_new ? n_new[i] : 0;
        }
        return s;
    }
    ta_status append(ta_error* err) {
        Plan* p = plan();
        const int64_t n = p ? p->n_new : kTokens;
        const auto layer = uint32_t(number(p ? p->next_layer : 0));
        const ta_tensor *k = tensor(n, kHeads, kDim), *v = tensor(n, kHeads, kDim);
        const ta_status s = ta_append(handle(p), layer, k, v, err);
        if (s == TA_OK) p->next_layer = layer + 1;
        return s;
    }
    ta_attend_options* attend_options() {
        ta_attend_options o{};
        o.mask = ta_mask(number(TA_MASK_CAUSAL));
        o.exp = ta_exp(number(0));
        o.p = ta_p(number(0));
        o.window = number(0);
        if (odd()) o.scale = std::bit_cast<float>(uint32_t(in_.bits(4)));
        if (odd()) o.softcap = std::bit_cast<float>(uint32_t(in_.bits(4)));
        if (odd()) o.alibi_slopes = array(items<float>(kMostRows, odd() ? INFINITY : -0.5f));
        if (odd()) o.sinks = array(items<float>(kMostRows, odd() ? NAN : 0.5f));
        return plain_ ? nullptr : sized(o);
    }
    float* lse() { return array(items<float>(kMostRows)); }
    ta_status attend(ta_error* err) {
        Plan* p = plan();
        const int64_t n = p ? p->n_query : 1;
        const auto layer = uint32_t(number(p && p->next_layer > 0 ? p->next_layer - 1 : 0));
        const ta_tensor* q = tensor(n, kQHeads, kDim);
        const ta_tensor* out = odd() ? q : tensor(n, kQHeads, kDim);
        return ta_attend(handle(p), layer, q, out, lse(), attend_options(), err);
    }
    ta_status plan_end(ta_error* err) {
        auto* keep = items<int32_t>(4);
        for (int i = 0; i < 4; ++i) keep[i] = int32_t(number(1));
        return ta_plan_end(handle(plan()), odd() ? array(keep) : nullptr, err);
    }
    ta_status plan_abort(ta_error* err) { return ta_plan_abort(handle(plan()), err); }

    ta_status attend_dense(ta_error* err) {
        constexpr uint32_t kBatch = 2;
        ta_dense_options o{};
        o.variant = ta_dense_variant(number(TA_DENSE_INT8_PAGE));
        o.batch = uint32_t(number(1));
        for (const int64_t** offsets : {&o.q_offsets, &o.k_offsets}) {
            if (!odd()) continue;
            auto* list = items<int64_t>(kBatch + 1);
            for (uint32_t i = 0; i <= kBatch; ++i) list[i] = number(i);
            *offsets = array(list);
            if (o.batch > kBatch) o.batch = kBatch;
        }
        o.v_granularity = ta_granularity(number(0));
        o.nonfinite = ta_nonfinite(number(0));
        o.attend = odd() ? attend_options() : nullptr;
        if (odd()) o.stream = reinterpret_cast<ta_stream>(this);
        if (odd()) o.variant = TA_DENSE_DISTR;
        o.group_size = uint32_t(number(0));
        const ta_tensor *q = tensor(3, kQHeads, kDim), *k = tensor(5, kHeads, kDim), *v = tensor(5, kHeads, kDim);
        const ta_tensor* out = tensor(3, kQHeads, kDim);
        return ta_attend_dense(context(), q, k, v, out, lse(), sized(o), err);
    }

    ta_status merge_states(ta_error* err) {
        constexpr size_t kParts = 3;
        std::vector<ta_tensor> parts;
        for (size_t i = 0; i < kParts; ++i) {
            const ta_tensor* t = tensor(3, kQHeads, kDim);
            if (t && t->struct_size == sizeof *t) parts.push_back(*t);
        }
        // Rows may coincide, so there can be more of them than elements: too many have no LSEs.
        const Wide rows = parts.empty() ? Wide(0) : Wide(parts[0].tokens) * parts[0].heads;
        const bool fits = rows >= 0 && rows <= Wide(kMostBytes);
        const auto lse_of_rows = [&](float value) { return fits ? array(items<float>(size_t(rows), value)) : nullptr; };
        auto* list = items<ta_tensor>(parts.size());
        std::copy(parts.begin(), parts.end(), list);
        auto* lses = items<const float*>(kParts);
        for (size_t i = 0; i < kParts; ++i) lses[i] = lse_of_rows(odd() ? NAN : odd() ? -INFINITY : 0.5f);
        const ta_tensor* out = odd() && !parts.empty() ? list : tensor(3, kQHeads, kDim);
        // The arrays do not say how long they are: no more than that.
        const auto n = uint32_t(number(int64_t(parts.size())));
        return ta_merge_states(context(), n <= parts.size() || n > 64 ? n : 0, array(list), array(lses), out, lse_of_rows(0.0f),
                               odd() ? reinterpret_cast<ta_stream>(this) : nullptr, err);
    }

    ta_status calibrator_create(ta_error* err) {
        const auto layers = uint32_t(small_if_right(kLayers, 4096)), heads = uint32_t(small_if_right(kHeads, 1024));
        return created(calibrators_, [&](ta_calibrator** out) {
            return ta_calibrator_create(context(), layers, heads, uint32_t(number(kDim)), out, err);
        });
    }
    ta_status calibrator_create_for(ta_error* err) {
        ta_kv_pool_options o{};
        o.layers = uint32_t(small_if_right(kLayers, 4096));
        o.kv_heads = uint32_t(small_if_right(kHeads, 1024));
        o.head_dim = uint32_t(number(kDim));
        o.v_head_dim = uint32_t(number(0));
        o.n_layer_groups = uint32_t(in_.below(2));
        if (odd()) {
            const auto first = uint32_t(number(0)), layers = uint32_t(number(1)), heads = uint32_t(in_.below(9));
            o.layer_groups = sized(ta_layer_group{0, first, layers, heads, number(100), uint32_t(number(64)), 0});
        }
        return created(calibrators_,
                       [&](ta_calibrator** out) { return ta_calibrator_create_for(context(), sized(o), out, err); });
    }
    ta_status calibrator_destroy(ta_error*) { return destroyed(calibrators_, ta_calibrator_destroy); }
    ta_status calibrator_observe(ta_error* err) {
        ta_calibrator* c = calibrator();
        const auto layer = uint32_t(number(0));
        const ta_tensor *k = tensor(3, kHeads, kDim), *v = tensor(3, kHeads, kDim);
        return ta_calibrator_observe(c, layer, k, v, err);
    }
    ta_status calibrator_finish(ta_error* err) {
        constexpr size_t kMost = 64;  // 8 x 8: small_if_right
        return ta_calibrator_finish(calibrator(), uint32_t(number(1)), or_null(items<uint8_t>(kMost)),
                                    or_null(items<uint8_t>(kMost)), array(items<float>(kMost)), array(items<float>(kMost)),
                                    err);
    }
    ta_status calibrator_choose(ta_error* err) {
        constexpr size_t kMost = 64;
        return ta_calibrator_choose(calibrator(), or_null(items<float>(3 * kMost)), or_null(items<float>(3 * kMost)),
                                    number(1 << 20), or_null(items<uint8_t>(kMost)), or_null(items<uint8_t>(kMost)), err);
    }
};

}  // namespace ta::fuzz
