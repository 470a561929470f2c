// The extension module turboattention._core: turboattention.hpp for Python.
//
// Calls of the library run without the GIL, on copies of the handles that are taken while it is held: what another thread closes
// meanwhile lives until the call returns. Handles are let go of without the GIL, since the library may wait for a thread of its own
// there that delivers to a Python callback.
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <turboattention.hpp>

#include "arrays.h"
#include "common.h"

using namespace nb::literals;

namespace {

// ------------------------------------------------------------------------------------------------------------ errors

void raise(const ta::Error& error) try {
    const ta_error& d = error.detail();
    const nb::object exception = package("turboattention._errors", "_make")(
        d.code, nb::str(d.message), d.layer, d.head, d.argument, d.tier, d.rank, d.sequence, d.block, d.token, d.bytes);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
} catch (nb::python_error& other) {
    other.restore();
}

// A handle, let go of without the GIL.
template <class T>
class Handle {
  public:
    Handle(T value) : value_(std::move(value)) {}
    Handle(Handle&&) noexcept = default;
    Handle& operator=(Handle&& other) noexcept {
        std::swap(value_, other.value_);
        return *this;
    }
    ~Handle() {
        unlocked([&] { const T gone = std::move(value_); });
    }
    const T& get() const { return value_; }

  private:
    T value_;
};

template <class T>
long users(const T& handle) {
    if constexpr (requires { handle.shared(); })
        return handle.shared().use_count();
    else
        return handle.use_count();
}
// What a call works on: if the object was closed meanwhile this is the last one that has the handle.
template <class T>
struct Borrowed : T {
    explicit Borrowed(const T& handle) : T(handle) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() {
        if (users<T>(*this) == 1) unlocked([&] { const T gone = std::move(static_cast<T&>(*this)); });
    }
};

// A handle that can be closed.
template <class T>
class Closable {
  public:
    Closable(T value, const char* name) : value_(std::move(value)), name_(name) {}
    Closable(Closable&&) noexcept = default;
    ~Closable() { close(); }

    Borrowed<T> get() const {
        if (!value_) throw ta::Error(TA_E_CLOSED, std::string(name_) + " was closed");
        return Borrowed<T>(*value_);
    }
    void close() {
        if (!value_) return;
        auto value = std::exchange(value_, std::nullopt);
        unlocked([&] { value.reset(); });
    }

