// The numeric settings of a pool after profile and defaults are applied: see the table in docs/numerics.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "include/turboattention.h"
#include "kernels/format/codec.h"
#include "kernels/format/types.h"
#include "src/core/status.h"
#include "src/page/geometry.h"
#include "src/page/rotary.h"

namespace ta {

struct Numerics {
    ta_profile profile = TA_PROFILE_ACCURATE;  // gives the settings that the caller left open
    bool k_page_scale = true;                  // 64 tokens of K that arrive together get one stage-1 scale
    bool v_page_scale = true;
    bool k_page_scale_at_8_bits = false;  // ... also on pages that stay at 8 bits
    bool v_page_scale_at_8_bits = false;
    bool universal_open_scale = false;
    EncodeOptions encode{true, true, true, true, true, true};
    bool hadamard = true;
    bool saturate = false;
    uint64_t hadamard_seed = 0;
    uint32_t sink_blocks = 1;
    ExpMode exp = ExpMode::kPoly;
    ta_p p = TA_P_AUTO;
    bool q_rest = true;  // decode quantizes queries to 15 bits against K of 8 bits
    bool batch_invariant = false;
    std::vector<float> k_offset;  // [channels of all layers' heads], see Geometry::channel_index; or empty
    Rotary rotary;                // of the caller's embedding; stored pages do not depend on it
};

// `n` may be nullptr: profile accurate. The k_offset of `n` is in channels of callers, that of the result in channels of
// blocks.
Result<Numerics> resolve_numerics(const ta_numerics* n, std::span<const LayerShape> layers);

// The settings as a caller would pass them, with every field decided. The result points into `n`.
ta_numerics describe_numerics(const Numerics& n);

// `in`: what error texts call the struct that the field belongs to.
Result<ExpMode> resolve_exp(ta_exp exp, ExpMode fallback, const char* in);
Status check_p(ta_p p, const char* in);

// TA_P_AUTO takes 16 bits up to this many query rows per kv head.
inline constexpr int kP16Rows = 16;

struct PFormat {
    int levels;
    bool running;
};
PFormat p_format(ta_p p, int64_t rows);

}  // namespace ta
