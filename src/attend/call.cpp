#include "src/attend/call.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ta {
namespace {

Status check_magnitudes(const float* x, int64_t n, float limit, const char* in, const char* field) {
    for (int64_t i = 0; x && i < n; ++i) {
        if (std::fabs(x[i]) <= limit) continue;
        return fail(TA_E_INVALID, "%s.%s[%lld] is %g; it takes finite numbers up to %g", in, field, (long long)i, double(x[i]),
                    double(limit))
            .head(i);
    }
    return {};
}

}  // namespace

Result<AttendSettings> resolve_attend(const ta_attend_options* given, int64_t q_heads, int head_dim, ExpMode exp, ta_p p,
                                      bool readable, const char* name) {
    const ta_attend_options o = given ? *given : ta_attend_options{};
    AttendSettings s;
    if (o.mask != TA_MASK_CAUSAL && o.mask != TA_MASK_FULL)
        return fail(TA_E_INVALID, "%s.mask is %d; it takes a ta_mask", name, o.mask);
    if (!std::isfinite(o.scale) || o.scale < 0.0f || o.scale > 64.0f) {
        return fail(TA_E_INVALID, "%s.scale is %g; it takes a positive number up to 64, or 0 for 1/sqrt(head_dim)", name,
                    double(o.scale));
    }
    if (!std::isfinite(o.softcap) || o.softcap < 0.0f || (o.softcap > 0.0f && (o.softcap < 0x1p-10f || o.softcap > 0x1p14f))) {
        return fail(TA_E_INVALID, "%s.softcap is %g; it takes 2^-10..2^14, or 0 for none", name, double(o.softcap));
    }
    if (o.window < 0) return fail(TA_E_INVALID, "%s.window is %lld; it takes 0 or more", name, (long long)o.window);
    if (readable) {
        // A slope times a distance must stay finite.
        TA_RETURN_IF_ERROR(check_magnitudes(o.alibi_slopes, q_heads, kMaxMagnitude, name, "alibi_slopes"));
        TA_RETURN_IF_ERROR(check_magnitudes(o.sinks, q_heads, std::numeric_limits<float>::max(), name, "sinks"));
    }
    TA_RETURN_IF_ERROR(check_p(o.p, name));
    Result<ExpMode> mode = resolve_exp(o.exp, exp, name);
    if (!mode.ok()) return std::move(mode).status();
    s.mask = o.mask;
    s.scale = o.scale > 0.0f ? o.scale : float(1.0 / std::sqrt(double(head_dim)));
    s.softcap = o.softcap;
    s.window = std::min<int64_t>(o.window, int64_t{1} << 40);
    s.alibi_slopes = o.alibi_slopes;
    s.sinks = o.sinks;
    s.exp = mode.value();
    s.p = o.p != TA_P_DEFAULT ? o.p : p;
    return s;
}

}  // namespace ta