  private:
    std::optional<T> value_;
    const char* name_;
};

// ------------------------------------------------------------------------------------------------------------ callbacks

// Counts what calls back from threads of the library. From the interpreter's end on nothing does: a thread that asks for the GIL
// then is stopped for good.
class Door {
  public:
    bool enter() {
        ++inside_;
        if (!shut_) return true;
        --inside_;
        return false;
    }
    void leave() { --inside_; }
    void shut() {
        shut_ = true;
        unlocked([&] {
            while (inside_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
    }

  private:
    std::atomic<bool> shut_ = false;
    std::atomic<int> inside_ = 0;
};
Door door;

// A Python object that is held by the library: any thread may let go of it.
class Held {
  public:
    explicit Held(nb::object object) : object_(object.release().ptr()) {}
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        if (!door.enter()) return;
        const nb::gil_scoped_acquire gil;
        Py_DECREF(object_);
        door.leave();
    }
    nb::handle get() const { return object_; }

  private:
    PyObject* object_;
};

ta::Log to_log(nb::object callback) {
    return [held = std::make_shared<Held>(std::move(callback))](ta_log_level level, std::string_view message) {
        if (!door.enter()) return;
        {
            const nb::gil_scoped_acquire gil;
            try {
                held->get()(package("turboattention._enums", "LogLevel")(level), nb::str(message.data(), message.size()));
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("the log callback of a turboattention.Context");
            }
        }
        door.leave();
    };
}

// Also stops the call when a signal handler raises (Ctrl-C).
ta::Progress to_progress(const nb::object& callback) {
    return [&callback](uint64_t done, uint64_t total) {
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return callback.is_none() || !callback(done, total).is(nb::bool_(false));
    };
}

// Memory by functions of C.
class Memory final : public std::pmr::memory_resource {
  public:
    explicit Memory(nb::handle options)
        : allocate_(nb::cast<uintptr_t>(options.attr("allocate"))),
          deallocate_(nb::cast<uintptr_t>(options.attr("deallocate"))),
          user_(reinterpret_cast<void*>(nb::cast<uintptr_t>(options.attr("user")))) {
        if (!allocate_ || !deallocate_) throw ta::Error(TA_E_INVALID, "an address of allocator is 0");
    }

  private:
    void* do_allocate(size_t bytes, size_t alignment) override {
        return reinterpret_cast<void* (*)(size_t, size_t, void*)>(allocate_)(bytes, alignment, user_);
    }
    void do_deallocate(void* memory, size_t bytes, size_t alignment) override {
        reinterpret_cast<void (*)(void*, size_t, size_t, void*)>(deallocate_)(memory, bytes, alignment, user_);
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    uintptr_t allocate_, deallocate_;
    void* user_;
};

// ------------------------------------------------------------------------------------------------------------ waiting

// Polls in slices, so that Ctrl-C ends the wait: poll(nanoseconds) says whether what is waited for has come.
template <class Poll>
void wait_for(std::optional<double> seconds, Poll&& poll) {
    using namespace std::chrono;
    const auto start = steady_clock::now();
    const auto limit = seconds ? duration<double>(std::max(*seconds, 0.0)) : duration<double>::max();
    for (;;) {
        const auto left = limit - (steady_clock::now() - start);
        const auto slice = std::clamp<duration<double>>(left, nanoseconds(0), milliseconds(50));
        if (unlocked([&] { return poll(duration_cast<nanoseconds>(slice)); })) return;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (steady_clock::now() - start >= limit) return;
    }
}
bool finished(ta_move_state state) {
    return state >= TA_MOVE_DONE;
}

// ------------------------------------------------------------------------------------------------------------ arguments

ta_switch to_switch(nb::handle value) {
    if (value.is_none()) return TA_DEFAULT;
    return nb::cast<bool>(value) ? TA_ON : TA_OFF;
}

template <class T>
T field(nb::handle options, const char* name) {
    return nb::cast<T>(options.attr(name));
}

// A path as the system takes it, and nothing for None.
std::optional<std::string> to_path(nb::handle path) {
    if (path.is_none()) return std::nullopt;
    const auto bytes = nb::cast<nb::bytes>(package("os", "fsencode")(path));
    if (std::memchr(bytes.c_str(), 0, bytes.size())) throw nb::value_error("embedded null byte");
    return std::string(bytes.c_str(), bytes.size());
}

// Bytes of a bytes-like object.
std::string to_bytes(nb::handle object) {
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
    std::string bytes(static_cast<const char*>(view.buf), static_cast<size_t>(view.len));
    PyBuffer_Release(&view);
    return bytes;
}

// Keys: bytes-like with 32 bytes for each, or an iterable of such.
std::vector<ta::Key> to_keys(nb::handle object) {
    std::string bytes;
    if (PyObject_CheckBuffer(object.ptr())) {
        bytes = to_bytes(object);
    } else {
        for (nb::handle key : object) {
            const std::string one = to_bytes(key);
            if (one.size() != sizeof(ta::Key)) throw ta::Error(TA_E_INVALID, "a key has 32 bytes");
            bytes += one;
        }
    }
    if (bytes.size() % sizeof(ta::Key) != 0) throw ta::Error(TA_E_INVALID, "keys have 32 bytes each");
    std::vector<ta::Key> keys(bytes.size() / sizeof(ta::Key));
    if (!bytes.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
    return keys;
}

std::vector<uint8_t> to_bits(nb::handle object) {
    if (object.is_none()) return {};
    const std::string bytes = to_bytes(object);
    return {bytes.begin(), bytes.end()};
}

ta_stream to_stream(uintptr_t stream) {
    return reinterpret_cast<ta_stream>(stream);
}

ta::Numerics to_numerics(nb::handle o, std::vector<float>& k_offset) {
    if (o.is_none()) return {};
    const nb::object offset = o.attr("k_offset");
    if (!offset.is_none()) {
        const std::string bytes = to_bytes(package("numpy", "ascontiguousarray")(offset, nb::str("float32")));
        k_offset.resize(bytes.size() / sizeof(float));
        std::memcpy(k_offset.data(), bytes.data(), k_offset.size() * sizeof(float));
    }
    return {.profile = field<int32_t>(o, "profile"),
            .k_granularity = field<int32_t>(o, "k_granularity"),
            .v_granularity = field<int32_t>(o, "v_granularity"),
            .open_scale = field<int32_t>(o, "open_scale"),
            .v_exponents = to_switch(o.attr("v_exponents")),
            .fractional_zero = to_switch(o.attr("fractional_zero")),
            .v_search = to_switch(o.attr("v_search")),
            .hadamard = to_switch(o.attr("hadamard")),
            .sink_blocks = field<int32_t>(o, "sink_blocks"),
            .exp = field<int32_t>(o, "exp"),
            .p = field<int32_t>(o, "p"),
            .nonfinite = field<int32_t>(o, "nonfinite"),
            .hadamard_seed = field<uint64_t>(o, "hadamard_seed"),
            .k_offset = k_offset,
            .k_turning = to_switch(o.attr("k_turning"))};
}

// What the options point to.
struct TierPointers {
    std::optional<std::string> folder, path;
    std::optional<ta::Context> peer;
};
// `to.peer` is there.
ta::TierOptions to_tiers(nb::handle o, TierPointers& to) {
    to.folder = to_path(o.attr("disk_folder"));
    to.path = to_path(o.attr("disk_path"));
    return {.host_node = field<uint32_t>(o, "host_node"),
            .host_bytes = field<uint64_t>(o, "host_bytes"),
            .disk_bytes = field<uint64_t>(o, "disk_bytes"),
            .disk_folder = to.folder ? to.folder->c_str() : nullptr,
            .high_percent = field<int32_t>(o, "high_percent"),
            .low_percent = field<int32_t>(o, "low_percent"),
            .eviction = field<int32_t>(o, "eviction"),
            .disk_path = to.path ? to.path->c_str() : nullptr,
            .drop_coldest = to_switch(o.attr("drop_coldest")),
            .begin_wait_ms = field<int32_t>(o, "begin_wait_ms"),
            .staging = field<int32_t>(o, "staging"),
            .falling_precision = to_switch(o.attr("falling_precision")),
            .tuning = reinterpret_cast<const struct ta_x_tier_tuning*>(field<uintptr_t>(o, "tuning")),
            .peer = to.peer ? to.peer->get() : nullptr,
            .peer_bytes = field<uint64_t>(o, "peer_bytes")};
}

// What attend takes beside its tensors; the arrays live as long as this does.
struct Attention {
    std::optional<Array> alibi, sinks;
    ta::AttendOptions options;

    Attention(int32_t mask, float scale, float softcap, int64_t window, nb::handle alibi_slopes, nb::handle sink_logits,
              int32_t exp, int32_t p, const Place& place, int64_t heads) {
        if (!alibi_slopes.is_none()) alibi.emplace(alibi_slopes, "alibi_slopes", place, false);
        if (!sink_logits.is_none()) sinks.emplace(sink_logits, "sinks", place, false);
        options = {.mask = mask,
                   .scale = scale,
                   .softcap = softcap,
                   .window = window,
                   .alibi_slopes = alibi ? alibi->floats(heads) : nullptr,
                   .sinks = sinks ? sinks->floats(heads) : nullptr,
                   .exp = exp,
                   .p = p};
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

    Outputs(nb::handle query, nb::object result, nb::handle lse_object, const Place& place)
        : q(query, "q", place, false), q_tensor(q.tensor()), out_object(std::move(result)) {
        if (out_object.is_none()) {
            if (place.cuda) throw ta::Error(TA_E_INVALID, "on a GPU out is needed");
            out_object = new_array(q_tensor.tokens, q_tensor.heads, q_tensor.head_dim);
        }
        out_tensor = out.emplace(out_object, "out", place, true).tensor();
        if (!lse_object.is_none())
            lse_data = lse.emplace(lse_object, "lse", place, true).floats(q_tensor.tokens, q_tensor.heads);
    }
};

// ------------------------------------------------------------------------------------------------------------ objects

struct PyContext {
    Closable<ta::Context> handle;
    bool cuda;
};

struct PyPool {
    Closable<ta::Pool> handle;
    bool cuda;
    nb::object peer;  // of its peer tier, or None
};

// Shared with calls that run.
struct PySequence {
    Closable<std::shared_ptr<const ta::Sequence>> handle;
    explicit PySequence(ta::Sequence sequence)
        : handle(std::make_shared<const ta::Sequence>(std::move(sequence)), "the sequence") {}
};

struct PyPlan {
    Closable<ta::Plan> handle;
    Handle<std::shared_ptr<ta_kv_pool>> pool;
    Place place;
};

// An open step. The plan is dropped when it is over, with the GIL held; a call that runs has its own copy.
class PyStep {
  public:
    PyStep(std::shared_ptr<ta_plan> plan, const Place& place) : plan_(std::move(plan)), place_(place) {}
    PyStep(PyStep&&) noexcept = default;
    ~PyStep() { leave(); }

    const Place& place() const { return place_; }
    bool open() const { return plan_ != nullptr; }
    Borrowed<std::shared_ptr<ta_plan>> get() const {
        if (!plan_) throw ta::Error(TA_E_STATE, "the step is over");
        return Borrowed(plan_);
    }
    void end() {
        const auto plan = get();
        call([&](ta_error* e) { return ta_plan_end(plan.get(), e); });
        plan_.reset();
    }
    void abort() {
        const auto plan = get();
        plan_.reset();
        call([&](ta_error* e) { return ta_plan_abort(plan.get(), e); });
    }
    // Aborts what is open.
    void leave() {
        if (plan_)
            unlocked([plan = std::exchange(plan_, nullptr)]() mutable { ta_plan_abort(plan.get(), nullptr), plan.reset(); });
    }

  private:
    std::shared_ptr<ta_plan> plan_;
    Place place_;
};

struct PyNamespace {
    Handle<ta::Namespace> handle;
};

struct PyMove {
    Handle<ta::Move> handle;
};

struct PyGroup {
    Closable<ta::Group> handle;
};

struct PyTransfer {
    Handle<std::shared_ptr<ta_group>> group;
    ta_ticket ticket;
    Handle<std::shared_ptr<ta_kv_pool>> pool;  // of a receive whose sequence was not taken

    ta_transfer_info wait(std::optional<double> seconds) const {
        const ta::Transfer transfer(group.get(), ticket);
        ta_transfer_info info;
        wait_for(seconds, [&](std::chrono::nanoseconds slice) { return finished((info = transfer.wait(slice)).state); });
        return info;
    }
};

struct PyCalibrator {
    Handle<ta::Calibrator> handle;
    bool cuda;
    int64_t layers, kv_heads;
};

// ------------------------------------------------------------------------------------------------------------ steps

const PySequence& to_sequence(nb::handle object) {
    if (!nb::isinstance<PySequence>(object)) throw nb::type_error("sequences is a Sequence, or an iterable of them");
    return *nb::inst_ptr<PySequence>(object);
}

// A number for each of n sequences: one for all, or an iterable.
std::vector<int32_t> to_counts(nb::handle object, size_t n, const char* name) {
    if (PyLong_Check(object.ptr()) || (PyIndex_Check(object.ptr()) && !nb::hasattr(object, "__len__")))
        return std::vector<int32_t>(n, nb::cast<int32_t>(object));
    std::vector<int32_t> counts;
    counts.reserve(n);
    for (nb::handle count : object) counts.push_back(nb::cast<int32_t>(count));
    if (counts.size() != n) throw ta::Error(TA_E_INVALID, std::string(name) + " needs one number for each sequence");
    return counts;
}

PyStep begin(const PyPlan& self, nb::handle sequences, nb::handle n_new, nb::handle n_query) {
    const auto plan = self.handle.get();
    std::vector<ta_seq> ids;
    const auto add = [&](nb::handle object) {
        const auto sequence = to_sequence(object).handle.get();
        if (sequence->pool() != self.pool.get()) throw ta::Error(TA_E_INVALID, "a sequence is of another pool than the plan");
        ids.push_back(sequence->id());
    };
    if (nb::isinstance<PySequence>(sequences)) {
        add(sequences);
    } else {
        for (nb::handle object : sequences) add(object);
    }
    const auto tokens = to_counts(n_new, ids.size(), "n_new");
    const auto queries = n_query.is_none() ? tokens : to_counts(n_query, ids.size(), "n_query");
    call([&](ta_error* e) {
        return ta_plan_begin(plan.get(), static_cast<uint32_t>(ids.size()), ids.data(), tokens.data(), queries.data(), e);
    });
    return {plan.shared(), self.place};
}

void append(const PyStep& self, uint32_t layer, nb::handle k, nb::handle v) {
    const auto plan = self.get();
    const Array k_array(k, "k", self.place(), false), v_array(v, "v", self.place(), false);
    const ta_tensor k_tensor = k_array.tensor(), v_tensor = v_array.tensor();
    call([&](ta_error* e) { return ta_append(plan.get(), layer, &k_tensor, &v_tensor, e); });
}

nb::object attend(const PyStep& self, uint32_t layer, nb::handle q, nb::object out, nb::handle lse, int32_t mask, float scale,
                  float softcap, int64_t window, nb::handle alibi_slopes, nb::handle sinks, int32_t exp, int32_t p) {
    const auto plan = self.get();
    const Outputs to(q, std::move(out), lse, self.place());
    const Attention attention(mask, scale, softcap, window, alibi_slopes, sinks, exp, p, self.place(), to.q_tensor.heads);
    const ta_attend_options options = ta::detail::to_c(attention.options);
    call([&](ta_error* e) { return ta_attend(plan.get(), layer, &to.q_tensor, &to.out_tensor, to.lse_data, &options, e); });
    return to.out_object;
}

// ------------------------------------------------------------------------------------------------------------ contexts

nb::object attend_dense(const PyContext& self, nb::handle q, nb::handle k, nb::handle v, nb::object out, nb::handle lse,
                        int32_t variant, nb::handle q_offsets, nb::handle k_offsets, int32_t v_granularity, int32_t nonfinite,
                        int32_t mask, float scale, float softcap, int64_t window, nb::handle alibi_slopes, nb::handle sinks,
                        int32_t exp, int32_t p, uintptr_t stream) {
    const auto context = self.handle.get();
    const Place place{self.cuda, to_stream(stream)};
    const Array k_array(k, "k", place, false), v_array(v, "v", place, false);
    const Outputs to(q, std::move(out), lse, place);
    const Attention attention(mask, scale, softcap, window, alibi_slopes, sinks, exp, p, place, to.q_tensor.heads);
    const ta_attend_options attend_options = ta::detail::to_c(attention.options);
    const auto offsets = [](nb::handle list) {
        return list.is_none() ? std::vector<int64_t>() : nb::cast<std::vector<int64_t>>(list);
    };
    const auto of_q = offsets(q_offsets), of_k = offsets(k_offsets);
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
    const ta_tensor k_tensor = k_array.tensor(), v_tensor = v_array.tensor();
    call([&](ta_error* e) {
        return ta_attend_dense(context.get(), &to.q_tensor, &k_tensor, &v_tensor, &to.out_tensor, to.lse_data, &options, e);
    });
    return to.out_object;
}

nb::object merge_states(const PyContext& self, nb::handle parts, nb::handle lses, nb::object out, nb::handle lse,
                        uintptr_t stream) {
    const auto context = self.handle.get();
    const Place place{self.cuda, to_stream(stream)};
    std::vector<std::unique_ptr<Array>> arrays;
    std::vector<ta_tensor> tensors;
    std::vector<const float*> numbers;
    for (nb::handle part : parts) tensors.push_back(arrays.emplace_back(new Array(part, "a part", place, false))->tensor());
    for (nb::handle one : lses) {
        if (numbers.size() == tensors.size()) break;
        const ta_tensor& part = tensors[numbers.size()];
        numbers.push_back(arrays.emplace_back(new Array(one, "an lse of lses", place, false))->floats(part.tokens, part.heads));
    }
    if (tensors.empty() || static_cast<size_t>(nb::len(lses)) != tensors.size())
        throw ta::Error(TA_E_INVALID, "there is one lse for each part, and at least one part");
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

PyPool create_pool(const PyContext& self, uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint64_t budget_bytes,
                   uint32_t bits, nb::handle k_bits, nb::handle v_bits, uint32_t max_sequences, nb::handle numerics,
                   nb::handle tiers) {
    const auto context = self.handle.get();
    const auto k_map = to_bits(k_bits), v_map = to_bits(v_bits);
    std::vector<float> k_offset;
    TierPointers pointers;
    ta::PoolOptions options{.layers = layers,
                            .kv_heads = kv_heads,
                            .head_dim = head_dim,
                            .bits = bits,
                            .k_bits = k_map,
                            .v_bits = v_map,
                            .budget_bytes = budget_bytes,
                            .max_sequences = max_sequences,
                            .numerics = to_numerics(numerics, k_offset)};
    nb::object peer = nb::none();
    if (!tiers.is_none()) {
        peer = tiers.attr("peer");
        if (!peer.is_none()) pointers.peer = nb::cast<const PyContext&>(peer).handle.get();
        options.tiers = to_tiers(tiers, pointers);
    }
    return {{unlocked([&] { return context.create_pool(options); }), "the pool"}, self.cuda, std::move(peer)};
}

PyGroup create_group(const PyContext& self, nb::bytes id, uint32_t rank, uint32_t ranks, int32_t kind, int32_t connect_ms,
                     int32_t operation_ms, int32_t silence_ms, uint64_t staging_bytes, uintptr_t nccl_comm, bool hosts_apart,
                     uintptr_t fault) {
    const auto context = self.handle.get();
    ta::GroupOptions options{.rank = rank,
                             .ranks = ranks,
                             .kind = kind,
                             .connect_ms = connect_ms,
                             .operation_ms = operation_ms,
                             .silence_ms = silence_ms,
                             .staging_bytes = staging_bytes,
                             .fault = reinterpret_cast<const struct ta_x_group_fault*>(fault),
                             .nccl_comm = reinterpret_cast<void*>(nccl_comm),
                             .hosts_apart = hosts_apart};
    if (id.size() != sizeof options.id) throw ta::Error(TA_E_INVALID, "id has 128 bytes: make_group_id makes one");
    std::memcpy(&options.id, id.data(), sizeof options.id);
    return {{unlocked([&] { return context.create_group(options); }), "the group"}};
}

// ------------------------------------------------------------------------------------------------------------ pools

nb::object describe(const PyPool& self) {
    const auto pool = self.handle.get();
    const ta_kv_pool_description d = unlocked([&] { return pool.describe(); });
    const ta_numerics& n = *d.numerics;
    const auto flag = [](ta_switch s) -> nb::object {
        return s == TA_DEFAULT ? nb::object(nb::none()) : nb::bool_(s == TA_ON);
    };
    const auto array = [&](const void* data, size_t bytes, const char* type) {
        return package("numpy", "frombuffer")(nb::bytes(data, bytes), nb::str(type))
            .attr("reshape")(nb::make_tuple(d.layers, d.kv_heads, -1));
    };
    const size_t heads = size_t{d.layers} * d.kv_heads;
    nb::dict numerics, tiers, all;
    numerics["profile"] = n.profile;
    numerics["k_granularity"] = n.k_granularity;
    numerics["v_granularity"] = n.v_granularity;
    numerics["open_scale"] = n.open_scale;
    numerics["v_exponents"] = flag(n.v_exponents);
    numerics["fractional_zero"] = flag(n.fractional_zero);
    numerics["v_search"] = flag(n.v_search);
    numerics["hadamard"] = flag(n.hadamard);
    numerics["sink_blocks"] = n.sink_blocks;
    numerics["exp"] = n.exp;
    numerics["p"] = n.p;
    numerics["nonfinite"] = n.nonfinite;
    numerics["hadamard_seed"] = n.hadamard_seed;
    numerics["k_offset"] =
        n.k_offset ? array(n.k_offset, heads * d.head_dim * sizeof(float), "float32") : nb::object(nb::none());
    numerics["k_turning"] = flag(n.k_turning);
    all["device"] = d.device;
    all["device_ordinal"] = d.device_ordinal;
    all["layers"] = d.layers;
    all["kv_heads"] = d.kv_heads;
    all["head_dim"] = d.head_dim;
    all["bits"] = d.bits;
    all["max_sequences"] = d.max_sequences;
    all["k_bits"] = array(d.k_bits, heads, "uint8").attr("squeeze")(2);
    all["v_bits"] = array(d.v_bits, heads, "uint8").attr("squeeze")(2);
    all["budget_bytes"] = d.budget_bytes;
    all["fingerprint"] = d.fingerprint;
    all["token_block_bytes"] = d.token_block_bytes;
    all["channel_block_bytes"] = d.channel_block_bytes;
    all["low_block_bytes"] = d.low_block_bytes;
    all["numerics"] = numerics;
    all["tiers"] = nb::none();
    if (d.tiers) {
        const ta_tier_options& t = *d.tiers;
        const auto path = [](const char* text) -> nb::object {
            return text ? package("os", "fsdecode")(nb::bytes(text)) : nb::object(nb::none());
        };
        tiers["host_node"] = t.host_node;
        tiers["host_bytes"] = t.host_bytes;
        tiers["disk_bytes"] = t.disk_bytes;
        tiers["disk_folder"] = path(t.disk_folder);
        tiers["high_percent"] = t.high_percent;
        tiers["low_percent"] = t.low_percent;
        tiers["eviction"] = t.eviction;
        tiers["disk_path"] = path(t.disk_path);
        tiers["drop_coldest"] = flag(t.drop_coldest);
        tiers["begin_wait_ms"] = t.begin_wait_ms;
        tiers["staging"] = t.staging;
        tiers["falling_precision"] = flag(t.falling_precision);
        tiers["tuning"] = reinterpret_cast<uintptr_t>(t.tuning);
        tiers["peer"] = self.peer;
        tiers["peer_bytes"] = t.peer_bytes;
        all["tiers"] = tiers;
    }
    return package("turboattention._options", "_description")(**all);
}

template <class T>
nb::list to_list(std::vector<T> items) {
    nb::list list;
    for (T& item : items) list.append(nb::cast(std::move(item)));
    return list;
}

// ------------------------------------------------------------------------------------------------------------ names
//
// Signatures are written out where nanobind would only say "object".

constexpr const char* kClose =
    "Gives up the handle: later calls raise StateError (CLOSED). What still needs it keeps it alive.";

template <class T, class... Extra>
void add_context_manager(nb::class_<T, Extra...>& type) {
    type.def(
        "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> typing.Self"));
    type.def(
        "__exit__", [](nb::handle self, nb::args) { self.attr("close")(); },
        nb::sig("def __exit__(self, *exception: object) -> None"));
}

void bind_context(nb::module_& m) {
    m.def("version", &ta::version, "TA_VERSION_MAJOR * 10000 + MINOR * 100 + PATCH of the library.");
    m.def("abi_version", &ta::abi_version, "The number in the library's SONAME.");
    m.def("build_info", &ta::build_info, "One line: version, compiler, what was built in.");
    m.def(
        "status_name", [](int32_t status) { return ta_status_name(status); }, "status"_a, "The name of a status in C.");

    nb::class_<PyContext> context(m, "Context", R"(A device, its kernels and its worker threads. Any thread may call it.

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
    context.def(
        "__init__",
        [](PyContext* self, int32_t device, int32_t device_ordinal, int32_t threads, int32_t cpu_isa, nb::object allocator,
           nb::object log, int32_t log_level) {
            ta::ContextOptions options{.device = device,
                                       .device_ordinal = device_ordinal,
                                       .threads = threads,
                                       .cpu_isa = cpu_isa,
                                       .log_level = log_level};
            if (!allocator.is_none()) options.allocator = std::make_shared<Memory>(allocator);
            if (!log.is_none()) options.log = to_log(std::move(log));
            new (self)
                PyContext{{unlocked([&] { return ta::Context::create(options); }), "the context"}, device == TA_DEVICE_CUDA};
        },
        nb::kw_only(), "device"_a = 0, "device_ordinal"_a = 0, "threads"_a = 0, "cpu_isa"_a = 0, "allocator"_a = nb::none(),
        "log"_a = nb::none(), "log_level"_a = int32_t{TA_LOG_WARNING},
        nb::sig("def __init__(self, *, device: Device = turboattention._enums.Device.CPU, device_ordinal: int = 0, threads: "
                "int = 0, cpu_isa: CpuIsa = "
                "turboattention._enums.CpuIsa.AUTO, allocator: Allocator | None = None, log: typing.Callable[[LogLevel, str], "
                "object] | None = None, "
                "log_level: LogLevel = turboattention._enums.LogLevel.WARNING) -> None"));
    context.def_prop_ro(
        "address", [](const PyContext& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    context.def(
        "close", [](PyContext& self) { self.handle.close(); }, kClose);
    add_context_manager(context);
    context.def(
        "info",
        [](const PyContext& self) {
            const auto context = self.handle.get();
            return unlocked([&] { return context.info(); });
        },
        "What it is and has: device, kernels in use, memory, what is degraded and why.");
    context.def(
        "health",
        [](const PyContext& self) {
            const auto context = self.handle.get();
            unlocked([&] { context.health(); });
        },
        "Raises DeviceError (DEVICE_LOST) once the GPU was lost.");
    context.def(
        "create_pool", &create_pool, nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a, "budget_bytes"_a, "bits"_a = 4,
        "k_bits"_a = nb::none(), "v_bits"_a = nb::none(), "max_sequences"_a = 0, "numerics"_a = nb::none(),
        "tiers"_a = nb::none(),
        nb::sig("def create_pool(self, *, layers: int, kv_heads: int, head_dim: int, budget_bytes: int, bits: int = 4, k_bits: "
                "SupportsBuffer | None = None, v_bits: SupportsBuffer | None = None, max_sequences: int = 0, numerics: "
                "Numerics | None = None, tiers: Tiers | None = None) -> Pool"),
        R"(A pool of compressed keys and values.

Args:
    layers: 1..4096
    kv_heads: 1..1024
    head_dim: 64, 96, 128 or 256
    budget_bytes: of the device tier: blocks, metadata included
    bits: 8, 4 or 2 for every head; ignored where k_bits and v_bits are given
    k_bits, v_bits: uint8 [layers, kv_heads], each 4 or 2, or all 8
    max_sequences: 0: 65536
    numerics: None: profile ``ACCURATE``
    tiers: memory below the device tier; None: there is none

Raises:
    ArgumentError: a value outside its range (INVALID, SHAPE), or that cannot be served (UNSUPPORTED)
    ExhaustedError: MEMORY, TIER_FULL (no space for the tiers' files), LIMIT
    StateError: another pool has the file at ``disk_path`` (BUSY)
    FileError, DataError: of that file
)");
    context.def(
        "attend_dense", &attend_dense, "q"_a, "k"_a, "v"_a, "out"_a = nb::none(), "lse"_a = nb::none(), nb::kw_only(),
        "variant"_a = 0, "q_offsets"_a = nb::none(), "k_offsets"_a = nb::none(), "v_granularity"_a = 0, "nonfinite"_a = 0,
        "mask"_a = 0, "scale"_a = 0.0f, "softcap"_a = 0.0f, "window"_a = 0, "alibi_slopes"_a = nb::none(),
        "sinks"_a = nb::none(), "exp"_a = 0, "p"_a = 0, "stream"_a = 0,
        nb::sig("def attend_dense(self, q: Array, k: Array, v: Array, out: Array | None = None, lse: Array | None = None, *, "
                "variant: DenseVariant = turboattention._enums.DenseVariant.INT8_PAGE, q_offsets: typing.Sequence[int] | None "
                "= None, k_offsets: "
                "typing.Sequence[int] | None = None, v_granularity: Granularity = turboattention._enums.Granularity.DEFAULT, "
                "nonfinite: NonFinite = "
                "turboattention._enums.NonFinite.DEFAULT, mask: Mask = turboattention._enums.Mask.CAUSAL, scale: float = 0.0, "
                "softcap: float = 0.0, window: int = 0, "
                "alibi_slopes: Array | None = None, sinks: Array | None = None, exp: Exp = turboattention._enums.Exp.DEFAULT, "
                "p: P = turboattention._enums.P.DEFAULT, "
                "stream: int = 0) -> typing.Any"),
        R"(Attention over plain arrays, no pool: Q, K and V are quantized to INT8 on the way.

Args:
    q: [query tokens, q_heads, head_dim]; q_heads is kv_heads x 1..16; head_dim 64, 96, 128 or 256
    k, v: [keys, kv_heads, head_dim]
    out: as q, of any element type; None: a new float32 array of numpy (on a CPU)
    lse: float32 [query tokens, q_heads] without gaps: gets the natural log of the denominator
    variant: how Q, K and V are quantized
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
    context.def(
        "create_calibrator",
        [](const PyContext& self, uint32_t layers, uint32_t kv_heads, uint32_t head_dim) {
            const auto context = self.handle.get();
            return PyCalibrator{unlocked([&] { return context.create_calibrator(layers, kv_heads, head_dim); }), self.cuda,
                                layers, kv_heads};
        },
        nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a,
        R"(Ranks kv heads for 4 or 2 bits by the ranges of their K and V.

Raises:
    ArgumentError: INVALID; UNSUPPORTED (head_dim)
)");
    context.def(
        "create_group", &create_group, "id"_a, nb::kw_only(), "rank"_a, "ranks"_a, "kind"_a = int32_t{TA_GROUP_LOCAL},
        "connect_ms"_a = 0, "operation_ms"_a = 0, "silence_ms"_a = 0, "staging_bytes"_a = 0, "nccl_comm"_a = 0,
        "hosts_apart"_a = false, "fault"_a = 0,
        nb::sig(
            "def create_group(self, id: bytes, *, rank: int, ranks: int, kind: GroupKind = "
            "turboattention._enums.GroupKind.LOCAL, connect_ms: int = "
            "0, operation_ms: int = 0, silence_ms: int = 0, staging_bytes: int = 0, nccl_comm: int = 0, hosts_apart: bool = "
            "False, fault: int = 0) -> Group"),
        R"(Joins a group as one of its ranks and returns: ``Group.wait`` says when all have joined.

Args:
    id: of ``make_group_id``, the same at all ranks
    rank: 0..ranks - 1
    ranks: 1..1024
    kind: how ranks reach each other
    connect_ms: until all ranks have joined; 0: 30000
    operation_ms: a transfer without progress for so long ends; 0: 30000
    silence_ms: a rank that was not heard of for so long is lost; 0: 10000
    staging_bytes: host memory that an arriving transfer may take; 0: 64 MiB
    nccl_comm: address of an ncclComm_t of the same ranks, which outlives the group
    hosts_apart: takes ranks of one host for ranks of several, to compare
    fault: address of a ta_x_group_fault, for tests

Raises:
    ArgumentError: INVALID, UNSUPPORTED
    StateError: the group of this id has ended (STALE)
    ExhaustedError: LIMIT, MEMORY
    PeerError: another rank says another number of ranks (MISMATCH)
)");

    nb::class_<PyCalibrator> calibrator(m, "Calibrator",
                                        "Ranks kv heads: ``Context.create_calibrator``. One thread at a time.");
    calibrator.def(
        "observe",
        [](const PyCalibrator& self, uint32_t layer, nb::handle k, nb::handle v) {
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
        [](const PyCalibrator& self, uint32_t n_low) {
            const ta::Calibrator handle = self.handle.get();
            const ta::HeadMap map = unlocked([&] { return handle.finish(n_low); });
            const auto array = [&](const auto& numbers, const char* type) {
                return package("numpy", "frombuffer")(nb::bytes(numbers.data(), numbers.size() * sizeof numbers[0]),
                                                      nb::str(type))
                    .attr("reshape")(self.layers, self.kv_heads);
            };
            return nb::make_tuple(array(map.k_bits, "uint8"), array(map.v_bits, "uint8"), array(map.k_priority, "float32"),
                                  array(map.v_priority, "float32"));
        },
        "n_low"_a, nb::sig("def finish(self, n_low: int) -> tuple[typing.Any, typing.Any, typing.Any, typing.Any]"),
        R"(Gives n_low heads of each layer 2 bits, the others 4.

Returns:
    k_bits, v_bits, k_priority, v_priority: [layers, kv_heads] each; the first two are for ``Context.create_pool``

Raises:
    ArgumentError: n_low is above kv_heads (INVALID)
    StateError: a layer was never observed (STATE)
)");
}

void bind_pool(nb::module_& m) {
    nb::class_<PyPool> pool(m, "Pool",
                            "Compressed keys and values of sequences: ``Context.create_pool``. Any thread may call it.");
    pool.def_prop_ro(
        "address", [](const PyPool& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    pool.def(
        "close",
        [](PyPool& self) {
            const auto pool = self.handle.get();
            unlocked([&] { pool.close(); });
            self.handle.close();
        },
        "Releases every sequence and drops what is published. Later calls on it, its sequences and plans raise StateError "
        "(CLOSED).");
    pool.def(
        "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> typing.Self"));
    pool.def(
        "__exit__", [](nb::handle self, nb::args) { self.attr("close")(); },
        nb::sig("def __exit__(self, *exception: object) -> None"));
    pool.def(
        "create_plan",
        [](const PyPool& self) {
            const auto pool = self.handle.get();
            return PyPlan{{unlocked([&] { return pool.create_plan(); }), "the plan"}, pool.shared(), {self.cuda, nullptr}};
        },
        "A plan, which makes steps of batches.");
    pool.def(
        "create_sequence",
        [](const PyPool& self) {
            const auto pool = self.handle.get();
            return PySequence(unlocked([&] { return pool.create_sequence(); }));
        },
        R"(An empty sequence.

Raises:
    ExhaustedError: max_sequences (LIMIT)
)");
    pool.def(
        "create_namespace",
        [](const PyPool& self, nb::handle salt, uint64_t quota_bytes) {
            const auto pool = self.handle.get();
            ta::NamespaceOptions options{.quota_bytes = quota_bytes};
            const std::string bytes = to_bytes(salt);
            if (bytes.size() != options.salt.size()) throw ta::Error(TA_E_INVALID, "salt has 32 bytes");
            std::memcpy(options.salt.data(), bytes.data(), bytes.size());
            return PyNamespace{unlocked([&] { return pool.create_namespace(options); })};
        },
        "salt"_a, "quota_bytes"_a = 0,
        nb::sig("def create_namespace(self, salt: SupportsBuffer | bytes, quota_bytes: int = 0) -> Namespace"),
        R"(A namespace for published prefixes. It ends by ``Namespace.destroy`` or with the pool.

Args:
    salt: 32 secret random bytes; the same ones find published blocks again in a later process
    quota_bytes: of its published blocks, wherever they are; 0: no limit

Raises:
    ArgumentError: no salt, or the pool has a namespace with this one (INVALID)
    ExhaustedError: 65536 namespaces (LIMIT)
)");
    pool.def(
        "load_sequence",
        [](const PyPool& self, nb::handle path, nb::object progress) {
            const auto pool = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            return PySequence(unlocked([&] { return pool.load_sequence(file->c_str(), to_progress(progress)); }));
        },
        "path"_a, "progress"_a = nb::none(),
        nb::sig("def load_sequence(self, path: str | os.PathLike[str], progress: typing.Callable[[int, int], object] | None = "
                "None) -> "
                "Sequence"),
        R"(Makes a sequence of a file of ``Sequence.save``, all of it or nothing.

Args:
    progress: called as ``progress(done, total)`` in bytes; False stops the call, which raises StateError (CANCELLED). It must not
        call this pool

Raises:
    ArgumentError: a file of another pool (INVALID), another version of the format (UNSUPPORTED)
    DataError: CORRUPT; ``block`` says where
    FileError: IO
    ExhaustedError: TIER_FULL, LIMIT, MEMORY
)");
    pool.def(
        "save",
        [](const PyPool& self, nb::handle path, int32_t flags, nb::object progress) {
            const auto pool = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            unlocked([&] { pool.save(file->c_str(), flags, to_progress(progress)); });
        },
        "path"_a, "flags"_a = 0, "progress"_a = nb::none(),
        nb::sig("def save(self, path: str | os.PathLike[str], flags: SaveFlags = SaveFlags(0), progress: typing.Callable[[int, "
                "int], "
                "object] | None = None) -> None"),
        R"(Writes all sequences to a new file; blocks that several share are written once.

Args:
    flags: ``SaveFlags.PUBLISHED``: what is published, too
    progress: as for ``load_sequence``

Raises:
    ArgumentError: the file exists (INVALID)
    StateError: a sequence is in an open step (BUSY), a block was dropped (STATE)
    FileError, DataError, ExhaustedError: IO, CORRUPT, TIER_FULL (no space)
)");
    pool.def(
        "load",
        [](const PyPool& self, nb::handle path, nb::object progress) {
            const auto pool = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            auto loaded = unlocked([&] { return pool.load(file->c_str(), to_progress(progress)); });
            nb::dict sequences;
            for (auto& one : loaded) sequences[nb::cast(one.saved)] = nb::cast(PySequence(std::move(one.sequence)));
            return sequences;
        },
        "path"_a, "progress"_a = nb::none(),
        nb::sig("def load(self, path: str | os.PathLike[str], progress: typing.Callable[[int, int], object] | None = None) -> "
                "dict[int, "
                "Sequence]"),
        R"(Adds the sequences of a file of ``save``, all or nothing; they share blocks as they did.

Returns:
    the new sequences by the ids that they had when they were saved

Raises:
    as ``load_sequence``
)");
    pool.def(
        "stats",
        [](const PyPool& self) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.stats(); });
        },
        "What the pool holds.");
    pool.def("describe", &describe, nb::sig("def describe(self) -> PoolDescription"),
             "Shape, settings as in effect, block sizes.");
    pool.def(
        "tier_stats",
        [](const PyPool& self, int32_t tier) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.tier_stats(tier); });
        },
        "tier"_a, nb::sig("def tier_stats(self, tier: Tier) -> TierStats"), R"(One tier.

Raises:
    ArgumentError: the pool has no such tier (UNSUPPORTED)
)");
    pool.def(
        "move_stats",
        [](const PyPool& self) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.move_stats(); });
        },
        "What moved between the tiers and why.");
    pool.def(
        "metrics",
        [](const PyPool& self, int32_t format) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.metrics(format); });
        },
        "format"_a = int32_t{TA_METRICS_OPENMETRICS},
        nb::sig("def metrics(self, format: MetricsFormat = turboattention._enums.MetricsFormat.OPENMETRICS) -> str"),
        "All statistics as text for a scraper, or as a JSON object.");

