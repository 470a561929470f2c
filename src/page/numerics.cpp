#include "src/page/numerics.h"

#include <algorithm>
#include <cmath>

#include "kernels/format/channels.h"
#include "kernels/format/codec.h"
#include "kernels/format/rotation.h"

namespace ta {
namespace {

constexpr char kName[] = "options.numerics";

Status check_range(const char* field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return {};
    return fail(TA_E_INVALID, "%s.%s is %lld; it takes %lld..%lld", kName, field, (long long)value, (long long)low,
                (long long)high);
}

// In a batch-invariant pool, what is stored for a token must not depend on the other tokens of the step.
Status check_scales_of_tokens(const ta_numerics& n) {
    const char* const wrong = n.k_granularity == TA_GRANULARITY_PAGE    ? "k_granularity is PAGE"
                              : n.v_granularity == TA_GRANULARITY_PAGE  ? "v_granularity is PAGE"
                              : n.open_scale == TA_OPEN_SCALE_UNIVERSAL ? "open_scale is UNIVERSAL"
                              : n.k_turning == TA_ON                    ? "k_turning is on"
                                                                        : nullptr;
    if (!wrong) return {};
    return fail(TA_E_INVALID, "%s.batch_invariant is on, and %s.%s, which depends on the tokens of a step", kName, kName,
                wrong);
}

bool pick(ta_switch given, bool by_profile) {
    return given == TA_DEFAULT ? by_profile : given == TA_ON;
}

}  // namespace

Result<ExpMode> resolve_exp(ta_exp exp, ExpMode fallback, const char* in) {
    switch (exp) {
        case TA_EXP_DEFAULT:
            return fallback;
        case TA_EXP_POLY:
            return ExpMode::kPoly;
        case TA_EXP_EXACT:
            return ExpMode::kExact;
        case TA_EXP_SAS:
            return ExpMode::kSas;
        default:
            return fail(TA_E_INVALID, "%s.exp is %d; it takes a ta_exp", in, exp);
    }
}

Status check_p(ta_p p, const char* in) {
    if (p >= TA_P_DEFAULT && p <= TA_P_U8_RUNNING) return {};
    return fail(TA_E_INVALID, "%s.p is %d; it takes a ta_p", in, p);
}

PFormat p_format(ta_p p, int64_t rows) {
    switch (p) {
        case TA_P_U8:
            return {255, false};
        case TA_P_U16:
            return {65535, false};
        case TA_P_S8_127:
            return {kIntFlashLevels, false};
        case TA_P_S8_119:
            return {kStage1Levels, false};
        case TA_P_S8_127_RUNNING:
            return {kIntFlashLevels, true};
        case TA_P_U8_RUNNING:
            return {255, true};
        default:
            return {rows <= kP16Rows ? 65535 : 255, false};
    }
}

Result<Numerics> resolve_numerics(const ta_numerics* given, std::span<const LayerShape> layers) {
    const ta_numerics n = given ? *given : ta_numerics{};
    TA_RETURN_IF_ERROR(check_range("profile", n.profile, TA_PROFILE_ACCURATE, TA_PROFILE_PAPER));
    TA_RETURN_IF_ERROR(check_range("k_granularity", n.k_granularity, TA_GRANULARITY_DEFAULT, TA_GRANULARITY_PAGE));
    TA_RETURN_IF_ERROR(check_range("v_granularity", n.v_granularity, TA_GRANULARITY_DEFAULT, TA_GRANULARITY_PAGE));
    TA_RETURN_IF_ERROR(check_range("open_scale", n.open_scale, TA_OPEN_SCALE_DEFAULT, TA_OPEN_SCALE_UNIVERSAL));
    TA_RETURN_IF_ERROR(check_range("v_exponents", n.v_exponents, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("fractional_zero", n.fractional_zero, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("v_search", n.v_search, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("k_search", n.k_search, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("unit_slope", n.unit_slope, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("hadamard", n.hadamard, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("k_turning", n.k_turning, TA_DEFAULT, TA_OFF));
    TA_RETURN_IF_ERROR(check_range("batch_invariant", n.batch_invariant, TA_DEFAULT, TA_OFF));
    if (n.batch_invariant == TA_ON) TA_RETURN_IF_ERROR(check_scales_of_tokens(n));
    if (n.q_bits != 0 && n.q_bits != 8 && n.q_bits != 15)
        return fail(TA_E_INVALID, "%s.q_bits is %u; it takes 0, 8 or 15", kName, n.q_bits);
    TA_RETURN_IF_ERROR(check_range("sink_blocks", n.sink_blocks, -1, 1 << 20));
    TA_RETURN_IF_ERROR(check_range("nonfinite", n.nonfinite, TA_NONFINITE_DEFAULT, TA_NONFINITE_SATURATE));
    TA_RETURN_IF_ERROR(check_p(n.p, kName));

    const bool accurate = n.profile == TA_PROFILE_ACCURATE;
    const auto fixed =
        std::find_if(layers.begin(), layers.end(), [](const LayerShape& s) { return !can_rotate(int(s.head_dim)); });
    const bool rotatable = fixed == layers.end();
    if (n.hadamard == TA_ON && !rotatable) {
        return fail(TA_E_UNSUPPORTED, "options.numerics.hadamard is on, but head_dim %u is not a power of two", fixed->head_dim)
            .layer(fixed - layers.begin());
    }
    Numerics r;
    r.profile = n.profile;
    r.batch_invariant = n.batch_invariant == TA_ON;
    const bool alone = r.batch_invariant;
    r.k_page_scale = !alone && n.k_granularity != TA_GRANULARITY_TOKEN;
    r.v_page_scale = !alone && n.v_granularity != TA_GRANULARITY_TOKEN;
    r.k_page_scale_at_8_bits = !alone && (!accurate || n.k_granularity == TA_GRANULARITY_PAGE);
    r.v_page_scale_at_8_bits = !alone && (!accurate || n.v_granularity == TA_GRANULARITY_PAGE);
    r.universal_open_scale =
        n.open_scale == TA_OPEN_SCALE_DEFAULT ? !accurate && !alone : n.open_scale == TA_OPEN_SCALE_UNIVERSAL;
    r.encode.v_exponents = pick(n.v_exponents, accurate);
    r.encode.fractional_zero = pick(n.fractional_zero, accurate);
    r.encode.v_search = pick(n.v_search, accurate);
    r.encode.k_search = pick(n.k_search, accurate);
    r.encode.unit_slope = pick(n.unit_slope, accurate);
    r.hadamard = pick(n.hadamard, accurate && rotatable);
    r.encode.k_turning = pick(n.k_turning, accurate && !alone);
    r.saturate = n.nonfinite == TA_NONFINITE_SATURATE;
    r.hadamard_seed = n.hadamard_seed ? n.hadamard_seed : kDefaultRotationSeed;
    r.sink_blocks = n.sink_blocks < 0 ? 0u : n.sink_blocks > 0 ? uint32_t(n.sink_blocks) : accurate ? 1u : 0u;
    r.q_rest = n.q_bits != 0 ? n.q_bits == 15 : accurate;
    r.p = n.p != TA_P_DEFAULT ? n.p : accurate ? TA_P_AUTO : TA_P_S8_119;
    Result<ExpMode> exp = resolve_exp(n.exp, accurate ? ExpMode::kPoly : ExpMode::kSas, kName);
    if (!exp.ok()) return std::move(exp).status();
    r.exp = exp.value();
    if (n.k_offset) {
        const float* given_offset = n.k_offset;
        for (const LayerShape& s : layers) {
            for (uint32_t head = 0; head < s.kv_heads; ++head, given_offset += s.k_channels) {
                for (uint32_t c = 0; c < s.k_channels; ++c) {
                    if (std::fabs(given_offset[c]) <= kMaxMagnitude) continue;
                    return fail(TA_E_INVALID, "options.numerics.k_offset[%zu] is not finite or above 2^56",
                                size_t(given_offset + c - n.k_offset));
                }
                for (uint32_t c = 0; c < s.head_dim; ++c) {
                    const int from = channel_of(int(c), int(s.head_dim), int(s.k_channels));
                    r.k_offset.push_back(from < 0 ? 0.0f : given_offset[from]);
                }
            }
        }
    }
    return r;
}

ta_numerics describe_numerics(const Numerics& n) {
    const auto granularity = [](bool page, bool at_8_bits) {
        return !page ? TA_GRANULARITY_TOKEN : at_8_bits ? TA_GRANULARITY_PAGE : TA_GRANULARITY_DEFAULT;
    };
    const auto on = [](bool x) { return x ? TA_ON : TA_OFF; };
    ta_numerics r{};
    r.struct_size = sizeof r;
    r.profile = n.profile;
    r.k_granularity = granularity(n.k_page_scale, n.k_page_scale_at_8_bits);
    r.v_granularity = granularity(n.v_page_scale, n.v_page_scale_at_8_bits);
    r.open_scale = n.universal_open_scale ? TA_OPEN_SCALE_UNIVERSAL : TA_OPEN_SCALE_TOKEN;
    r.v_exponents = on(n.encode.v_exponents);
    r.fractional_zero = on(n.encode.fractional_zero);
    r.v_search = on(n.encode.v_search);
    r.k_search = on(n.encode.k_search);
    r.unit_slope = on(n.encode.unit_slope);
    r.hadamard = on(n.hadamard);
    r.k_turning = on(n.encode.k_turning);
    r.sink_blocks = n.sink_blocks > 0 ? int32_t(n.sink_blocks) : -1;
    r.exp = n.exp == ExpMode::kPoly ? TA_EXP_POLY : n.exp == ExpMode::kExact ? TA_EXP_EXACT : TA_EXP_SAS;
    r.p = n.p;
    r.q_bits = n.q_rest ? 15 : 8;
    r.batch_invariant = on(n.batch_invariant);
    r.nonfinite = n.saturate ? TA_NONFINITE_SATURATE : TA_NONFINITE_REJECT;
    r.hadamard_seed = n.hadamard_seed;
    r.k_offset = n.k_offset.empty() ? nullptr : n.k_offset.data();
    return r;
}

}  // namespace ta
