// Contexts, what they compute without a pool, and calibrators.
#include <memory>

#include "arguments.h"
#include "attention.h"
#include "callbacks.h"
#include "objects.h"

namespace {

nb::object attend_dense(const ContextObject& self, nb::handle q, nb::handle k, nb::handle v, nb::object out, nb::handle lse,
                        int32_t variant, nb::handle q_offsets, nb::handle k_offsets, int32_t v_granularity, int32_t nonfinite,
                        int32_t mask, float scale, float softcap, int64_t window, nb::handle alibi_slopes, nb::handle sinks,
                        int32_t exp, int32_t p, uintptr_t stream, uint32_t group_size) {
    const auto context = self.handle.get();
    const Place place{self.cuda, to_stream(stream)};
    const Array k_array(k, "k", place, false), v_array(v, "v", place, false);
    const Outputs to(q, std::move(out), lse, place);
    const Attention attention(
        ta::AttendOptions{.mask = mask, .scale = scale, .softcap = softcap, .window = window, .exp = exp, .p = p}, alibi_slopes,
        sinks, place, to.q_tensor.heads);
    const ta_attend_options attend_options = ta::detail::to_c(attention.options);
    const auto offsets = [](nb::handle list, const char* name) {
        if (list.is_none()) return std::vector<int64_t>();
        auto numbers = to_integers<int64_t>(list, name);
        if (numbers.size() < 2)
            throw ta::Error(TA_E_INVALID, std::string(name) + " needs one number more than there are sequences");
        return numbers;
    };
    const auto of_q = offsets(q_offsets, "q_offsets"), of_k = offsets(k_offsets, "k_offsets");
    if (!of_q.empty() && !of_k.empty() && of_q.size() != of_k.size())
        throw ta::Error(TA_E_INVALID, "q_offsets and k_offsets have as many elements");
    auto options = ta::detail::sized<ta_dense_options>();
    options.variant = variant;
    options.batch = static_cast<uint32_t>(std::max<size_t>({of_q.size(), of_k.size(), 2}) - 1);
    options.q_offsets = of_q.empty() ? nullptr : of_q.data();
    options.k_offsets = of_k.empty() ? nullptr : of_k.data();
    options.v_granularity = v_granularity;
    options.nonfinite = nonfinite;
    options.attend = &attend_options;
    options.stream = place.stream;
    options.group_size = group_size;
    const ta_tensor k_tensor = k_array.tensor(), v_tensor = v_array.tensor();
    call([&](ta_error* e) {
        return ta_attend_dense(context.get(), &to.q_tensor, &k_tensor, &v_tensor, &to.out_tensor, to.lse_data, &options, e);
    });
    return to.out_object;
}

nb::object merge_states(const ContextObject& self, nb::handle parts, nb::handle lses, nb::object out, nb::handle lse,
                        uintptr_t stream) {
    const auto context = self.handle.get();
    const Place place{self.cuda, to_stream(stream)};
    std::vector<std::unique_ptr<Array>> arrays;
    std::vector<ta_tensor> tensors;
    std::vector<const float*> numbers;
    const auto uneven = [] { throw ta::Error(TA_E_INVALID, "there is one lse for each part, and at least one part"); };
    for (nb::handle part : parts) tensors.push_back(arrays.emplace_back(new Array(part, "a part", place, false))->tensor());
    for (nb::handle one : lses) {
        if (numbers.size() == tensors.size()) uneven();
        const ta_tensor& part = tensors[numbers.size()];
        numbers.push_back(arrays.emplace_back(new Array(one, "an lse of lses", place, false))->floats(part.tokens, part.heads));
    }
    if (tensors.empty() || numbers.size() != tensors.size()) uneven();
    const ta_tensor& first = tensors.front();
    if (out.is_none()) {
        if (place.cuda) throw ta::Error(TA_E_INVALID, "on a GPU out is needed");
        out = new_array(first.tokens, first.heads, first.head_dim);
    }
    const Array out_array(out, "out", place, true);
    const ta_tensor out_tensor = out_array.tensor();
    std::optional<Array> lse_array;
    if (!lse.is_none()) lse_array.emplace(lse, "lse", place, true);
    float* const lse_data = lse_array ? lse_array->floats(first.tokens, first.heads) : nullptr;
    call([&](ta_error* e) {
        return ta_merge_states(context.get(), static_cast<uint32_t>(tensors.size()), tensors.data(), numbers.data(),
                               &out_tensor, lse_data, place.stream, e);
    });
    return out;
}

// Functions about the library.
void bind_library(nb::module_& m) {
    m.def("version", &ta::version, "TA_VERSION_MAJOR * 10000 + MINOR * 100 + PATCH of the library.");
    m.def("abi_version", &ta::abi_version, "The number in the library's SONAME.");
    m.def("build_info", &ta::build_info, "One line: version, compiler, what was built in.");
    m.def(
        "status_name", [](int32_t status) { return ta_status_name(status); }, "status"_a, "The name of a status in C.");
}

// The beginning and the end of a context, and its state.
void bind_life(nb::class_<ContextObject>& context) {
    context.def(
        "__init__",
        [](ContextObject* self, int32_t device, int32_t device_ordinal, int32_t threads, int32_t cpu_isa, nb::object allocator,
           nb::object log, int32_t log_level) {
            ta::ContextOptions options{.device = device,
                                       .device_ordinal = device_ordinal,
                                       .threads = threads,
                                       .cpu_isa = cpu_isa,
                                       .log_level = log_level};
            if (!allocator.is_none()) options.allocator = std::make_shared<Memory>(allocator);
            if (!log.is_none()) options.log = to_log(std::move(log));
            new (self) ContextObject{{unlocked([&] { return ta::Context::create(options); }), "the context"},
                                     device == TA_DEVICE_CUDA};
        },
        nb::kw_only(), "device"_a = 0, "device_ordinal"_a = 0, "threads"_a = 0, "cpu_isa"_a = 0, "allocator"_a = nb::none(),
        "log"_a = nb::none(), "log_level"_a = int32_t{TA_LOG_WARNING},
        nb::sig("def __init__(self, *, device: Device = turboattention._enums.Device.CPU, device_ordinal: int = 0, threads: "
                "int = 0, cpu_isa: CpuIsa = "
                "turboattention._enums.CpuIsa.AUTO, allocator: Allocator | None = None, log: typing.Callable[[LogLevel, str], "
                "object] | None = None, "
                "log_level: LogLevel = turboattention._enums.LogLevel.WARNING) -> None"));
    context.def_prop_ro(
        "address", [](const ContextObject& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    context.def(
        "close", [](ContextObject& self) { self.handle.close(); }, kClose);
    add_context_manager(context);
    context.def(
        "info",
        [](const ContextObject& self) {
            const auto context = self.handle.get();
            return unlocked([&] { return context.info(); });
        },
        "What it is and has: device, kernels in use, memory, what is degraded and why.");
    context.def(
        "health",
        [](const ContextObject& self) {
            const auto context = self.handle.get();
            unlocked([&] { context.health(); });
        },
        "Raises DeviceError (DEVICE_LOST) once the GPU was lost.");
}

// Attention over plain arrays.
void bind_attention(nb::class_<ContextObject>& context) {
    context.def(
        "attend_dense", &attend_dense, "q"_a, "k"_a, "v"_a, "out"_a = nb::none(), "lse"_a = nb::none(), nb::kw_only(),
        "variant"_a = 0, "q_offsets"_a = nb::none(), "k_offsets"_a = nb::none(), "v_granularity"_a = 0, "nonfinite"_a = 0,
        "mask"_a = 0, "scale"_a = 0.0f, "softcap"_a = 0.0f, "window"_a = 0, "alibi_slopes"_a = nb::none(),
        "sinks"_a = nb::none(), "exp"_a = 0, "p"_a = 0, "stream"_a = 0, "group_size"_a = 0,
        nb::sig("def attend_dense(self, q: Array, k: Array, v: Array, out: Array | None = None, lse: Array | None = None, *, "
                "variant: DenseVariant = turboattention._enums.DenseVariant.INT8_PAGE, q_offsets: typing.Sequence[int] | None "
                "= None, k_offsets: "
                "typing.Sequence[int] | None = None, v_granularity: Granularity = turboattention._enums.Granularity.DEFAULT, "
                "nonfinite: NonFinite = "
                "turboattention._enums.NonFinite.DEFAULT, mask: Mask = turboattention._enums.Mask.CAUSAL, scale: float = 0.0, "
                "softcap: float = 0.0, window: int = 0, "
                "alibi_slopes: Array | None = None, sinks: Array | None = None, exp: Exp = turboattention._enums.Exp.DEFAULT, "
                "p: P = turboattention._enums.P.DEFAULT, "
                "stream: int = 0, group_size: int = 0) -> typing.Any"),
        R"(Attention over plain arrays, no pool: Q, K and V are quantized to INT8 on the way, or channels are grouped (DISTR).

Args:
    q: [query tokens, q_heads, head_dim]; q_heads is kv_heads x 1..16; head_dim 64, 96, 128 or 256, of DISTR 32, 64 or
        128
    k, v: [keys, kv_heads, head_dim]
    out: as q, of any element type; None: a new float32 array of numpy (on a CPU)
    lse: float32 [query tokens, q_heads] without gaps: gets the natural log of the denominator
    variant: how Q, K and V are quantized, or DISTR
    group_size: of DISTR, channels that share a score: 2, 3 or 4; 0: 2
    q_offsets, k_offsets: [batch + 1] prefix sums of the sequences' tokens; None: one sequence, or all as long
    stream: of a GPU context: address of the CUDA stream

The rest is as for ``Step.attend``.

Returns:
    out

Raises:
    ArgumentError: INVALID, SHAPE, DTYPE, UNSUPPORTED
    DataError: NaN or Inf (NONFINITE)
)");
    context.def(
        "merge_states", &merge_states, "parts"_a, "lses"_a, "out"_a = nb::none(), "lse"_a = nb::none(), "stream"_a = 0,
        nb::sig("def merge_states(self, parts: typing.Sequence[Array], lses: typing.Sequence[Array], out: Array | None = None, "
                "lse: Array | None = None, stream: int = 0) -> typing.Any"),
        R"(Merges attention of the same queries over disjoint sets of keys into attention over all of these keys.

Args:
    parts: 1..64 arrays [tokens, heads, head_dim]
    lses: as many of float32 [tokens, heads] without gaps
    out: of that shape, may be one of the parts; None: a new float32 array of numpy (on a CPU)
    lse: float32 [tokens, heads], may be None
    stream: of a GPU context: address of the CUDA stream

Returns:
    out

Raises:
    ArgumentError: INVALID, SHAPE, DTYPE, UNSUPPORTED
    DataError: an lse that is NaN or +inf (NONFINITE)
)");
}

// ``Context.create_calibrator``.
void bind_create_calibrator(nb::class_<ContextObject>& context) {
    context.def(
        "create_calibrator",
        [](const ContextObject& self, nb::handle layer_number, nb::handle head_number, nb::handle channels,
           nb::handle v_channels, nb::iterable layer_groups) {
            const auto context = self.handle.get();
            const std::vector<ta::LayerGroup> groups = to_layer_groups(layer_groups);
            const ta::PoolOptions options{.layers = to_integer<uint32_t>(layer_number, "layers"),
                                          .kv_heads = to_integer<uint32_t>(head_number, "kv_heads"),
                                          .head_dim = to_integer<uint32_t>(channels, "head_dim"),
                                          .v_head_dim = to_integer<uint32_t>(v_channels, "v_head_dim"),
                                          .layer_groups = groups};
            const uint32_t layers = options.layers, kv_heads = options.kv_heads, head_dim = options.head_dim;
            ta::Calibrator made = unlocked([&] { return context.create_calibrator(options); });
            const auto is_even = [&](const ta::LayerGroup& g) { return g.kv_heads == 0 || g.kv_heads == kv_heads; };
            std::vector<int64_t> shape{layers, kv_heads};
            if (!std::all_of(groups.begin(), groups.end(), is_even))
                shape = {int64_t(ta::detail::map_sizes(layers, kv_heads, head_dim, std::span(groups)).heads)};
            return CalibratorObject{std::move(made), self.cuda, std::move(shape)};
        },
        nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a, "v_head_dim"_a = 0, "layer_groups"_a = nb::tuple(),
        nb::sig("def create_calibrator(self, *, layers: int, kv_heads: int, head_dim: int, v_head_dim: int = 0, layer_groups: "
                "Iterable[LayerGroup] = ()) -> Calibrator"),
        R"(Finds the bits of kv heads: ranks those of each layer for 4 or 2 bits, or chooses by costs.

Args:
    layers, kv_heads, head_dim, v_head_dim, layer_groups: as in ``create_pool``. Where layers have different numbers of kv heads,
        maps and costs have one row for all heads: [heads of all layers] in place of [layers, kv_heads]

Raises:
    ArgumentError: INVALID; UNSUPPORTED (head_dim)
)");
}

// Calibrators.
void bind_calibrator(nb::module_& m) {
    nb::class_<CalibratorObject> calibrator(m, "Calibrator",
                                            "Ranks kv heads: ``Context.create_calibrator``. One thread at a time.");
    calibrator.def(
        "observe",
        [](const CalibratorObject& self, nb::handle layer_number, nb::handle k, nb::handle v) {
            const auto layer = to_integer<uint32_t>(layer_number, "layer");
            const Place place{self.cuda, nullptr};
            const Array k_array(k, "k", place, false), v_array(v, "v", place, false);
            const ta_tensor a = k_array.tensor(), b = v_array.tensor();
            const ta::Calibrator handle = self.handle.get();
            call([&](ta_error* e) { return ta_calibrator_observe(handle.get(), layer, &a, &b, e); });
        },
        "layer"_a, "k"_a, "v"_a, nb::sig("def observe(self, layer: int, k: Array, v: Array) -> None"),
        R"(Takes K and V of some tokens of a layer into account: [tokens, kv_heads, head_dim].

Raises:
    ArgumentError: INVALID (no such layer), SHAPE, DTYPE
    DataError: NONFINITE
)");
    calibrator.def(
        "finish",
        [](const CalibratorObject& self, uint32_t n_low) {
            const ta::Calibrator handle = self.handle.get();
            const ta::HeadMap map = unlocked([&] { return handle.finish(n_low); });
            return nb::make_tuple(self.array(map.k_bits, "uint8"), self.array(map.v_bits, "uint8"),
                                  self.array(map.k_priority, "float32"), self.array(map.v_priority, "float32"));
        },
        "n_low"_a, nb::sig("def finish(self, n_low: int) -> tuple[typing.Any, typing.Any, typing.Any, typing.Any]"),
        R"(Gives n_low heads of each layer 2 bits, the others 4.

Returns:
    k_bits, v_bits, k_priority, v_priority: [layers, kv_heads] each; the first two are for ``Context.create_pool``

Raises:
    ArgumentError: n_low is above kv_heads (INVALID)
    StateError: a layer was never observed (STATE)
)");
    calibrator.def(
        "choose",
        [](const CalibratorObject& self, nb::handle k_cost, nb::handle v_cost, uint64_t block_bytes) {
            const ta::Calibrator handle = self.handle.get();
            const auto costs = [&](nb::handle from) {
                const nb::object all = package("numpy", "ascontiguousarray")(from, nb::str("float32"));
                std::vector<int64_t> wanted = self.shape;
                wanted.push_back(3);
                if (!all.attr("shape").equal(nb::tuple(nb::cast(wanted))))
                    throw ta::Error(TA_E_SHAPE, self.shape.size() == 2 ? "costs are [layers, kv_heads, 3]"
                                                                       : "costs are [heads of all layers, 3]");
                const std::string bytes = to_bytes(all);
                std::vector<float> numbers(bytes.size() / sizeof(float));
                std::memcpy(numbers.data(), bytes.data(), bytes.size());
                return numbers;
            };
            const std::vector<float> k = costs(k_cost), v = costs(v_cost);
            const ta::HeadMap map = unlocked([&] { return handle.choose(k, v, block_bytes); });
            return nb::make_tuple(self.array(map.k_bits, "uint8"), self.array(map.v_bits, "uint8"));
        },
        "k_cost"_a, "v_cost"_a, "block_bytes"_a,
        nb::sig("def choose(self, k_cost: Array, v_cost: Array, block_bytes: int) -> tuple[typing.Any, typing.Any]"),
        R"(Chooses the maps of least total cost whose blocks have at most block_bytes.

Args:
    k_cost, v_cost: [layers, kv_heads, 3], what K and V of a head cost with 8, 4 and 2 bits; inf: never with these bits
    block_bytes: as ``Pool.stats().channel_block_bytes``; of a map with 8 bits throughout ``token_block_bytes``

Returns:
    k_bits, v_bits: [layers, kv_heads], for ``Context.create_pool``

Raises:
    ArgumentError: SHAPE; INVALID (a cost of nan or -inf; K or V of a head whose costs are all inf; block_bytes below the
        smallest block that the costs allow)
)");
}

}  // namespace

nb::class_<ContextObject> bind_context(nb::module_& m) {
    bind_library(m);
    nb::class_<ContextObject> context(m, "Context", R"(A device, its kernels and its worker threads. Any thread may call it.

Args:
    device: ``Device.CPU``, or ``Device.CUDA`` for an NVIDIA GPU from sm_80 on, in a build with CUDA
    device_ordinal: which GPU
    threads: 1..1024 with the calling one; 0: as many as CPUs that this process may run on
    cpu_isa: the best that this CPU has, unless given
    allocator: where host memory comes from
    log: called as ``log(level, message)`` from any thread; what it raises goes to ``sys.unraisablehook``. The context holds it:
        one that holds the context keeps both alive
    log_level: the most detailed level that ``log`` gets

Raises:
    ArgumentError: a value outside its range, no such GPU (INVALID); no CUDA in the build, no driver, an instruction set that
        this CPU lacks (UNSUPPORTED)
    ExhaustedError: threads could not be started (LIMIT)
)");
    bind_life(context);
    bind_attention(context);
    bind_create_calibrator(context);
    bind_calibrator(m);
    return context;
}