    nb::class_<PyMove> move(m, "Move",
                            "Moves of blocks that go on in the background: ``Sequence.move``, ``Sequence.prefetch``.");
    move.def_prop_ro(
        "ticket", [](const PyMove& self) { return self.handle.get().ticket(); }, "The number of these moves in the pool.");
    move.def(
        "query",
        [](const PyMove& self) {
            const ta::Move handle = self.handle.get();
            return unlocked([&] { return handle.query(); });
        },
        R"(How far they are.

Raises:
    StateError: finished more than 4096 tickets ago (STALE)
)");
    move.def(
        "wait",
        [](const PyMove& self, std::optional<double> seconds) {
            const ta::Move handle = self.handle.get();
            ta_move_info info;
            wait_for(seconds, [&](std::chrono::nanoseconds slice) { return finished((info = handle.wait(slice)).state); });
            return info;
        },
        "seconds"_a = nb::none(),
        R"(Waits until they are finished, or so many seconds; ``state`` says which. Ctrl-C ends the wait.

Raises:
    StateError: STALE
)");
    move.def(
        "cancel",
        [](const PyMove& self) {
            const ta::Move handle = self.handle.get();
            unlocked([&] { handle.cancel(); });
        },
        "Blocks that have not moved yet stay where they are.");

    nb::class_<PyNamespace> space(m, "Namespace", R"(Published prefixes of one tenant: ``Pool.create_namespace``.

Keys are bytes-like with 32 bytes for each block, or an iterable of such. Key i is the one of block i, and stands for ALL tokens up
to the end of its block.)");
    space.def(
        "destroy",
        [](const PyNamespace& self) {
            const ta::Namespace handle = self.handle.get();
            unlocked([&] { handle.destroy(); });
        },
        "Drops its entries; sequences that have the blocks keep them. Raises StateError (STALE).");
    space.def(
        "stats",
        [](const PyNamespace& self) {
            const ta::Namespace handle = self.handle.get();
            return unlocked([&] { return handle.stats(); });
        },
        "What is published. Raises StateError (STALE).");
    space.def(
        "flush",
        [](const PyNamespace& self) {
            const ta::Namespace handle = self.handle.get();
            unlocked([&] { handle.flush(); });
        },
        R"(Writes what is published to the persistent disk tier, and waits until it survives a power failure.

Raises:
    ArgumentError: no such tier (UNSUPPORTED)
    ExhaustedError, FileError, DataError: TIER_FULL, IO, CORRUPT
)");
    space.def(
        "match",
        [](const PyNamespace& self, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto list = to_keys(keys);
            auto match = unlocked([&] { return handle.match(list); });
            return nb::make_tuple(nb::cast(PySequence(std::move(match.sequence))), match.length);
        },
        "keys"_a, nb::sig("def match(self, keys: Keys) -> tuple[Sequence, int]"),
        R"(A new sequence that begins with the blocks of the first keys, as many as are published without a gap, maybe none.

Returns:
    the sequence and its tokens

Raises:
    StateError: STALE
    ExhaustedError: max_sequences (LIMIT)
)");
    space.def(
        "hash_keys",
        [](const PyNamespace& self, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto list = to_keys(keys);
            nb::list hashed;
            for (const ta::Key& key : unlocked([&] { return handle.hash_keys(list); }))
                hashed.append(nb::bytes(key.data(), key.size()));
            return hashed;
        },
        "keys"_a, nb::sig("def hash_keys(self, keys: Keys) -> list[bytes]"),
        "What stands for the keys in events. Raises StateError (STALE).");
    space.def(
        "take_events",
        [](const PyNamespace& self, size_t most) {
            const ta::Namespace handle = self.handle.get();
            return to_list(unlocked([&] { return handle.take_events(most); }));
        },
        "most"_a = 256, nb::sig("def take_events(self, most: int = 256) -> list[PrefixEvent]"),
        "The oldest events, each once; fewer than ``most``: there are no more now. Raises StateError (STALE).");
    space.def(
        "join",
        [](const PyNamespace& self, const PyGroup& group) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            unlocked([&] { handle.join(ranks); });
        },
        "group"_a,
        R"(Shares it with the ranks whose pools have the same fingerprint and a namespace of the same salt that has joined.

Raises:
    ArgumentError: one of this salt and fingerprint of this rank has joined (INVALID)
    StateError: the group is not ready (STATE), STALE
    PeerError: the group has ended
)");
    space.def(
        "leave",
        [](const PyNamespace& self, const PyGroup& group) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            unlocked([&] { handle.leave(ranks); });
        },
        "group"_a, "Ends the sharing; blocks that were fetched stay. Raises StateError (STATE: it has not joined).");
    space.def(
        "lookup",
        [](const PyNamespace& self, const PyGroup& group, nb::handle keys, std::optional<double> seconds) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            const auto list = to_keys(keys);
            std::vector<ta_prefix_place> places;
            wait_for(seconds, [&](std::chrono::nanoseconds slice) {
                places = handle.lookup(ranks, list, slice);
                return std::none_of(places.begin(), places.end(), [](const auto& p) { return p.answer == TA_PREFIX_UNKNOWN; });
            });
            return to_list(std::move(places));
        },
        "group"_a, "keys"_a, "seconds"_a = 0.0,
        nb::sig("def lookup(self, group: Group, keys: Keys, seconds: float | None = 0.0) -> list[PrefixPlace]"),
        R"(Which ranks have the blocks of the keys, as far as they have told: a hint.

