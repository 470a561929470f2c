#include "tools/ta/info.h"

#include <memory>

#include "tools/ta/machine.h"

namespace ta::tools {
namespace {

using Context = std::unique_ptr<ta_context, decltype(&ta_context_destroy)>;
using Pool = std::unique_ptr<ta_kv_pool, decltype(&ta_kv_pool_destroy)>;

const char* name_of(ta_cpu_isa isa) {
    switch (isa) {
        case TA_CPU_ISA_SCALAR:
            return "scalar";
        case TA_CPU_ISA_AVX2:
            return "avx2";
        case TA_CPU_ISA_AVX_VNNI:
            return "avx-vnni";
        case TA_CPU_ISA_AVX512:
            return "avx512-vnni";
        case TA_CPU_ISA_AMX:
            return "amx-int8";
        default:
            return "unknown";
    }
}

// One device, or why it cannot be used; null: there is no device of this number.
Json device(ta_device_kind kind, int ordinal) {
    auto options = sized<ta_context_options>();
    options.device = kind;
    options.device_ordinal = ordinal;
    ta_context* made = nullptr;
    const ta_status status = ta_context_create(&options, &made, &error);
    const Context context(made, ta_context_destroy);
    Json d = {{"kind", kind == TA_DEVICE_CPU ? "cpu" : "cuda"}, {"ordinal", ordinal}};
    if (status != TA_OK) {
        if (status == TA_E_INVALID) return nullptr;
        d["status"] = ta_status_name(status);
        d["reason"] = error.message;
        return d;
    }
    auto info = sized<ta_context_info>();
    TA_CHECK(ta_context_get_info(context.get(), &info, &error));
    d["name"] = info.device_name;
    if (kind == TA_DEVICE_CUDA) d["compute_capability"] = info.compute_capability;
    d["threads"] = info.threads;
    d["cpu_kernels"] = name_of(info.cpu_isa);
    d["degraded"] = info.degraded;
    return d;
}

// The properties of a small pool's tiers: whether memory is on the node that was asked for, and how the disk is accessed.
Json tiers() {
    Json list = Json::array();
    ta_context* context = nullptr;
    TA_CHECK(ta_context_create(nullptr, &context, &error));
    const Context keep(context, ta_context_destroy);
    for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK}) {
        auto options = sized<ta_kv_pool_options>();
        auto below = sized<ta_tier_options>();
        options.layers = options.kv_heads = 1;
        options.head_dim = 64;
        options.budget_bytes = 1 << 20;
        options.tiers = &below;
        (tier == TA_TIER_HOST ? below.host_bytes : below.disk_bytes) = 4 << 20;
        ta_kv_pool* made = nullptr;
        const ta_status status = ta_kv_pool_create(context, &options, &made, &error);
        const Pool pool(made, ta_kv_pool_destroy);
        Json t = {{"tier", tier == TA_TIER_HOST ? "host" : "disk"}, {"works", status == TA_OK}};
        if (status == TA_OK) {
            auto stats = sized<ta_tier_stats>();
            TA_CHECK(ta_kv_pool_get_tier_stats(pool.get(), tier, &stats, &error));
            t["degraded"] = stats.reason;
        } else {
            t["degraded"] = std::string(ta_status_name(status)) + ": " + error.message;
        }
        list.push_back(std::move(t));
    }
    return list;
}

}  // namespace

std::string library_version() {
    const uint32_t v = ta_version();
    return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

Json collect_info() {
    Json info;
    info["version"] = library_version();
    info["abi"] = ta_abi_version();
    info["build"] = ta_build_info();
    info["devices"] = Json::array({device(TA_DEVICE_CPU, 0)});
    for (int ordinal = 0;; ++ordinal) {
        Json d = device(TA_DEVICE_CUDA, ordinal);
        if (d.is_null()) break;
        // A fault that all GPUs share, such as a missing driver, is reported only once.
        if (d.contains("status") && ordinal > 0 && d["reason"] == info["devices"].back().value("reason", Json())) break;
        info["devices"].push_back(std::move(d));
    }
    info["tiers"] = tiers();
    return info;
}

void print_info(const Json& info) {
    const auto text = [](const Json& x, const char* key) { return x.value(key, std::string()); };
    const auto line = [](std::string label, const std::string& what) {
        label.resize(9, ' ');
        print_wrapped(label + ' ', what);
    };
    const std::string abi = info["abi"].dump();
    line("library", text(info, "build"));
    line("ABI", abi + " (libturboattention.so." + abi + ")");
    for (const Json& d : info["devices"]) {
        const std::string label = d["kind"] == "cpu" ? "CPU" : "GPU " + d["ordinal"].dump();
        if (d.contains("status")) {
            line(d["ordinal"] == 0 ? "GPU" : label, "none: " + text(d, "reason"));
            continue;
        }
        std::string what = text(d, "name");
        if (d.contains("compute_capability")) what += ", sm_" + d["compute_capability"].dump();
        line(label, what + ", " + d["threads"].dump() + " threads, " + text(d, "cpu_kernels") + " kernels");
        if (!text(d, "degraded").empty()) line("", "missing: " + text(d, "degraded"));
    }
    for (const Json& t : info["tiers"]) {
        const std::string degraded = text(t, "degraded");
        line(text(t, "tier") + " tier", std::string(t["works"] == true ? "works" : "does not work") +
                                            (degraded.empty() ? ", nothing missing" : ": " + degraded));
    }
}

}  // namespace ta::tools
