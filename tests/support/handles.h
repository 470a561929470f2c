// The ABI's objects as values, and set-up calls that throw where they fail: GoogleTest reports that as a failure of the test.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/tensor.h"
#include "turboattention.h"
#include "turboattention_experimental.h"

namespace ta::testing {

// A struct of the ABI with its size set and everything else zero.
template <class T>
T sized() {
    T x{};
    x.struct_size = sizeof(T);
    return x;
}

// A set with a progress callback, for a call: ta_seq_save(..., ReportTo(report, &state), ...).
struct ReportTo : ta_progress {
    ReportTo(ta_progress_fn fn, void* to) : ta_progress(sized<ta_progress>()) {
        report = fn;
        user = to;
    }
    operator const ta_progress*() const { return this; }
};

struct Deleter {
    void operator()(ta_context* p) const { ta_context_destroy(p); }
    void operator()(ta_kv_pool* p) const { ta_kv_pool_destroy(p); }
    void operator()(ta_plan* p) const { ta_plan_destroy(p); }
    void operator()(ta_calibrator* p) const { ta_calibrator_destroy(p); }
};
using Context = std::unique_ptr<ta_context, Deleter>;
using KvPool = std::unique_ptr<ta_kv_pool, Deleter>;
using Plan = std::unique_ptr<ta_plan, Deleter>;
using Calibrator = std::unique_ptr<ta_calibrator, Deleter>;

inline void require(ta_status status, const ta_error& err) {
    if (status != TA_OK) throw std::runtime_error(std::string(ta_status_name(status)) + ": " + err.message);
}

inline Context make_context(const ta_context_options& options) {
    ta_context* p = nullptr;
    ta_error err;
    require(ta_context_create(&options, &p, &err), err);
    return Context(p);
}
inline Context make_context(int threads = 1, ta_cpu_isa isa = TA_CPU_ISA_AUTO) {
    auto options = sized<ta_context_options>();
    options.threads = threads;
    options.cpu_isa = isa;
    return make_context(options);
}

inline ta_kv_pool_options pool_options(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t bits = 4,
                                       const ta_numerics* numerics = nullptr) {
    auto options = sized<ta_kv_pool_options>();
    options.layers = layers;
    options.kv_heads = kv_heads;
    options.head_dim = head_dim;
    options.bits = bits;
    options.numerics = numerics;
    options.budget_bytes = uint64_t{1} << 30;
    return options;
}
inline KvPool make_pool(const Context& context, const ta_kv_pool_options& options) {
    ta_kv_pool* p = nullptr;
    ta_error err;
    require(ta_kv_pool_create(context.get(), &options, &p, &err), err);
    return KvPool(p);
}
inline Plan make_plan(const KvPool& pool) {
    ta_plan* p = nullptr;
    ta_error err;
    require(ta_plan_create(pool.get(), nullptr, &p, &err), err);
    return Plan(p);
}
inline ta_seq make_sequence(const KvPool& pool) {
    ta_seq seq = 0;
    ta_error err;
    require(ta_seq_create(pool.get(), &seq, &err), err);
    return seq;
}
inline ta_seq fork_sequence(const KvPool& pool, ta_seq source) {
    ta_seq seq = 0;
    ta_error err;
    require(ta_seq_fork(pool.get(), source, &seq, &err), err);
    return seq;
}

inline void begin(const Plan& plan, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new,
                  const std::vector<int32_t>& n_query = {}) {
    ta_error err;
    require(ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(),
                          n_query.empty() ? nullptr : n_query.data(), nullptr, &err),
            err);
}
inline void append(const Plan& plan, uint32_t layer, Tensor& k, Tensor& v) {
    ta_error err;
    require(ta_append(plan.get(), layer, k.view(), v.view(), &err), err);
}
inline void attend(const Plan& plan, uint32_t layer, Tensor& q, Tensor& out, float* lse = nullptr,
                   const ta_attend_options* options = nullptr) {
    ta_error err;
    require(ta_attend(plan.get(), layer, q.view(), out.view(), lse, options, &err), err);
}
inline void end(const Plan& plan) {
    ta_error err;
    require(ta_plan_end(plan.get(), nullptr, &err), err);
}

inline int64_t length(const KvPool& pool, ta_seq seq) {
    int64_t n = -1;
    ta_error err;
    require(ta_seq_length(pool.get(), seq, &n, &err), err);
    return n;
}
inline ta_kv_pool_stats stats(const KvPool& pool) {
    auto s = sized<ta_kv_pool_stats>();
    ta_error err;
    require(ta_kv_pool_get_stats(pool.get(), &s, &err), err);
    return s;
}
inline ta_context_info info(const Context& context) {
    auto i = sized<ta_context_info>();
    ta_error err;
    require(ta_context_get_info(context.get(), &i, &err), err);
    return i;
}

// The stored K and V of tokens [first, first + n) of one layer, [n, kv_heads, head_dim].
struct Stored {
    std::vector<float> k, v;
    bool operator==(const Stored&) const = default;
};
inline Stored dequantize(const KvPool& pool, ta_seq seq, uint32_t layer, int64_t first, int64_t n, int64_t row) {
    Stored s{std::vector<float>(size_t(n * row)), std::vector<float>(size_t(n * row))};
    ta_error err;
    require(ta_x_seq_dequantize(pool.get(), seq, layer, first, n, s.k.data(), s.v.data(), &err), err);
    return s;
}

// The instruction sets that this CPU can run, scalar first.
inline std::vector<ta_cpu_isa> available_isas() {
    std::vector<ta_cpu_isa> isas;
    for (ta_cpu_isa isa : {TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX_VNNI, TA_CPU_ISA_AVX512, TA_CPU_ISA_AMX}) {
        auto options = sized<ta_context_options>();
        options.threads = 1;
        options.cpu_isa = isa;
        ta_context* p = nullptr;
        if (ta_context_create(&options, &p, nullptr) != TA_OK) continue;
        ta_context_destroy(p);
        isas.push_back(isa);
    }
    return isas;
}

}  // namespace ta::testing