Args:
    seconds: how long to wait for ranks that have not told at all; None: without limit

Raises:
    StateError: it has not joined (STATE), STALE
    PeerError: the group has ended
)");
    space.def(
        "fetch",
        [](const PyNamespace& self, const PyGroup& group, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            const auto list = to_keys(keys);
            return PyTransfer{ranks.shared(), unlocked([&] { return handle.fetch(ranks, list).ticket(); }),
                              std::shared_ptr<ta_kv_pool>()};
        },
        "group"_a, "keys"_a, nb::sig("def fetch(self, group: Group, keys: Keys) -> Transfer"),
        R"(Brings blocks that this rank lacks from where they are nearest, and publishes them here.

Returns:
    a transfer; DONE says with ``length`` how many tokens ``match`` finds now

Raises:
    as ``lookup``
)");
}

void bind_sequence(nb::module_& m) {
    nb::class_<PySequence> sequence(m, "Sequence", R"(A sequence of tokens in a pool: ``Pool.create_sequence``.

It is released when the object goes, or by ``release``; a step that it is in goes on. Any thread may call it. While it is in an open
step, calls that would change or copy it raise StateError (BUSY). Blocks are 64 tokens.)");
    sequence.def_prop_ro(
        "id", [](const PySequence& self) { return self.handle.get()->id(); }, "Its number in the pool.");
    sequence.def(
        "release",
        [](PySequence& self) {
            const auto sequence = self.handle.get();
            self.handle.close();
            call([&](ta_error* e) { return ta_seq_release(sequence->pool().get(), sequence->id(), e); });
        },
        "Ends it; later calls raise StateError (CLOSED).");
    add_context_manager(sequence.def(
        "close", [](nb::handle self) { self.attr("release")(); }, "As ``release``."));
    const auto length = [](const PySequence& self) {
        const auto sequence = self.handle.get();
        return unlocked([&] { return sequence->length(); });
    };
    sequence.def("__len__", length);
    sequence.def("length", length, "Tokens; those of an open step are not counted. Raises StateError (STALE).");
    sequence.def("__bool__", [](const PySequence&) { return true; });
    sequence.def(
        "fork",
        [](const PySequence& self) {
            const auto sequence = self.handle.get();
            return PySequence(unlocked([&] { return sequence->fork(); }));
        },
        R"(A sequence with the same tokens, which shares the blocks until one of the two writes to them.

Raises:
    StateError: BUSY, STALE
    ExhaustedError: max_sequences (LIMIT)
)");
    sequence.def(
        "truncate",
        [](const PySequence& self, int64_t length) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->truncate(length); });
        },
        "length"_a, R"(Drops all tokens from ``length`` on.

