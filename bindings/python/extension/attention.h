// The arguments of calls that attend.
#pragma once

#include <optional>

#include "arrays.h"
#include "common.h"

// What attend takes beside its tensors; the arrays live as long as this does.
struct Attention {
    std::optional<Array> alibi, sinks;
    ta::AttendOptions options;

    // `given` has no arrays.
    Attention(ta::AttendOptions given, nb::handle alibi_slopes, nb::handle sink_logits, const Place& place, int64_t heads)
        : options(given) {
        if (!alibi_slopes.is_none()) alibi.emplace(alibi_slopes, "alibi_slopes", place, false);
        if (!sink_logits.is_none()) sinks.emplace(sink_logits, "sinks", place, false);
        if (alibi) options.alibi_slopes = alibi->floats(heads);
        if (sinks) options.sinks = sinks->floats(heads);
    }
};

// q, out and lse of a call. A missing out is made on a CPU.
struct Outputs {
    Array q;
    ta_tensor q_tensor;
    nb::object out_object;
    std::optional<Array> out, lse;
    ta_tensor out_tensor;
    float* lse_data = nullptr;

    // head_dim: of a missing out, 0: as q
    Outputs(nb::handle query, nb::object result, nb::handle lse_object, const Place& place, int64_t head_dim = 0)
        : q(query, "q", place, false), q_tensor(q.tensor()), out_object(std::move(result)) {
        if (out_object.is_none()) {
            if (place.cuda) throw ta::Error(TA_E_INVALID, "on a GPU out is needed");
            out_object = new_array(q_tensor.tokens, q_tensor.heads, head_dim ? head_dim : q_tensor.head_dim);
        }
        out_tensor = out.emplace(out_object, "out", place, true).tensor();
        if (!lse_object.is_none())
            lse_data = lse.emplace(lse_object, "lse", place, true).floats(q_tensor.tokens, q_tensor.heads);
    }
};
