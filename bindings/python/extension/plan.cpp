// Plans and their steps.
#include "arguments.h"
#include "attention.h"
#include "objects.h"

namespace {

ta_seq to_id(const PlanObject& plan, nb::handle object) {
    if (!nb::isinstance<SequenceObject>(object)) throw nb::type_error("sequences is a Sequence, or an iterable of them");
    const auto sequence = nb::inst_ptr<SequenceObject>(object)->handle.get();
    if (sequence->pool() != plan.pool.get()) throw ta::Error(TA_E_INVALID, "a sequence is of another pool than the plan");
    return sequence->id();
}

StepObject begin(const PlanObject& self, nb::handle sequences, nb::handle n_new, nb::handle n_query, int32_t wait_ms,
                 nb::handle drafts, nb::handle layers_in_order, nb::handle tree_parent, nb::handle query_positions) {
    const auto plan = self.handle.get();
    std::vector<int32_t> parents;
    if (!tree_parent.is_none()) parents = to_integers<int32_t>(tree_parent, "tree_parent");
    std::vector<int64_t> positions;
    if (!query_positions.is_none()) positions = to_integers<int64_t>(query_positions, "query_positions");
    const ta_step_options options =
        ta::detail::to_c(ta::StepOptions{.wait_ms = wait_ms,
                                         .drafts = to_switch(drafts, "drafts"),
                                         .layers_in_order = to_switch(layers_in_order, "layers_in_order"),
                                         .tree_parent = parents,
                                         .query_positions = positions});
    const auto check_lists = [&](std::span<const int32_t> tokens, std::span<const int32_t> queries) {
        if (!tree_parent.is_none() && ta::detail::sum(tokens) != parents.size())
            throw ta::Error(TA_E_INVALID, "tree_parent needs one number for each new token");
        if (!query_positions.is_none() && ta::detail::sum(queries) != positions.size())
            throw ta::Error(TA_E_INVALID, "query_positions needs one number for each query token");
    };
    if (nb::isinstance<SequenceObject>(sequences) && n_query.is_none() && PyLong_Check(n_new.ptr())) {  // needs no lists
        const ta_seq id = to_id(self, sequences);
        const auto tokens = to_integer<int32_t>(n_new, "n_new");
        check_lists({&tokens, 1}, {&tokens, 1});
        call([&](ta_error* e) { return ta_plan_begin(plan.get(), 1, &id, &tokens, nullptr, &options, e); });
        return {plan.shared(), self, 1};
    }
    std::vector<ta_seq> ids;
    if (nb::isinstance<SequenceObject>(sequences)) {
        ids.push_back(to_id(self, sequences));
    } else {
        for (nb::handle object : sequences) ids.push_back(to_id(self, object));
    }
    const auto tokens = to_counts(n_new, ids.size(), "n_new");
    const auto queries = n_query.is_none() ? tokens : to_counts(n_query, ids.size(), "n_query");
    check_lists(tokens, queries);
    call([&](ta_error* e) {
        return ta_plan_begin(plan.get(), static_cast<uint32_t>(ids.size()), ids.data(), tokens.data(), queries.data(), &options,
                             e);
    });
    return {plan.shared(), self, ids.size()};
}

void append(const StepObject& self, nb::handle layer_number, nb::handle k, nb::handle v) {
    const auto plan = self.get();
    const auto layer = to_integer<uint32_t>(layer_number, "layer");
    const Array k_array(k, "k", self.place(), false), v_array(v, "v", self.place(), false);
    const ta_tensor k_tensor = k_array.tensor(), v_tensor = v_array.tensor();
    call([&](ta_error* e) { return ta_append(plan.get(), layer, &k_tensor, &v_tensor, e); });
}

nb::object attend(const StepObject& self, nb::handle layer_number, nb::handle q, nb::object out, nb::handle lse, int32_t mask,
                  float scale, float softcap, int64_t window, nb::handle alibi_slopes, nb::handle sinks, int32_t exp,
                  int32_t p) {
    const auto plan = self.get();
    const auto layer = to_integer<uint32_t>(layer_number, "layer");
    const Outputs to(q, std::move(out), lse, self.place(), self.v_head_dim(layer));
    const Attention attention(
        ta::AttendOptions{.mask = mask, .scale = scale, .softcap = softcap, .window = window, .exp = exp, .p = p}, alibi_slopes,
        sinks, self.place(), to.q_tensor.heads);
    const ta_attend_options options = ta::detail::to_c(attention.options);
    call([&](ta_error* e) { return ta_attend(plan.get(), layer, &to.q_tensor, &to.out_tensor, to.lse_data, &options, e); });
    return to.out_object;
}

// The end of a plan, and its stream.
void bind_life(nb::class_<PlanObject>& plan) {
    plan.def_prop_ro(
        "address", [](const PlanObject& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    plan.def(
        "close", [](PlanObject& self) { self.handle.close(); }, kClose);
    add_context_manager(plan);
    plan.def(
        "set_stream",
        [](PlanObject& self, uintptr_t stream) {
            const auto handle = self.handle.get();
            call([&](ta_error* e) { return ta_plan_set_stream(handle.get(), to_stream(stream), e); });
            self.place.stream = to_stream(stream);
        },
        "stream"_a, R"(The CUDA stream that later steps enqueue on.

Args:
    stream: its address, such as ``torch.cuda.current_stream().cuda_stream``; 0: the legacy default stream. It outlives them

Raises:
    StateError: a step is open, the stream is being captured and the plan ran on another one (STATE)
    ArgumentError: on a CPU (UNSUPPORTED)
)");
}

// ``Plan.step``.
void bind_begin(nb::class_<PlanObject>& plan) {
    plan.def("step", &begin, "sequences"_a, "n_new"_a = 0, "n_query"_a = nb::none(), nb::kw_only(), "wait_ms"_a = 0,
             "drafts"_a = nb::none(), "layers_in_order"_a = nb::none(), "tree_parent"_a = nb::none(),
             "query_positions"_a = nb::none(),
             nb::sig("def step(self, sequences: Sequence | typing.Iterable[Sequence], n_new: int | typing.Iterable[int] = 0, "
                     "n_query: int | typing.Iterable[int] | None = None, *, wait_ms: int = 0, drafts: bool | None = None, "
                     "layers_in_order: bool | None = None, tree_parent: typing.Iterable[int] | None = None, query_positions: "
                     "typing.Iterable[int] | None = None) -> Step"),
             R"(Opens a step on a batch, and reserves all memory that it needs::

    with plan.step([a, b], [1, 17]) as step:
        for layer in range(layers):
            step.append(layer, k[layer], v[layer])
            step.attend(layer, q[layer], out)

Leaving the block commits the step; an exception aborts it. Where tiers are in use the call may wait for blocks and for room; it
does not end at Ctrl-C before that.

Args:
    sequences: distinct sequences of the pool that are in no other open step
    n_new: tokens that ``append`` will bring for each, or one number for all
    n_query: queries of ``attend`` for each, the last tokens; None: as n_new
    wait_ms: how long it may wait for room, in milliseconds; 0: ``Tiers.begin_wait_ms``; -1: not at all
    drafts: True: ``Step.end`` may keep a part of the new tokens, as a verification of drafts does. Blocks that the step fills take
        room at 8 bits and at their own until then
    layers_in_order: True: ``attend`` to a layer comes before the next one's ``append``; a prompt takes 1/layers of the memory
        beside the pool
    tree_parent: token trees: for each new token its parent, an index among its sequence's new ones that is below its own; -1: the
        sequence's last token. A query sees the tokens before the step, its ancestors and itself. Implies drafts; n_query is n_new,
        up to 64 for a sequence whose tokens are no chain
    query_positions: [sum(n_query)] where each query token stands in its sequence, in any order; it sees the tokens up to its own
        position. None: the last tokens. Not with tree_parent; ``attend`` takes ``Mask.CAUSAL``

Raises:
    ArgumentError: INVALID; drafts with ``OpenScale.UNIVERSAL``, trees with ``Numerics.batch_invariant``, query_positions of a
        partitioned sequence (UNSUPPORTED)
    StateError: a step of this plan is open, a query before the new tokens sees what windows have passed, or stands before what
        ``Sequence.shift`` took out, or in it (STATE), a sequence is in another step, or moves keep taking its blocks to disk (BUSY),
        STALE
    ExhaustedError: the budget (TIER_FULL; ``bytes`` are lacking), MEMORY, LIMIT
    DataError: NONFINITE (on a GPU, of earlier tokens), CORRUPT
    FileError: IO
)");
}

// The calls of each layer.
void bind_layers(nb::class_<StepObject>& step) {
    step.def(
        "append", &append, "layer"_a, "k"_a, "v"_a, nb::sig("def append(self, layer: int, k: Array, v: Array) -> None"),
        R"(Quantizes the new tokens of one layer and appends them. Each layer is appended once. On a CPU it is done on return; on a GPU
it is enqueued, and k and v must not be freed or written before the stream has got there.

Args:
    k: [sum(n_new), kv_heads, head_dim] of the layer, the sequences one after the other, keys after their rotary embedding. float32,
        float16 or bfloat16; arrays of numpy, or by DLPack or ``__cuda_array_interface__``. Never copied
    v: [sum(n_new), kv_heads, v_head_dim] likewise

Raises:
    ArgumentError: no such layer (INVALID), SHAPE, DTYPE
    DataError: NaN or Inf (NONFINITE); ``token`` and ``head`` say where. On a GPU the sequence's next step says so
    StateError: the step is over, the layer was appended (STATE), BUSY
    ExhaustedError: MEMORY
)");
    step.def(
        "attend", &attend, "layer"_a, "q"_a, "out"_a = nb::none(), "lse"_a = nb::none(), nb::kw_only(), "mask"_a = 0,
        "scale"_a = 0.0f, "softcap"_a = 0.0f, "window"_a = 0, "alibi_slopes"_a = nb::none(), "sinks"_a = nb::none(),
        "exp"_a = 0, "p"_a = 0,
        nb::sig("def attend(self, layer: int, q: Array, out: Array | None = None, lse: Array | None = None, *, mask: Mask = "
                "turboattention._enums.Mask.CAUSAL, scale: float = 0.0, softcap: float = 0.0, window: int = 0, alibi_slopes: "
                "Array | None = None, sinks: "
                "Array | None = None, exp: Exp = turboattention._enums.Exp.DEFAULT, p: P = turboattention._enums.P.DEFAULT) -> "
                "typing.Any"),
        R"(Attends with the step's queries to all tokens of their sequences, the new ones included. On a GPU it is enqueued, as
``append`` is.

Args:
    q: [sum(n_query), q_heads, head_dim]; q_heads is kv_heads x 1..128
    out: [sum(n_query), q_heads, v_head_dim], of any element type, not overlapping q; None: a new float32 array of numpy (on a CPU)
    lse: float32 [sum(n_query), q_heads] without gaps: gets the natural log of the denominator
    mask: ``Mask.CAUSAL`` or ``Mask.FULL``
    scale: multiplies q.k, up to 64; 0: 1/sqrt(head_dim)
    softcap: c: score = c * tanh(score / c); 0: none
    window: keys that a query sees, its own included; 0: no limit
    alibi_slopes: float32 [q_heads]
    sinks: float32 [q_heads], logits that join the denominator
    exp, p: as the pool's unless given

Returns:
    out

Raises:
    ArgumentError: no such layer, an option outside its range, outputs that overlap (INVALID), SHAPE, DTYPE, what a sequence that was
        shifted, query_positions, a token tree or ``Numerics.batch_invariant`` does not take (UNSUPPORTED)
    DataError: NONFINITE (on a CPU)
    StateError: the step is over, the layer lacks its append (STATE), BUSY
    ExhaustedError: MEMORY, on a GPU too many rows and pages (LIMIT)
)");
}

// The calls that end a step.
void bind_end(nb::class_<StepObject>& step) {
    step.def(
        "end",
        [](StepObject& self, nb::handle keep) {
            if (keep.is_none()) return self.end();
            const auto kept = to_counts(keep, self.sequences(), "keep");
            self.end(kept.data());
        },
        "keep"_a = nb::none(), nb::sig("def end(self, keep: int | typing.Iterable[int] | None = None) -> None"),
        R"(Commits: the new tokens belong to their sequences.

Args:
    keep: of a step with drafts, for each sequence or one number for all: 1 + the index, among its new tokens, of the last one that
        stays. It and its ancestors do, the others leave no trace. 0: none stays. None: all do, which must be a chain

Raises:
    StateError: a layer lacks its append (STATE): the step stays open, as below
    ArgumentError: keep is outside its range, given without drafts, or missing for a tree (INVALID)
    ExhaustedError, DeviceError: MEMORY, DEVICE: the step stays open. Of one with drafts the tokens that do not stay may be gone: then
        ``end`` with the same keep goes on, and ``abort`` leaves sequences as they were
)");
    step.def("abort", &StepObject::abort, R"(Ends the step without committing: sequences are as before it.

Raises:
    StateError: the step is over (STATE)
)");
    step.def(
        "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Step"));
    step.def(
        "__exit__",
        [](StepObject& self, nb::handle type, nb::handle, nb::handle) {
            if (!type.is_none() || !self.open()) return self.leave();
            try {
                self.end();
            } catch (...) {
                self.leave();
                throw;
            }
        },
        "type"_a.none(), "value"_a.none(), "traceback"_a.none(),
        nb::sig("def __exit__(self, type: object, value: object, traceback: object) -> None"));
}

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<PlanObject> plan(m, "Plan",
                                R"(Makes steps: ``Pool.create_plan``. One thread at a time, the others get StateError (BUSY);
use a plan for each thread.)");
    bind_life(plan);
    bind_begin(plan);
    nb::class_<StepObject> step(
        m, "Step", "One step of a batch: ``Plan.step``. One thread at a time. It is aborted when the object goes.");
    bind_layers(step);
    bind_end(step);
}