Raises:
    ArgumentError: length is negative or above the present one (INVALID)
    StateError: BUSY, STALE, STATE (inside a block that was dropped)
)");
    sequence.def(
        "set_priority",
        [](const PySequence& self, int32_t priority) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->set_priority(priority); });
        },
        "priority"_a, "The lower, the earlier its blocks leave a full tier under ``Eviction.PRIORITY``; 0 at first.");
    sequence.def(
        "verify",
        [](const PySequence& self) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->verify(); });
        },
        R"(Recomputes the hash of every full page.

Raises:
    DataError: CORRUPT; ``block`` and ``layer`` name the first bad page
    FileError: a block on disk cannot be read (IO)
    StateError: BUSY, STALE
)");
    sequence.def(
        "save",
        [](const PySequence& self, nb::handle path, nb::object progress) {
            const auto sequence = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            unlocked([&] { sequence->save(file->c_str(), to_progress(progress)); });
        },
        "path"_a, "progress"_a = nb::none(),
        nb::sig("def save(self, path: str | os.PathLike[str], progress: typing.Callable[[int, int], object] | None = None) -> "
                "None"),
        R"(Writes it to a new file of mode 0600, complete and synced before there is a file of this name.

Args:
    progress: called as ``progress(done, total)`` in bytes; False stops the call, which raises StateError (CANCELLED). It must not
        call this pool

Raises:
    ArgumentError: the file exists (INVALID)
    FileError, DataError, ExhaustedError: IO, CORRUPT, TIER_FULL (no space)
    StateError: CANCELLED, BUSY, STALE, STATE (blocks were dropped)
)");
    sequence.def(
        "publish",
        [](const PySequence& self, const PyNamespace& space, nb::handle keys) {
            const auto sequence = self.handle.get();
            const auto list = to_keys(keys);
            const ta::Namespace handle = space.handle.get();
            unlocked([&] { sequence->publish(handle, list); });
        },
        "space"_a, "keys"_a, nb::sig("def publish(self, space: Namespace, keys: Keys) -> None"),
        R"(Publishes its first blocks, one for each key; they outlive the sequence.

Raises:
    ArgumentError: more keys than full blocks, another namespace's blocks, a namespace of another pool (INVALID)
    StateError: BUSY, STALE, STATE (a block was dropped)
    ExhaustedError: the quota (LIMIT)
)");
    sequence.def(
        "move",
        [](const PySequence& self, int32_t tier, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            return PyMove{unlocked([&] { return sequence->move(tier, first, n); })};
        },
        "tier"_a, "first"_a, "n"_a, nb::sig("def move(self, tier: Tier, first: int, n: int) -> Move"),
        R"(Asks for blocks [first, first + n) to be in a tier.

Raises:
    ArgumentError: blocks beyond the sequence (INVALID), no such tier (UNSUPPORTED)
    StateError: BUSY, STALE
)");
    sequence.def(
        "prefetch",
        [](const PySequence& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            return PyMove{unlocked([&] { return sequence->prefetch(first, n); })};
        },
        "first"_a, "n"_a, "Asks for blocks [first, first + n) to be in the device tier, as many as fit. Raises as ``move``.");
    sequence.def(
        "pin",
        [](const PySequence& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->pin(first, n); });
        },
        "first"_a, "n"_a, R"(Keeps blocks [first, first + n) from leaving their tier for a slower one. Pins are counted.

