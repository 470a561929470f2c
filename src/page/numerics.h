// The numeric settings of a pool after profile and defaults are applied. docs/numerics.md has the table.
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
    ta_profile profile = TA_PROFILE_ACCURATE;  // where the rest came from that was not given
    bool k_page_scale = true;                  // one stage-1 scale for 64 tokens of K that arrive together
    bool v_page_scale = true;
    bool k_page_scale_at_8_bits = false;  // also on pages that stay at 8 bits
    bool v_page_scale_at_8_bits = false;
    bool universal_open_scale = false;
    EncodeOptions encode{true, true, true, true, true, true};
    bool hadamard = true;
    bool saturate = false;
    uint64_t hadamard_seed = 0;
    uint32_t sink_blocks = 1;
    ExpMode exp = ExpMode::kPoly;
    ta_p p = TA_P_AUTO;
    bool q_rest = true;  // queries of 15 bits in decode, against K at 8 bits
    bool batch_invariant = false;
    std::vector<float> k_offset;  // [channels of all layers' heads], see Geometry::channel_index; or empty
    Rotary rotary;                // of callers; stored pages do not depend on it
};

// `n` may be nullptr: profile accurate. Its k_offset has the channels of callers, the result's those of blocks.
Result<Numerics> resolve_numerics(const ta_numerics* n, std::span<const LayerShape> layers);

// The settings as a caller would give them, with every field decided. Points to `n`.
ta_numerics describe_numerics(const Numerics& n);

// `in`: what texts call the struct that has the field.
Result<ExpMode> resolve_exp(ta_exp exp, ExpMode fallback, const char* in);
Status check_p(ta_p p, const char* in);

// Rows of one kv head up to which TA_P_AUTO takes 16 bits.
inline constexpr int kP16Rows = 16;

struct PFormat {
    int levels;
    bool running;
};
PFormat p_format(ta_p p, int64_t rows);

}  // namespace ta
