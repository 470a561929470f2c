// The values of a page's turning pairs (kernels/format/turning.h) at its tokens, for step 2 of attend.h.
#pragma once

#include "kernels/cpu/attend.h"
#include "kernels/format/turning.h"

namespace ta::cpu {
namespace {

struct PageTurning {
    int pairs;  // 0: nothing to add
    int channel[kTurningPairs][2];
    alignas(64) float value[kTurningPairs][2][kPageTokens];  // tokens in natural order
};

// Loops that the compiler vectorises.
[[gnu::always_inline]] inline void read_turning(const AttendTask& t, const PageRef& page, PageTurning& out) {
    out.pairs = 0;
    if (!t.q_float) return;
    const TurningPairs found = page.kind == PageKind::kChannel
                                   ? turning_of_channel(page.piece, ChannelLayout(t.head_dim, t.k_bits, t.v_bits))
                                   : turning_of_tokens(page.piece, TokenLayout(t.head_dim));
    for (; out.pairs < kTurningPairs && found.code[out.pairs]; ++out.pairs) {
        const TurningPair p = unpack_turning(found.code[out.pairs]);
        out.channel[out.pairs][0] = p.first;
        out.channel[out.pairs][1] = p.second;
        auto& value = out.value[out.pairs];
        for (int j = 0; j < kPageTokens; ++j) {
            const TurningValues at = turning_values(p, j);
            value[0][j] = at.first;
            value[1][j] = at.second;
        }
    }
}

}  // namespace
}  // namespace ta::cpu