Raises:
    ArgumentError: blocks beyond the sequence (INVALID)
    StateError: a block is not full (STATE), BUSY, STALE
)");
    sequence.def(
        "unpin",
        [](const PySequence& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->unpin(first, n); });
        },
        "first"_a, "n"_a, "Takes a pin of each block away. Raises as ``pin``; STATE: a block is not pinned.");
    sequence.def(
        "residency",
        [](const PySequence& self) {
            const auto sequence = self.handle.get();
            return unlocked([&] { return sequence->residency(); });
        },
        "Where its blocks are. Raises StateError (BUSY, STALE).");
    sequence.def(
        "send",
        [](const PySequence& self, const PyGroup& group, uint32_t to, uint64_t tag, int32_t mode) {
            const auto sequence = self.handle.get();
            const auto ranks = group.handle.get();
            return PyTransfer{ranks.shared(), unlocked([&] { return sequence->send(ranks, to, tag, mode).ticket(); }),
                              std::shared_ptr<ta_kv_pool>()};
        },
        "group"_a, "to"_a, "tag"_a, "mode"_a = int32_t{TA_SEND_COPY},
        nb::sig("def send(self, group: Group, to: int, tag: int, mode: SendMode = turboattention._enums.SendMode.COPY) -> "
                "Transfer"),
        R"(Offers it to another rank, where ``Group.receive`` with the same tag takes it.

Raises:
    ArgumentError: no such rank (INVALID)
    StateError: the group is not ready (STATE), BUSY, STALE
    PeerError: the group has ended
)");
    sequence.def(
        "partition",
        [](const PySequence& self, const PyGroup& group, int32_t output, uint32_t first_rank, uint32_t output_rank,
           uint64_t tag) {
            const auto sequence = self.handle.get();
            const auto ranks = group.handle.get();
            const ta::PartitionOptions options{
                .output = output, .first_rank = first_rank, .output_rank = output_rank, .tag = tag};
            unlocked([&] { sequence->partition(ranks, options); });
        },
        "group"_a, nb::kw_only(), "output"_a = 0, "first_rank"_a = 0, "output_rank"_a = 0, "tag"_a = 0,
        nb::sig("def partition(self, group: Group, *, output: PartitionOutput = turboattention._enums.PartitionOutput.ALL, "
                "first_rank: int = 0, output_rank: "
                "int = 0, tag: int = 0) -> None"),
        R"(Spreads it over the ranks of a group, which all make this call on a sequence of the same length with the same options, and
the same steps from then on; docs/sharing.md is the guide.

Raises:
    ArgumentError: an option outside its range, the tag of another sequence (INVALID), more than 64 ranks (UNSUPPORTED)
    StateError: the group is not ready, or it is partitioned already (STATE), BUSY, STALE
    PeerError: the group has ended
)");
}

void bind_plan(nb::module_& m) {
    nb::class_<PyPlan> plan(m, "Plan",
                            R"(Makes steps: ``Pool.create_plan``. One thread at a time, the others get StateError (BUSY);
use a plan for each thread.)");
    plan.def_prop_ro(
        "address", [](const PyPlan& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    plan.def(
        "close", [](PyPlan& self) { self.handle.close(); }, kClose);
    add_context_manager(plan);
    plan.def(
        "set_stream",
        [](PyPlan& self, uintptr_t stream) {
            const auto handle = self.handle.get();
            call([&](ta_error* e) { return ta_plan_set_stream(handle.get(), to_stream(stream), e); });
            self.place.stream = to_stream(stream);
        },
        "stream"_a, R"(The CUDA stream that later steps enqueue on.

Args:
    stream: its address, such as ``torch.cuda.current_stream().cuda_stream``; 0: the legacy default stream. It outlives them

Raises:
    StateError: a step is open (STATE)
    ArgumentError: on a CPU (UNSUPPORTED)
)");
    plan.def("step", &begin, "sequences"_a, "n_new"_a = 0, "n_query"_a = nb::none(),
             nb::sig("def step(self, sequences: Sequence | typing.Iterable[Sequence], n_new: int | typing.Iterable[int] = 0, "
                     "n_query: int "
                     "| typing.Iterable[int] | None = None) -> Step"),
             R"(Opens a step on a batch, and reserves all memory that it needs::

    with plan.step([a, b], [1, 17]) as step:
        for layer in range(layers):
            step.append(layer, k[layer], v[layer])
            step.attend(layer, q[layer], out)

Leaving the block commits the step; an exception aborts it. Where tiers are in use the call may wait for blocks
(``Tiers.begin_wait_ms``); it does not end at Ctrl-C before that.

Args:
    sequences: distinct sequences of the pool that are in no other open step
    n_new: tokens that ``append`` will bring for each, or one number for all
    n_query: queries of ``attend`` for each, the last tokens; None: as n_new

Raises:
    ArgumentError: INVALID
    StateError: a step of this plan is open (STATE), a sequence is in another one (BUSY), STALE
    ExhaustedError: the budget (TIER_FULL; ``bytes`` are lacking), MEMORY, LIMIT
    DataError: NONFINITE (on a GPU, of earlier tokens), CORRUPT
    FileError: IO
)");

    nb::class_<PyStep> step(m, "Step",
                            "One step of a batch: ``Plan.step``. One thread at a time. It is aborted when the object goes.");
    step.def(
        "append", &append, "layer"_a, "k"_a, "v"_a, nb::sig("def append(self, layer: int, k: Array, v: Array) -> None"),
        R"(Quantizes the new tokens of one layer and appends them. Each layer is appended once. On a CPU it is done on return; on a GPU
it is enqueued, and k and v must not be freed or written before the stream has got there.

Args:
    k, v: [sum(n_new), kv_heads, head_dim], the sequences one after the other, keys after their rotary embedding. float32,
        float16 or bfloat16; arrays of numpy, or by DLPack or ``__cuda_array_interface__``. Never copied

Raises:
    ArgumentError: no such layer (INVALID), SHAPE, DTYPE
    DataError: NaN or Inf (NONFINITE); ``token`` and ``head`` say where
    StateError: the step is over (STATE), BUSY
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
    q: [sum(n_query), q_heads, head_dim]; q_heads is kv_heads x 1..16
    out: as q, of any element type, not overlapping q; None: a new float32 array of numpy (on a CPU)
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
    ArgumentError: an option outside its range, outputs that overlap (INVALID), SHAPE, DTYPE
    DataError: NONFINITE (on a CPU)
    StateError: the step is over (STATE), BUSY
)");
    step.def("end", &PyStep::end, R"(Commits: the new tokens belong to their sequences.

Raises:
    StateError: a layer lacks its append (STATE): the step stays open
)");
    step.def("abort", &PyStep::abort, "Ends the step without committing: sequences are as before it.");
    step.def(
        "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Step"));
    step.def(
        "__exit__",
        [](PyStep& self, nb::handle type, nb::handle, nb::handle) {
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

void bind_group(nb::module_& m) {
    m.def(
        "make_group_id",
        [](int32_t kind) {
            const ta_group_id id = unlocked([&] { return ta::Group::make_id(kind); });
            return nb::bytes(id.bytes, sizeof id.bytes);
        },
        "kind"_a = int32_t{TA_GROUP_LOCAL},
        nb::sig("def make_group_id(kind: GroupKind = turboattention._enums.GroupKind.LOCAL) -> bytes"),
        R"(A fresh id of 128 bytes, which all ranks of the group are to be given.

Raises:
    ArgumentError: INVALID; no NCCL (UNSUPPORTED)
)");

    nb::class_<PyGroup> group(m, "Group",
                              R"(One rank of a group: ``Context.create_group``. Any thread may call it. When the last
reference goes, or by ``close``, the rank leaves and the group ends everywhere; a transfer keeps it, too.)");
    group.def_prop_ro(
        "address", [](const PyGroup& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    group.def(
        "close", [](PyGroup& self) { self.handle.close(); }, "Leaves the group, unless a transfer still has it.");
    add_context_manager(group);
    group.def(
        "wait",
        [](const PyGroup& self, std::optional<double> seconds) {
            const auto group = self.handle.get();
            ta_group_state state = 0;
            wait_for(seconds,
                     [&](std::chrono::nanoseconds slice) { return (state = group.wait(slice)) != TA_GROUP_CONNECTING; });
            return package("turboattention._enums", "GroupState")(state);
        },
        "seconds"_a = nb::none(), nb::sig("def wait(self, seconds: float | None = None) -> GroupState"),
        "Waits until the group does not connect any more, or so many seconds. Ctrl-C ends the wait.");
    group.def(
        "info",
        [](const PyGroup& self) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.info(); });
        },
        "The rank, and whether the group works.");
    group.def(
        "peer",
        [](const PyGroup& self, uint32_t rank) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.peer(rank); });
        },
        "rank"_a, R"(What lies between this rank and another.

Raises:
    ArgumentError: no such rank (INVALID)
    StateError: the group is not ready (STATE)
    PeerError: it has ended
)");
    group.def(
        "health",
        [](const PyGroup& self) {
            const auto group = self.handle.get();
            unlocked([&] { group.health(); });
        },
        "Raises PeerError, or StateError (CANCELLED), once the group has ended; ``rank`` says whose fault it was.");
    group.def(
        "abort",
        [](const PyGroup& self) {
            const auto group = self.handle.get();
            unlocked([&] { group.abort(); });
        },
        "Ends the group at all ranks.");
    group.def(
        "fileno",
        [](const PyGroup& self) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.descriptor(); });
        },
        R"(A descriptor for ``select`` and ``asyncio``'s ``add_reader``: it can be read while ``take_finished`` has tickets, or since the
state changed. It belongs to the group.

Raises:
    ArgumentError: the system gave none (UNSUPPORTED)
)");
    group.def(
        "take_finished",
        [](const PyGroup& self, size_t most) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.take_finished(most); });
        },
        "most"_a = 256,
        "Tickets (``Transfer.ticket``) that are finished, each once; fewer than ``most``: there are no more now.");
    group.def(
        "receive",
        [](const PyGroup& self, const PyPool& pool, uint32_t from, uint64_t tag) {
            const auto group = self.handle.get();
            const auto target = pool.handle.get();
            return PyTransfer{group.shared(), unlocked([&] { return group.receive(target, from, tag).ticket(); }),
                              target.shared()};
        },
        "pool"_a, "source"_a, "tag"_a, R"(Takes a sequence that rank ``source`` sends with this tag: ``Transfer.take`` has it.

Raises:
    ArgumentError: no such rank (INVALID)
    StateError: the group is not ready (STATE)
    PeerError: it has ended
)");

    nb::class_<PyTransfer> transfer(
        m, "Transfer",
        "A transfer in the background: ``Sequence.send``, ``Group.receive``, ``Namespace.fetch``. It keeps the group.");
    transfer.def_prop_ro(
        "ticket", [](const PyTransfer& self) { return self.ticket; }, "Its number in the group.");
    transfer.def(
        "query",
        [](const PyTransfer& self) {
            const ta::Transfer handle(self.group.get(), self.ticket);
            return unlocked([&] { return handle.query(); });
        },
        "How far it is. Raises StateError (STALE: finished more than 4096 tickets ago).");
    transfer.def(
        "wait", [](const PyTransfer& self, std::optional<double> seconds) { return self.wait(seconds); },
        "seconds"_a = nb::none(),
        "Waits until it is finished, or so many seconds; ``state`` says which, and may be FAILED. Ctrl-C ends the wait.");
    transfer.def(
        "cancel",
        [](const PyTransfer& self) {
            const ta::Transfer handle(self.group.get(), self.ticket);
            unlocked([&] { handle.cancel(); });
        },
        "Asks for its end; it is finished when neither rank touches its blocks any more.");
    transfer.def(
        "take",
        [](PyTransfer& self, std::optional<double> seconds) {
            if (!self.pool.get()) throw ta::Error(TA_E_STATE, "no receive, or its sequence was taken");
            const ta_transfer_info info = self.wait(seconds);
            if (!finished(info.state)) throw ta::Error(TA_E_TIMEOUT, "the transfer is not finished");
            if (info.state != TA_MOVE_DONE) {
                ta_error detail = ta::Error(info.status, info.reason).detail();
                detail.block = info.block;
                detail.rank = info.rank;
                throw ta::Error(detail);
            }
            if (!self.pool.get()) throw ta::Error(TA_E_STATE, "its sequence was taken");
            PySequence sequence(ta::Sequence(self.pool.get(), info.seq));
            self.pool = Handle<std::shared_ptr<ta_kv_pool>>(nullptr);
            return sequence;
        },
        "seconds"_a = nb::none(), R"(Waits for the sequence of a receive and hands it over, once. Ctrl-C ends the wait.

Raises:
    PeerError: it is not there after so many seconds (TIMEOUT), the group has ended
    Error: as the transfer failed
    StateError: no receive, or the sequence was taken (STATE)
)");
}

}  // namespace

NB_MODULE(_core, m) {
    use_numpy();
    nb::set_leak_warnings(false);  // what is alive at the interpreter's end is no defect
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ta::Error& error) {
            raise(error);
        }
    });
    nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { door.shut(); }));
    bind_structs(m);
    bind_context(m);
    bind_pool(m);
    bind_sequence(m);
    bind_plan(m);
    bind_group(m);
}
