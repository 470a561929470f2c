// TurboAttention for C++20: the C ABI of turboattention.h as objects. Header-only. SPDX-License-Identifier: Apache-2.0
//
// namespace ta            calls that fail throw ta::Error
// namespace ta::results   the same classes, but calls that can fail return ta::Expected<T>. Compiles with -fno-exceptions.
//
// turboattention.h is the reference for what a call does, its units, its errors and its threads. These things differ:
//  - Context, Pool, Group, Namespace, Calibrator, Plan are handles. They can be copied, like a shared_ptr, and destroyed in any
//    order: a child keeps its parent alive.
//  - The destructor of a Sequence releases it, that of an open Step aborts it, and that of a receive that nobody took cancels
//    it.
//  - Options are structs of this header for designated initializers; struct_size is set here. Structs that the library fills in are
//    those of the C header.
//  - Callbacks may throw. An exception of a progress callback or of an export's sink stops the call and leaves it. An exception
//    of a log sink is dropped, one of an allocator means that there is no memory, and one of a BlockStore fails the batch.
//  - A moved-from object may only be destroyed or assigned to.
#ifndef TURBOATTENTION_HPP
#define TURBOATTENTION_HPP

#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "turboattention.h"

// The inline namespace keeps these names apart from those inside libturboattention.a.
namespace ta {
inline namespace cpp {

// ------------------------------------------------------------------------------------------------------------ errors

// Why and where a call failed.
class Error : public std::exception {
  public:
    explicit Error(const ta_error& detail) : detail_(detail) {}
    Error(ta_status status, std::string_view message) : detail_{status, -1, -1, -1, -1, -1, -1, -1, -1, -1, {}} {
        detail_.message[message.copy(detail_.message, sizeof detail_.message - 1)] = '\0';
    }

    const char* what() const noexcept override { return detail_.message; }
    ta_status status() const noexcept { return detail_.code; }
    const char* status_name() const noexcept { return ta_status_name(detail_.code); }
    const ta_error& detail() const noexcept { return detail_; }  // sequence, block, layer, token...: -1 where it does not apply

  private:
    ta_error detail_;
};

// A value, or why there is none: the result of calls of ta::results. Expected<void> has no value.
template <class T>
class [[nodiscard]] Expected {
    using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  public:
    Expected(Value value) : state_(std::in_place_index<0>, std::move(value)) {}
    Expected(const Error& error) : state_(std::in_place_index<1>, error) {}

    bool has_value() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }
    // Only where has_value().
    Value& operator*() & noexcept { return *std::get_if<0>(&state_); }
    const Value& operator*() const& noexcept { return *std::get_if<0>(&state_); }
    Value&& operator*() && noexcept { return std::move(*std::get_if<0>(&state_)); }
    Value* operator->() noexcept { return std::get_if<0>(&state_); }
    const Value* operator->() const noexcept { return std::get_if<0>(&state_); }
    // Only where not.
    const Error& error() const noexcept { return *std::get_if<1>(&state_); }

  private:
    std::variant<Value, Error> state_;
};

struct Nothing {
    void operator()() const {}
};

// Policies: how the classes below, which are written once, report errors.
#ifdef __cpp_exceptions
struct Throwing {
    template <class T>
    using Result = T;

    template <class Call, class Make = Nothing>
    static auto run(Call&& call, Make&& make = {}) {
        ta_error error;
        if (call(&error) != TA_OK) throw Error(error);
        return make();
    }
};
#endif
struct Returning {
    template <class T>
    using Result = Expected<T>;

    template <class Call, class Make = Nothing>
    static auto run(Call&& call, Make&& make = {}) {
        using T = decltype(make());
        ta_error error;
        if (call(&error) != TA_OK) return Expected<T>(Error(error));
        if constexpr (std::is_void_v<T>)
            return make(), Expected<T>(std::monostate{});
        else
            return Expected<T>(make());
    }
};

namespace detail {

// A failure that this header finds itself, with the same shape as one of the library.
inline ta_status fail(ta_error* error, ta_status status, std::string_view message) {
    *error = Error(status, message).detail();
    return status;
}

template <class T>
T sized() {
    T value{};
    value.struct_size = sizeof(T);
    return value;
}

// Takes up to `most` of the waiting items, with calls that each fill in a piece of the list; n < room: there are no more now.
// If a later piece fails, what was taken is returned, and the next call fails.
template <class E, class T, class Call>
auto take(size_t most, Call&& call) {
    constexpr size_t at_once = 1024;  // most may be larger than memory
    std::vector<T> list;
    return E::run(
        [&](ta_error* e) {
            for (;;) {
                const size_t taken = list.size(), room = std::min(most - taken, at_once);
                list.resize(taken + room);
                uint64_t n = 0;
                const ta_status status = call(list.data() + taken, room, &n, e);
                list.resize(taken + n);
                if (status != TA_OK && taken == 0) return status;
                if (status != TA_OK || n < room || list.size() == most) return ta_status{TA_OK};
            }
        },
        [&] { return std::move(list); });
}

inline int64_t count(std::chrono::nanoseconds time) {
    return time.count();
}

// Of numbers of tokens; those that the library refuses count as none.
inline uint64_t sum(std::span<const int32_t> tokens) {
    uint64_t all = 0;
    for (const int32_t n : tokens) all += n > 0 ? static_cast<uint64_t>(n) : 0;
    return all;
}

}  // namespace detail

// For waits: without limit.
inline constexpr std::chrono::nanoseconds forever{-1};

inline uint32_t version() {
    return ta_version();
}
inline uint32_t abi_version() {
    return ta_abi_version();
}
inline const char* build_info() {
    return ta_build_info();
}

// ------------------------------------------------------------------------------------------------------------ views

struct f16 {
    uint16_t bits;  // IEEE binary16
};
struct bf16 {
    uint16_t bits;  // the upper half of a float
};

// The ta_dtype of an element type; specialise it for other types of the same layout (__half, std::bfloat16_t).
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> : std::integral_constant<ta_dtype, TA_DTYPE_F32> {};
template <>
struct dtype_of<f16> : std::integral_constant<ta_dtype, TA_DTYPE_F16> {};
template <>
struct dtype_of<bf16> : std::integral_constant<ta_dtype, TA_DTYPE_BF16> {};

// [tokens, heads, head_dim] elements that the caller owns. View<const T> for inputs, View<T> for outputs; View<const void> and
// View<void> know their dtype at run time. Strides are in elements.
template <class T>
class View {
    using Element = std::remove_const_t<T>;

  public:
    View(T* data, int64_t tokens, int64_t heads, int64_t head_dim) requires(!std::is_void_v<T>)
        : tensor_(ta_tensor_make(data, dtype_of<Element>::value, tokens, heads, head_dim)) {}
    View(T* data, int64_t tokens, int64_t heads, int64_t head_dim, int64_t stride_token,
         int64_t stride_head) requires(!std::is_void_v<T>)
        : tensor_(ta_tensor_make_strided(data, dtype_of<Element>::value, tokens, heads, head_dim, stride_token, stride_head)) {}

    View(T* data, ta_dtype dtype, int64_t tokens, int64_t heads, int64_t head_dim) requires std::is_void_v<T>
        : tensor_(ta_tensor_make(data, dtype, tokens, heads, head_dim)) {}
    View(T* data, ta_dtype dtype, int64_t tokens, int64_t heads, int64_t head_dim, int64_t stride_token,
         int64_t stride_head) requires std::is_void_v<T>
        : tensor_(ta_tensor_make_strided(data, dtype, tokens, heads, head_dim, stride_token, stride_head)) {}

    // Less is known of the result, or it may not be written.
    template <class U>
    static constexpr bool from =
        !std::same_as<T, U> &&
        (std::is_void_v<T> || std::same_as<Element, std::remove_const_t<U>>)&&(std::is_const_v<T> || !std::is_const_v<U>);
    template <class U, class = std::enable_if_t<from<U>>>
    View(const View<U>& other) : tensor_(*other.get()) {}

    T* data() const noexcept { return static_cast<T*>(tensor_.data); }
    ta_dtype dtype() const noexcept { return tensor_.dtype; }
    int64_t tokens() const noexcept { return tensor_.tokens; }
    int64_t heads() const noexcept { return tensor_.heads; }
    int64_t head_dim() const noexcept { return tensor_.head_dim; }
    const ta_tensor* get() const noexcept { return &tensor_; }

  private:
    ta_tensor tensor_;
};
using Input = View<const void>;
using Output = View<void>;

// ------------------------------------------------------------------------------------------------------------ options
//
// As the structs of the C header of nearly the same name, which say what each field means. A field that is left out has its default.

// Where host memory of a context comes from; used from any thread.
using Allocator = std::shared_ptr<std::pmr::memory_resource>;
// What the library has to say; called from any thread. The text lives for the call.
using Log = std::function<void(ta_log_level level, std::string_view message)>;
// Bytes done and in total; false stops the call, which fails with TA_E_CANCELLED.
using Progress = std::function<bool(uint64_t done, uint64_t total)>;
// Takes bytes of an export, which live for the call; they stand at `offset`. Likewise.
using Sink = std::function<bool(uint64_t offset, std::span<const uint8_t> bytes)>;

struct ContextOptions {
    ta_device_kind device = TA_DEVICE_CPU;
    int32_t device_ordinal = 0;
    int32_t threads = 0;
    ta_cpu_isa cpu_isa = TA_CPU_ISA_AUTO;
    Allocator allocator = nullptr;
    ta_log_level log_level = TA_LOG_WARNING;
    Log log = nullptr;
};

struct Numerics {
    ta_profile profile = TA_PROFILE_ACCURATE;
    ta_granularity k_granularity = TA_GRANULARITY_DEFAULT;
    ta_granularity v_granularity = TA_GRANULARITY_DEFAULT;
    ta_open_scale open_scale = TA_OPEN_SCALE_DEFAULT;
    ta_switch v_exponents = TA_DEFAULT;
    ta_switch fractional_zero = TA_DEFAULT;
    ta_switch v_search = TA_DEFAULT;
    ta_switch hadamard = TA_DEFAULT;
    int32_t sink_blocks = 0;
    ta_exp exp = TA_EXP_DEFAULT;
    ta_p p = TA_P_DEFAULT;
    ta_nonfinite nonfinite = TA_NONFINITE_DEFAULT;
    uint64_t hadamard_seed = 0;
    std::span<const float> k_offset = {};
    ta_switch k_turning = TA_DEFAULT;
    ta_switch k_search = TA_DEFAULT;
    ta_switch unit_slope = TA_DEFAULT;
    std::uint32_t q_bits = 0;  ///< of queries in decode, against K at 8 bits: 8 or 15; 0: the profile's
    ta_switch batch_invariant = TA_DEFAULT;
};

struct TierOptions {
    uint32_t host_node = 0;
    uint64_t host_bytes = 0;
    uint64_t disk_bytes = 0;
    const char* disk_folder = nullptr;
    int32_t high_percent = 0;
    int32_t low_percent = 0;
    ta_eviction eviction = TA_EVICT_LRU;
    const char* disk_path = nullptr;
    ta_switch drop_coldest = TA_DEFAULT;
    int32_t begin_wait_ms = 0;
    ta_staging staging = TA_STAGING_AUTO;
    ta_switch falling_precision = TA_DEFAULT;
    const struct ta_x_tier_tuning* tuning = nullptr;
    ta_context* peer = nullptr;  // get() of a context of another device
    uint64_t peer_bytes = 0;
};

// Layers [first, first + layers): the most keys that a query of them sees (0: no limit), and their shape (0: the pool's).
struct LayerGroup {
    uint32_t first = 0;
    uint32_t layers = 1;
    int64_t window = 0;
    uint32_t kv_heads = 0;
    uint32_t head_dim = 0;
    uint32_t v_head_dim = 0;  // 0: head_dim, where that is given
};

// The rotary embedding that callers apply to Q and K, for BasicSequence::shift.
struct Rotary {
    ta_rotary_pairs pairs = TA_ROTARY_HALVES;
    uint32_t channels = 0;                // the first ones of a head, which are turned: even
    std::span<const double> angles = {};  // [layers, channels / 2], or [channels / 2] for all layers: radians for each position
};

struct PoolOptions {
    uint32_t layers = 0;
    uint32_t kv_heads = 0;
    uint32_t head_dim = 0;
    uint32_t bits = 0;
    std::span<const uint8_t> k_bits = {};
    std::span<const uint8_t> v_bits = {};
    uint64_t budget_bytes = 0;
    uint32_t max_sequences = 0;
    Numerics numerics = {};
    std::optional<TierOptions> tiers = {};
    uint32_t v_head_dim = 0;
    std::span<const LayerGroup> layer_groups = {};
    std::optional<Rotary> rotary = {};  // without it sequences cannot be shifted
};

// How long blocks are to be kept; as it is here, no longer than others.
struct Retention {
    uint32_t priority =
        0;  // 1..63: blocks of a lower one are demoted, evicted and dropped first; 0: 32, which all have at first
    int64_t duration_ms = 0;  // up to 2^53; 0: for ever
};

struct NamespaceOptions {
    uint64_t quota_bytes = 0;
    std::array<uint8_t, 32> salt = {};
};

// A store of published blocks. One thread of the library calls it for each namespace that has it. Items are as in the C header.
// If a function returns false or throws, the batch has failed as a whole.
class BlockStore {
  public:
    virtual ~BlockStore() = default;
    virtual bool exists(std::span<ta_store_item> items, std::chrono::nanoseconds left) = 0;
    virtual bool get(std::span<ta_store_item> items, std::chrono::nanoseconds left) = 0;
    virtual bool put(std::span<ta_store_item> items, std::chrono::nanoseconds left) = 0;
    virtual bool remove(std::span<ta_store_item> items, std::chrono::nanoseconds left) = 0;
};

struct StoreOptions {
    int32_t timeout_ms = 0;
    ta_switch write_through = TA_DEFAULT;
    ta_switch authenticate = TA_DEFAULT;
    uint64_t batch_bytes = 0;
};

struct StepOptions {
    int32_t wait_ms = 0;  // 0: TierOptions::begin_wait_ms; -1: not at all
    ta_switch drafts = TA_DEFAULT;
    ta_switch layers_in_order = TA_DEFAULT;
    std::span<const int32_t> tree_parent = {};      // [sum(n_new)], or empty
    std::span<const int64_t> query_positions = {};  // [sum(n_query)], or empty
};

struct AttendOptions {
    ta_mask mask = TA_MASK_CAUSAL;
    float scale = 0;
    float softcap = 0;
    int64_t window = 0;
    const float* alibi_slopes = nullptr;
    const float* sinks = nullptr;
    ta_exp exp = TA_EXP_DEFAULT;
    ta_p p = TA_P_DEFAULT;
};

struct DenseOptions {
    ta_dense_variant variant = TA_DENSE_INT8_PAGE;
    uint32_t batch = 0;
    std::span<const int64_t> q_offsets = {};
    std::span<const int64_t> k_offsets = {};
    ta_granularity v_granularity = TA_GRANULARITY_DEFAULT;
    ta_nonfinite nonfinite = TA_NONFINITE_DEFAULT;
    AttendOptions attend = {};
    ta_stream stream = nullptr;
    uint32_t group_size = 0;
};

struct GroupOptions {
    uint32_t rank = 0;
    uint32_t ranks = 0;
    ta_group_kind kind = TA_GROUP_LOCAL;
    ta_group_id id = {};
    int32_t connect_ms = 0;
    int32_t operation_ms = 0;
    int32_t silence_ms = 0;
    uint64_t staging_bytes = 0;
    const struct ta_x_group_fault* fault = nullptr;
    void* nccl_comm = nullptr;
    bool hosts_apart = false;
};

struct PartitionOptions {
    ta_partition_output output = TA_OUTPUT_ALL;
    uint32_t first_rank = 0;
    uint32_t output_rank = 0;
    uint64_t tag = 0;
};

namespace detail {

inline ta_attend_options to_c(const AttendOptions& o) {
    auto c = sized<ta_attend_options>();
    c.mask = o.mask;
    c.scale = o.scale;
    c.softcap = o.softcap;
    c.window = o.window;
    c.alibi_slopes = o.alibi_slopes;
    c.sinks = o.sinks;
    c.exp = o.exp;
    c.p = o.p;
    return c;
}

inline ta_step_options to_c(const StepOptions& o) {
    auto c = sized<ta_step_options>();
    c.wait_ms = o.wait_ms;
    c.drafts = o.drafts;
    c.layers_in_order = o.layers_in_order;
    c.tree_parent = o.tree_parent.empty() ? nullptr : o.tree_parent.data();
    c.query_positions = o.query_positions.empty() ? nullptr : o.query_positions.data();
    return c;
}

inline ta_numerics to_c(const Numerics& o) {
    auto c = sized<ta_numerics>();
    c.profile = o.profile;
    c.k_granularity = o.k_granularity;
    c.v_granularity = o.v_granularity;
    c.open_scale = o.open_scale;
    c.v_exponents = o.v_exponents;
    c.fractional_zero = o.fractional_zero;
    c.v_search = o.v_search;
    c.hadamard = o.hadamard;
    c.sink_blocks = o.sink_blocks;
    c.exp = o.exp;
    c.p = o.p;
    c.nonfinite = o.nonfinite;
    c.hadamard_seed = o.hadamard_seed;
    c.k_offset = o.k_offset.empty() ? nullptr : o.k_offset.data();
    c.k_turning = o.k_turning;
    c.k_search = o.k_search;
    c.unit_slope = o.unit_slope;
    c.q_bits = o.q_bits;
    c.batch_invariant = o.batch_invariant;
    return c;
}

inline ta_tier_options to_c(const TierOptions& o) {
    auto c = sized<ta_tier_options>();
    c.host_node = o.host_node;
    c.host_bytes = o.host_bytes;
    c.disk_bytes = o.disk_bytes;
    c.disk_folder = o.disk_folder;
    c.high_percent = o.high_percent;
    c.low_percent = o.low_percent;
    c.eviction = o.eviction;
    c.disk_path = o.disk_path;
    c.drop_coldest = o.drop_coldest;
    c.begin_wait_ms = o.begin_wait_ms;
    c.staging = o.staging;
    c.falling_precision = o.falling_precision;
    c.tuning = o.tuning;
    c.peer = o.peer;
    c.peer_bytes = o.peer_bytes;
    return c;
}

// Of a pool with so many layers.
inline ta_rotary to_c(const Rotary& o, uint32_t layers) {
    auto c = sized<ta_rotary>();
    c.pairs = o.pairs;
    c.channels = o.channels;
    c.layers = o.angles.size() == o.channels / 2 ? 1 : layers;
    c.angles = o.angles.data();
    return c;
}

// How many elements maps over all layers have: one for each head, and one for each channel of K. For groups that the library
// refuses the number is undefined.
struct MapSizes {
    uint64_t heads, channels;
};
template <class Group>
MapSizes map_sizes(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, std::span<const Group> groups) {
    MapSizes n{uint64_t{layers} * kv_heads, uint64_t{layers} * kv_heads * head_dim};
    for (const Group& g : groups) {
        const uint64_t heads = g.kv_heads ? g.kv_heads : kv_heads, channels = g.head_dim ? g.head_dim : head_dim;
        n.heads += g.layers * (heads - kv_heads);
        n.channels += g.layers * (heads * channels - uint64_t{kv_heads} * head_dim);
    }
    return n;
}

// The shape alone; the struct points to `groups`.
inline ta_kv_pool_options shape_to_c(const PoolOptions& o, std::vector<ta_layer_group>& groups) {
    for (const LayerGroup& g : o.layer_groups) {
        auto& group = groups.emplace_back(sized<ta_layer_group>());
        group.first = g.first;
        group.layers = g.layers;
        group.window = g.window;
        group.kv_heads = g.kv_heads;
        group.head_dim = g.head_dim;
        group.v_head_dim = g.v_head_dim;
    }
    auto c = sized<ta_kv_pool_options>();
    c.layers = o.layers;
    c.kv_heads = o.kv_heads;
    c.head_dim = o.head_dim;
    c.v_head_dim = o.v_head_dim;
    c.layer_groups = groups.data();
    c.n_layer_groups = static_cast<uint32_t>(groups.size());
    return c;
}

inline ta_group_options to_c(const GroupOptions& o) {
    auto c = sized<ta_group_options>();
    c.rank = o.rank;
    c.ranks = o.ranks;
    c.kind = o.kind;
    c.id = &o.id;
    c.connect_ms = o.connect_ms;
    c.operation_ms = o.operation_ms;
    c.silence_ms = o.silence_ms;
    c.staging_bytes = o.staging_bytes;
    c.fault = o.fault;
    c.nccl_comm = o.nccl_comm;
    c.hosts_apart = o.hosts_apart ? 1 : 0;
    return c;
}

// Runs a callback where nothing may unwind; false: it threw.
template <class F>
bool guarded(F&& f) noexcept {
#ifdef __cpp_exceptions
    try {
        f();
    } catch (...) {
        return false;
    }
#else
    f();
#endif
    return true;
}

template <class T>
void release(void* user) {
    delete static_cast<T*>(user);
}

inline ta_allocator to_c(const Allocator& allocator) {
    auto c = sized<ta_allocator>();
    c.allocate = [](size_t bytes, size_t alignment, void* user) -> void* {
        void* memory = nullptr;
        guarded([&] { memory = (*static_cast<Allocator*>(user))->allocate(bytes, alignment); });
        return memory;
    };
    c.deallocate = [](void* memory, size_t bytes, size_t alignment, void* user) {
        guarded([&] { (*static_cast<Allocator*>(user))->deallocate(memory, bytes, alignment); });
    };
    c.user = new Allocator(allocator);
    c.release = release<Allocator>;
    return c;
}

inline ta_log_sink to_c(const Log& log, ta_log_level level) {
    auto c = sized<ta_log_sink>();
    c.level = level;
    c.log = [](ta_log_level at, const char* message, void* user) { guarded([&] { (*static_cast<Log*>(user))(at, message); }); };
    c.user = new Log(log);
    c.release = release<Log>;
    return c;
}

using StoreMethod = bool (BlockStore::*)(std::span<ta_store_item>, std::chrono::nanoseconds);
template <StoreMethod kMethod>
int32_t call_store(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    bool done = false;
    const bool returned = guarded([&] {
        BlockStore& store = **static_cast<std::shared_ptr<BlockStore>*>(user);
        done = (store.*kMethod)({items, static_cast<size_t>(n)}, std::chrono::nanoseconds(nanoseconds));
    });
    return returned && done ? 0 : -1;
}

inline ta_block_store to_c(std::shared_ptr<BlockStore> store) {
    auto c = sized<ta_block_store>();
    if (!store) return c;  // which the call refuses
    c.exists = call_store<&BlockStore::exists>;
    c.get = call_store<&BlockStore::get>;
    c.put = call_store<&BlockStore::put>;
    c.remove = call_store<&BlockStore::remove>;
    c.user = new std::shared_ptr<BlockStore>(std::move(store));
    c.release = release<std::shared_ptr<BlockStore>>;
    return c;
}

// A callback of one call. What it throws goes on behind that.
class CallbackOfCall {
  public:
    CallbackOfCall(const CallbackOfCall&) = delete;
    CallbackOfCall& operator=(const CallbackOfCall&) = delete;

  protected:
    CallbackOfCall() = default;

    // f() -> bool says whether the call goes on; what C is told is not 0 where it stops.
    template <class F>
    int32_t ask(F&& f) noexcept {
        bool goes_on = false;
#ifdef __cpp_exceptions
        try {
            goes_on = f();
        } catch (...) {
            thrown_ = std::current_exception();
        }
#else
        goes_on = f();
#endif
        return goes_on ? 0 : 1;
    }
    ta_status end(ta_status status) const {
#ifdef __cpp_exceptions
        if (thrown_) std::rethrow_exception(thrown_);
#endif
        return status;
    }

  private:
    std::exception_ptr thrown_;
};

class Reporter : CallbackOfCall {
  public:
    explicit Reporter(const Progress& progress) : progress_(progress), set_(sized<ta_progress>()) {
        set_.user = this;
        set_.report = [](void* user, uint64_t done, uint64_t total) {
            auto& self = *static_cast<Reporter*>(user);
            return self.ask([&] { return self.progress_(done, total); });
        };
    }

    template <class Call>
    ta_status run(Call&& call) {
        return end(call(progress_ ? &set_ : nullptr));
    }

  private:
    const Progress& progress_;
    ta_progress set_;
};

class Exporter : CallbackOfCall {
  public:
    explicit Exporter(const Sink& sink) : sink_(sink), set_(sized<ta_sink>()) {
        set_.user = this;
        if (!sink) return;  // which the call refuses
        set_.write = [](void* user, uint64_t offset, const void* data, uint64_t n) {
            auto& self = *static_cast<Exporter*>(user);
            return self.ask([&] { return self.sink_(offset, {static_cast<const uint8_t*>(data), n}); });
        };
    }

    template <class Call>
    ta_status run(Call&& call) {
        return end(call(&set_));
    }

  private:
    const Sink& sink_;
    ta_sink set_;
};

}  // namespace detail

// ------------------------------------------------------------------------------------------------------------ prefixes, moves

// Stands for all tokens up to the end of a block.
using Key = std::array<uint8_t, 32>;

namespace detail {
inline const uint8_t* bytes(std::span<const Key> keys) {
    return keys.empty() ? nullptr : keys.front().data();
}
}  // namespace detail

template <class E>
class BasicContext;
template <class E>
class BasicPool;
template <class E>
class BasicPlan;
template <class E>
class BasicNamespace;
template <class E>
class BasicGroup;
template <class E>
class BasicTransfer;

// Moves of blocks that go on in the background, whatever becomes of this object.
template <class E>
class BasicMove {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    BasicMove(std::shared_ptr<ta_kv_pool> pool, ta_ticket ticket) : pool_(std::move(pool)), ticket_(ticket) {}

    ta_ticket ticket() const noexcept { return ticket_; }
    Result<ta_move_info> query() const {
        auto info = detail::sized<ta_move_info>();
        return E::run([&](ta_error* e) { return ta_move_query(pool_.get(), ticket_, &info, e); }, [&] { return info; });
    }
    // Until they are finished or the time is over: see `state`.
    Result<ta_move_info> wait(std::chrono::nanoseconds limit = forever) const {
        auto info = detail::sized<ta_move_info>();
        return E::run([&](ta_error* e) { return ta_move_wait(pool_.get(), ticket_, detail::count(limit), &info, e); },
                      [&] { return info; });
    }
    Result<void> cancel() const {
        return E::run([&](ta_error* e) { return ta_move_cancel(pool_.get(), ticket_, e); });
    }

  private:
    std::shared_ptr<ta_kv_pool> pool_;
    ta_ticket ticket_;
};

// ------------------------------------------------------------------------------------------------------------ sequences

// Owns a sequence of a pool, which it keeps alive: the destructor releases it.
template <class E>
class BasicSequence {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a sequence that exists.
    BasicSequence(std::shared_ptr<ta_kv_pool> pool, ta_seq id) : pool_(std::move(pool)), id_(id) {}
    BasicSequence(BasicSequence&& other) noexcept : pool_(std::move(other.pool_)), id_(std::exchange(other.id_, 0)) {}
    BasicSequence& operator=(BasicSequence&& other) noexcept {
        BasicSequence(std::move(other)).swap(*this);
        return *this;
    }
    ~BasicSequence() {
        if (id_ != 0) ta_seq_release(pool_.get(), id_, nullptr);
    }
    void swap(BasicSequence& other) noexcept { std::swap(pool_, other.pool_), std::swap(id_, other.id_); }

    ta_seq id() const noexcept { return id_; }
    const std::shared_ptr<ta_kv_pool>& pool() const noexcept { return pool_; }
    // Gives the sequence away: somebody else releases it.
    ta_seq detach() noexcept { return std::exchange(id_, 0); }
    // Releases it now. It is given up even where that fails.
    Result<void> release() {
        return E::run([&](ta_error* e) { return ta_seq_release(pool_.get(), std::exchange(id_, 0), e); });
    }

    Result<int64_t> length() const {
        int64_t length = 0;
        return E::run([&](ta_error* e) { return ta_seq_length(pool_.get(), id_, &length, e); }, [&] { return length; });
    }
    Result<BasicSequence> fork() const {
        ta_seq id = 0;
        return E::run([&](ta_error* e) { return ta_seq_fork(pool_.get(), id_, &id, e); },
                      [&] { return BasicSequence(pool_, id); });
    }
    Result<void> truncate(int64_t length) const {
        return E::run([&](ta_error* e) { return ta_seq_truncate(pool_.get(), id_, length, e); });
    }
    // Forgets the tokens of whole blocks in tokens [first, first + n); returns their number. Positions and length stay.
    Result<int64_t> forget(int64_t first, int64_t n) const {
        int64_t forgotten = 0;
        return E::run([&](ta_error* e) { return ta_seq_forget(pool_.get(), id_, first, n, &forgotten, e); },
                      [&] { return forgotten; });
    }
    // Forgets tokens [first, first + n), multiples of 64, and closes the gap: attention sees the tokens before it n positions
    // later.
    Result<void> shift(int64_t first, int64_t n) const {
        return E::run([&](ta_error* e) { return ta_seq_shift(pool_.get(), id_, first, n, e); });
    }
    // Promises room in the device tier for the next tokens; 0 tokens end that.
    Result<void> reserve(int64_t tokens, int32_t wait_ms = 0) const {
        return E::run([&](ta_error* e) { return ta_seq_reserve(pool_.get(), id_, tokens, wait_ms, e); });
    }
    Result<void> set_priority(int32_t priority) const {
        return E::run([&](ta_error* e) { return ta_seq_set_priority(pool_.get(), id_, priority, e); });
    }
    Result<void> verify() const {
        return E::run([&](ta_error* e) { return ta_seq_verify(pool_.get(), id_, e); });
    }
    Result<void> save(const char* path, const Progress& progress = nullptr) const {
        detail::Reporter reporter(progress);
        return E::run([&](ta_error* e) {
            return reporter.run([&](const ta_progress* p) { return ta_seq_save(pool_.get(), id_, path, p, e); });
        });
    }
    // Writes the bytes of the file that a save would write to a sink; returns their number. The beginning comes last.
    Result<uint64_t> export_to(const Sink& sink) const {
        detail::Exporter exporter(sink);
        uint64_t n = 0;
        return E::run(
            [&](ta_error* e) {
                return exporter.run([&](const ta_sink* to) { return ta_seq_export(pool_.get(), id_, to, &n, e); });
            },
            [&] { return n; });
    }
    Result<std::vector<uint8_t>> export_bytes() const {
        std::vector<uint8_t> all;
        const Sink append = [&](uint64_t offset, std::span<const uint8_t> bytes) {
            if (all.size() < offset + bytes.size()) all.resize(offset + bytes.size());
            std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
            return true;
        };
        detail::Exporter exporter(append);
        return E::run(
            [&](ta_error* e) {
                return exporter.run([&](const ta_sink* to) { return ta_seq_export(pool_.get(), id_, to, nullptr, e); });
            },
            [&] { return std::move(all); });
    }
    Result<void> publish(const BasicNamespace<E>& space, std::span<const Key> keys) const {
        return E::run([&](ta_error* e) {
            if (space.pool() != pool_) return detail::fail(e, TA_E_INVALID, "the namespace is of another pool");
            return ta_seq_publish(pool_.get(), id_, space.id(), detail::bytes(keys), keys.size(), e);
        });
    }

    // Blocks [first, first + n) to a tier.
    Result<BasicMove<E>> move(ta_tier tier, uint64_t first, uint64_t n) const {
        ta_ticket ticket = 0;
        return E::run([&](ta_error* e) { return ta_seq_move(pool_.get(), id_, first, n, tier, &ticket, e); },
                      [&] { return BasicMove<E>(pool_, ticket); });
    }
    Result<BasicMove<E>> prefetch(uint64_t first, uint64_t n) const {
        ta_ticket ticket = 0;
        return E::run([&](ta_error* e) { return ta_seq_prefetch(pool_.get(), id_, first, n, &ticket, e); },
                      [&] { return BasicMove<E>(pool_, ticket); });
    }
    // All blocks, open ones too, to a tier below the device.
    Result<BasicMove<E>> suspend(ta_tier tier) const {
        ta_ticket ticket = 0;
        return E::run([&](ta_error* e) { return ta_seq_suspend(pool_.get(), id_, tier, &ticket, e); },
                      [&] { return BasicMove<E>(pool_, ticket); });
    }
    Result<void> pin(uint64_t first, uint64_t n) const {
        return E::run([&](ta_error* e) { return ta_seq_pin(pool_.get(), id_, first, n, e); });
    }
    Result<void> unpin(uint64_t first, uint64_t n) const {
        return E::run([&](ta_error* e) { return ta_seq_unpin(pool_.get(), id_, first, n, e); });
    }
    // Gives full blocks a priority; without one they have what all have at first.
    Result<void> retain(uint64_t first, uint64_t n, const Retention& retention = {}) const {
        auto c = detail::sized<ta_retention>();
        c.priority = retention.priority;
        c.duration_ms = retention.duration_ms;
        return E::run([&](ta_error* e) { return ta_seq_retain(pool_.get(), id_, first, n, &c, e); });
    }
    // Block first + i of the sequence is element i.
    Result<std::vector<ta_block_info>> describe_blocks(uint64_t first, uint64_t n) const {
        return list_blocks<ta_block_info>(first, n, ta_seq_describe_blocks);
    }
    // Likewise where it lies; nullptr: in no memory. Pin what is to be read.
    Result<std::vector<const void*>> locate_blocks(uint64_t first, uint64_t n) const {
        return list_blocks<const void*>(first, n, ta_seq_locate_blocks);
    }
    Result<ta_residency> residency() const {
        auto out = detail::sized<ta_residency>();
        return E::run([&](ta_error* e) { return ta_seq_residency(pool_.get(), id_, &out, e); }, [&] { return out; });
    }

    Result<BasicTransfer<E>> send(const BasicGroup<E>& group, uint32_t to, uint64_t tag,
                                  ta_send_mode mode = TA_SEND_COPY) const {
        ta_ticket ticket = 0;
        return E::run([&](ta_error* e) { return ta_seq_send(group.get(), pool_.get(), id_, to, tag, mode, &ticket, e); },
                      [&] { return BasicTransfer<E>(group.shared(), ticket); });
    }
    Result<void> partition(const BasicGroup<E>& group, const PartitionOptions& options = {}) const {
        auto c = detail::sized<ta_partition_options>();
        c.output = options.output;
        c.first_rank = options.first_rank;
        c.output_rank = options.output_rank;
        c.tag = options.tag;
        return E::run([&](ta_error* e) { return ta_seq_partition(group.get(), pool_.get(), id_, &c, e); });
    }

  private:
    // A list of a call that fills in an element for each block.
    template <class T, class Call>
    Result<std::vector<T>> list_blocks(uint64_t first, uint64_t n, Call list) const {
        std::vector<T> blocks;
        int64_t length = 0;
        return E::run(
            [&](ta_error* e) {
                const ta_status status = ta_seq_length(pool_.get(), id_, &length, e);
                if (status != TA_OK) return status;
                if (n > static_cast<uint64_t>(length) / 64 + 1)  // which might take more memory than there is
                    return detail::fail(e, TA_E_INVALID, "the sequence has fewer blocks than are listed");
                blocks.resize(n);
                return list(pool_.get(), id_, first, n, blocks.data(), e);
            },
            [&] { return std::move(blocks); });
    }

    std::shared_ptr<ta_kv_pool> pool_;
    ta_seq id_;
};

// A namespace of published prefixes. It belongs to the pool, not to this handle: it ends by destroy() or with the pool. In a
// persistent disk tier its published blocks outlive the pool.
template <class E>
class BasicNamespace {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    BasicNamespace(std::shared_ptr<ta_kv_pool> pool, ta_namespace id) : pool_(std::move(pool)), id_(id) {}

    ta_namespace id() const noexcept { return id_; }
    const std::shared_ptr<ta_kv_pool>& pool() const noexcept { return pool_; }
    Result<void> destroy() const {
        return E::run([&](ta_error* e) { return ta_namespace_destroy(pool_.get(), id_, e); });
    }
    Result<ta_namespace_stats> stats() const {
        auto out = detail::sized<ta_namespace_stats>();
        return E::run([&](ta_error* e) { return ta_namespace_get_stats(pool_.get(), id_, &out, e); }, [&] { return out; });
    }
    Result<void> flush() const {
        return E::run([&](ta_error* e) { return ta_namespace_flush(pool_.get(), id_, e); });
    }

    // Attaches a store: from now on published blocks are put to it, too, and can be loaded from it. The library releases the
    // set.
    Result<void> attach_store(const ta_block_store& store, const StoreOptions& options = {}) const {
        auto c = detail::sized<ta_store_options>();
        c.timeout_ms = options.timeout_ms;
        c.write_through = options.write_through;
        c.authenticate = options.authenticate;
        c.batch_bytes = options.batch_bytes;
        return E::run([&](ta_error* e) { return ta_namespace_attach_store(pool_.get(), id_, &store, &c, e); });
    }
    Result<void> attach_store(std::shared_ptr<BlockStore> store, const StoreOptions& options = {}) const {
        return attach_store(detail::to_c(std::move(store)), options);
    }
    Result<void> detach_store() const {
        return E::run([&](ta_error* e) { return ta_namespace_detach_store(pool_.get(), id_, e); });
    }
    // Blocks of the first keys that are not published come from the store.
    Result<BasicMove<E>> load(std::span<const Key> keys) const {
        ta_ticket ticket = 0;
        return E::run(
            [&](ta_error* e) { return ta_namespace_load(pool_.get(), id_, detail::bytes(keys), keys.size(), &ticket, e); },
            [&] { return BasicMove<E>(pool_, ticket); });
    }
    // How many published blocks are not known to be in the store then.
    Result<uint64_t> flush_store(std::chrono::nanoseconds limit = forever) const {
        uint64_t missing = 0;
        return E::run(
            [&](ta_error* e) { return ta_namespace_flush_store(pool_.get(), id_, detail::count(limit), &missing, e); },
            [&] { return missing; });
    }
    Result<ta_store_stats> store_stats() const {
        auto out = detail::sized<ta_store_stats>();
        return E::run([&](ta_error* e) { return ta_namespace_get_store_stats(pool_.get(), id_, &out, e); },
                      [&] { return out; });
    }

    struct Match {
        BasicSequence<E> sequence;
        int64_t length;  // tokens
    };
    // A new sequence that begins with the blocks of the first keys, as many as are published.
    Result<Match> match(std::span<const Key> keys) const {
        ta_seq id = 0;
        int64_t length = 0;
        return E::run(
            [&](ta_error* e) {
                return ta_seq_match_prefix(pool_.get(), id_, detail::bytes(keys), keys.size(), &id, &length, e);
            },
            [&] {
                return Match{BasicSequence<E>(pool_, id), length};
            });
    }

    Result<std::vector<Key>> hash_keys(std::span<const Key> keys) const {
        std::vector<Key> hashed(keys.size());
        return E::run(
            [&](ta_error* e) {
                return ta_namespace_hash_keys(pool_.get(), id_, detail::bytes(keys), keys.size(),
                                              hashed.empty() ? nullptr : hashed.front().data(), e);
            },
            [&] { return std::move(hashed); });
    }
    // The oldest events, each once; fewer than `most`: there are no more now.
    Result<std::vector<ta_prefix_event>> take_events(size_t most = 256) const {
        return detail::take<E, ta_prefix_event>(most, [&](ta_prefix_event* events, size_t room, uint64_t* n, ta_error* e) {
            return ta_namespace_take_events(pool_.get(), id_, events, room, n, e);
        });
    }

    Result<void> join(const BasicGroup<E>& group) const {
        return E::run([&](ta_error* e) { return ta_namespace_join(group.get(), pool_.get(), id_, e); });
    }
    Result<void> leave(const BasicGroup<E>& group) const {
        return E::run([&](ta_error* e) { return ta_namespace_leave(group.get(), pool_.get(), id_, e); });
    }
    // Which ranks have the blocks of the keys, as far as they have told within the time.
    Result<std::vector<ta_prefix_place>> lookup(const BasicGroup<E>& group, std::span<const Key> keys,
                                                std::chrono::nanoseconds limit = {}) const {
        std::vector<ta_prefix_place> places(keys.size());
        return E::run(
            [&](ta_error* e) {
                return ta_namespace_lookup(group.get(), pool_.get(), id_, detail::bytes(keys), keys.size(),
                                           detail::count(limit), places.data(), e);
            },
            [&] { return std::move(places); });
    }
    Result<BasicTransfer<E>> fetch(const BasicGroup<E>& group, std::span<const Key> keys) const {
        ta_ticket ticket = 0;
        return E::run(
            [&](ta_error* e) {
                return ta_namespace_fetch(group.get(), pool_.get(), id_, detail::bytes(keys), keys.size(), &ticket, e);
            },
            [&] { return BasicTransfer<E>(group.shared(), ticket); });
    }

  private:
    std::shared_ptr<ta_kv_pool> pool_;
    ta_namespace id_;
};

// ------------------------------------------------------------------------------------------------------------ plan

// An open plan: one step of a batch. The destructor aborts it unless it was ended. Keeps the plan alive. Calls on a step that
// was ended or aborted fail with TA_E_STATE.
template <class E>
class BasicStep {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a plan that is open, on so many sequences.
    BasicStep(std::shared_ptr<ta_plan> plan, size_t sequences) : plan_(std::move(plan)), sequences_(sequences) {}
    BasicStep(BasicStep&&) noexcept = default;
    BasicStep& operator=(BasicStep&& other) noexcept {
        BasicStep(std::move(other)).swap(*this);
        return *this;
    }
    void swap(BasicStep& other) noexcept { std::swap(plan_, other.plan_), std::swap(sequences_, other.sequences_); }
    ~BasicStep() {
        if (plan_) ta_plan_abort(plan_.get(), nullptr);
    }

    // k, v: [sum(n_new), kv_heads, head_dim]
    Result<void> append(uint32_t layer, const Input& k, const Input& v) const {
        return call([&](ta_error* e) { return ta_append(plan_.get(), layer, k.get(), v.get(), e); });
    }
    // q, out: [sum(n_query), q_heads, head_dim]; lse: [sum(n_query), q_heads], contiguous, may be null
    Result<void> attend(uint32_t layer, const Input& q, const Output& out, float* lse = nullptr) const {
        return call([&](ta_error* e) { return ta_attend(plan_.get(), layer, q.get(), out.get(), lse, nullptr, e); });
    }
    Result<void> attend(uint32_t layer, const Input& q, const Output& out, float* lse, const AttendOptions& options) const {
        const ta_attend_options c = detail::to_c(options);
        return call([&](ta_error* e) { return ta_attend(plan_.get(), layer, q.get(), out.get(), lse, &c, e); });
    }
    // Commits. Where it fails the step stays open.
    Result<void> end() {
        return call([&](ta_error* e) { return ta_plan_end(plan_.get(), nullptr, e); }, [&] { plan_.reset(); });
    }
    // Commits a part of each sequence's new tokens, of a step with StepOptions::drafts.
    //   keep  [sequences] 1 + the index of the last token that stays; 0: none stays
    Result<void> end(std::span<const int32_t> keep) {
        return call(
            [&](ta_error* e) {
                if (keep.size() != sequences_) return detail::fail(e, TA_E_INVALID, "keep has one element for each sequence");
                return ta_plan_end(plan_.get(), keep.data(), e);
            },
            [&] { plan_.reset(); });
    }
    Result<void> abort() {
        const auto plan = plan_;
        return call([&](ta_error* e) { return plan_.reset(), ta_plan_abort(plan.get(), e); });
    }

  private:
    // A step that has ended, or was moved from, refuses.
    template <class Call, class Make = Nothing>
    auto call(Call&& of_plan, Make&& make = {}) const {
        return E::run([&](ta_error* e) { return plan_ ? of_plan(e) : detail::fail(e, TA_E_STATE, "the step has ended"); },
                      make);
    }

    std::shared_ptr<ta_plan> plan_;  // null: it has ended
    size_t sequences_;
};

// A sequence's part of a step.
template <class E>
struct BasicRow {
    const BasicSequence<E>& sequence;
    int32_t n_new = 0;
    int32_t n_query = -1;  // -1: as n_new
};

template <class E>
class BasicPlan {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a handle. Where the pool is given, sequences of other pools are refused.
    explicit BasicPlan(ta_plan* handle, std::shared_ptr<ta_kv_pool> pool = nullptr)
        : handle_(handle, ta_plan_destroy), pool_(std::move(pool)) {}

    ta_plan* get() const noexcept { return handle_.get(); }
    const std::shared_ptr<ta_plan>& shared() const noexcept { return handle_; }
    Result<void> set_stream(ta_stream stream) const {
        return E::run([&](ta_error* e) { return ta_plan_set_stream(handle_.get(), stream, e); });
    }

    // n_new, n_query: one for each sequence, or empty: no new tokens; as many queries as new tokens. Allocates nothing.
    Result<BasicStep<E>> begin(std::span<const ta_seq> sequences, std::span<const int32_t> n_new = {},
                               std::span<const int32_t> n_query = {}, const StepOptions& options = {}) const {
        return open(sequences, n_new, n_query, options, false);
    }
    Result<BasicStep<E>> begin(const BasicSequence<E>& sequence, int32_t n_new, int32_t n_query = -1,
                               const StepOptions& options = {}) const {
        const ta_seq id = sequence.id();
        const int32_t queries = n_query < 0 ? n_new : n_query;
        return open(std::span(&id, 1), std::span(&n_new, 1), std::span(&queries, 1), options, strange(sequence));
    }
    Result<BasicStep<E>> begin(std::span<const BasicRow<E>> rows, const StepOptions& options = {}) const {
        std::vector<ta_seq> ids;
        std::vector<int32_t> n_new, n_query;
        bool of_another_pool = false;
        for (const auto& row : rows) {
            ids.push_back(row.sequence.id());
            n_new.push_back(row.n_new);
            n_query.push_back(row.n_query < 0 ? row.n_new : row.n_query);
            of_another_pool = of_another_pool || strange(row.sequence);
        }
        return open(ids, n_new, n_query, options, of_another_pool);
    }
    Result<BasicStep<E>> begin(std::initializer_list<BasicRow<E>> rows, const StepOptions& options = {}) const {
        return begin(std::span<const BasicRow<E>>(rows.begin(), rows.size()), options);
    }

  private:
    bool strange(const BasicSequence<E>& sequence) const { return pool_ && sequence.pool() != pool_; }

    Result<BasicStep<E>> open(std::span<const ta_seq> sequences, std::span<const int32_t> n_new,
                              std::span<const int32_t> n_query, const StepOptions& options, bool of_another_pool) const {
        return E::run(
            [&](ta_error* e) {
                if (of_another_pool) return detail::fail(e, TA_E_INVALID, "a sequence is of another pool than the plan");
                if ((!n_new.empty() && n_new.size() != sequences.size()) ||
                    (!n_query.empty() && n_query.size() != sequences.size()) || sequences.size() > UINT32_MAX)
                    return detail::fail(e, TA_E_INVALID, "n_new and n_query have as many elements as sequences, or none");
                if (!options.tree_parent.empty() && options.tree_parent.size() != detail::sum(n_new))
                    return detail::fail(e, TA_E_INVALID, "tree_parent has one element for each new token");
                if (!options.query_positions.empty() &&
                    options.query_positions.size() != detail::sum(n_query.empty() ? n_new : n_query))
                    return detail::fail(e, TA_E_INVALID, "query_positions has one element for each query token");
                const ta_step_options c = detail::to_c(options);
                return ta_plan_begin(handle_.get(), static_cast<uint32_t>(sequences.size()), sequences.data(),
                                     n_new.empty() ? nullptr : n_new.data(), n_query.empty() ? nullptr : n_query.data(), &c, e);
            },
            [&] { return BasicStep<E>(handle_, sequences.size()); });
    }

    std::shared_ptr<ta_plan> handle_;
    std::shared_ptr<ta_kv_pool> pool_;
};

// ------------------------------------------------------------------------------------------------------------ pool

template <class E>
class BasicPool {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a handle.
    explicit BasicPool(ta_kv_pool* handle) : handle_(handle, ta_kv_pool_destroy) {}

    ta_kv_pool* get() const noexcept { return handle_.get(); }
    const std::shared_ptr<ta_kv_pool>& shared() const noexcept { return handle_; }

    // Ends all sequences; what is called later fails with TA_E_CLOSED.
    Result<void> close() const {
        return E::run([&](ta_error* e) { return ta_kv_pool_close(get(), e); });
    }
    Result<BasicPlan<E>> create_plan() const {
        ta_plan* plan = nullptr;
        return E::run([&](ta_error* e) { return ta_plan_create(get(), nullptr, &plan, e); },
                      [&] { return BasicPlan<E>(plan, handle_); });
    }
    Result<BasicSequence<E>> create_sequence() const {
        ta_seq id = 0;
        return E::run([&](ta_error* e) { return ta_seq_create(get(), &id, e); }, [&] { return BasicSequence<E>(handle_, id); });
    }
    Result<BasicNamespace<E>> create_namespace(const NamespaceOptions& options) const {
        auto c = detail::sized<ta_namespace_options>();
        c.quota_bytes = options.quota_bytes;
        for (size_t i = 0; i < options.salt.size(); ++i) c.salt[i] = options.salt[i];
        ta_namespace id = 0;
        return E::run([&](ta_error* e) { return ta_namespace_create(get(), &c, &id, e); },
                      [&] { return BasicNamespace<E>(handle_, id); });
    }

    Result<BasicSequence<E>> load_sequence(const char* path, const Progress& progress = nullptr) const {
        detail::Reporter reporter(progress);
        ta_seq id = 0;
        return E::run(
            [&](ta_error* e) {
                return reporter.run([&](const ta_progress* p) { return ta_seq_load(get(), path, p, &id, e); });
            },
            [&] { return BasicSequence<E>(handle_, id); });
    }
    // Of an export, or of what a save of a sequence wrote.
    Result<BasicSequence<E>> import_sequence(std::span<const uint8_t> bytes) const {
        ta_seq id = 0;
        return E::run([&](ta_error* e) { return ta_seq_import(get(), bytes.data(), bytes.size(), &id, e); },
                      [&] { return BasicSequence<E>(handle_, id); });
    }
    Result<void> save(const char* path, ta_save_flags flags = 0, const Progress& progress = nullptr) const {
        detail::Reporter reporter(progress);
        return E::run([&](ta_error* e) {
            return reporter.run([&](const ta_progress* p) { return ta_kv_pool_save(get(), path, flags, p, e); });
        });
    }
    struct Loaded {
        ta_seq saved;  // its id in the pool that saved it
        BasicSequence<E> sequence;
    };
    Result<std::vector<Loaded>> load(const char* path, const Progress& progress = nullptr) const {
        detail::Reporter reporter(progress);
        std::vector<ta_loaded_seq> ids;
        uint64_t n = 0;
        return E::run(
            [&](ta_error* e) {
                const ta_status status = ta_kv_pool_load(get(), path, nullptr, nullptr, 0, &n, e);
                if (status != TA_OK) return status;
                ids.resize(n + 1);  // never NULL, which would load nothing
                return reporter.run(
                    [&](const ta_progress* p) { return ta_kv_pool_load(get(), path, p, ids.data(), n, &n, e); });
            },
            [&] {
                std::vector<Loaded> loaded;
                loaded.reserve(n);
                for (size_t i = 0; i < n; ++i) loaded.push_back({ids[i].saved, BasicSequence<E>(handle_, ids[i].loaded)});
                return loaded;
            });
    }

    Result<ta_kv_pool_stats> stats() const {
        auto out = detail::sized<ta_kv_pool_stats>();
        return E::run([&](ta_error* e) { return ta_kv_pool_get_stats(get(), &out, e); }, [&] { return out; });
    }
    // Whether a begin would find room now. Ids: 0 is a new sequence; n_new: one for each, or empty.
    Result<ta_fit> fit(std::span<const ta_seq> sequences, std::span<const int32_t> n_new) const {
        auto out = detail::sized<ta_fit>();
        return E::run(
            [&](ta_error* e) {
                if ((!n_new.empty() && n_new.size() != sequences.size()) || sequences.size() > UINT32_MAX)
                    return detail::fail(e, TA_E_INVALID, "n_new has as many elements as sequences, or none");
                return ta_kv_pool_fit(get(), static_cast<uint32_t>(sequences.size()), sequences.data(),
                                      n_new.empty() ? nullptr : n_new.data(), &out, e);
            },
            [&] { return out; });
    }
    // Pointers in it live as long as the pool.
    Result<ta_kv_pool_description> describe() const {
        auto out = detail::sized<ta_kv_pool_description>();
        return E::run([&](ta_error* e) { return ta_kv_pool_describe(get(), &out, e); }, [&] { return out; });
    }
    // Where the tier's memory is, for a transfer library to register.
    Result<ta_memory_range> memory(ta_tier tier) const {
        auto out = detail::sized<ta_memory_range>();
        return E::run([&](ta_error* e) { return ta_kv_pool_get_memory(get(), tier, &out, e); }, [&] { return out; });
    }
    Result<ta_tier_stats> tier_stats(ta_tier tier) const {
        auto out = detail::sized<ta_tier_stats>();
        return E::run([&](ta_error* e) { return ta_kv_pool_get_tier_stats(get(), tier, &out, e); }, [&] { return out; });
    }
    Result<ta_move_stats> move_stats() const {
        auto out = detail::sized<ta_move_stats>();
        return E::run([&](ta_error* e) { return ta_kv_pool_get_move_stats(get(), &out, e); }, [&] { return out; });
    }
    // For poll or epoll, while take_finished_moves has tickets; it belongs to the pool.
    Result<int32_t> descriptor() const {
        int32_t fd = -1;
        return E::run([&](ta_error* e) { return ta_kv_pool_descriptor(get(), &fd, e); }, [&] { return fd; });
    }
    // Tickets of moves that are finished, each once, from the first descriptor() on; fewer than `most`: there are no more now.
    Result<std::vector<ta_ticket>> take_finished_moves(size_t most = 256) const {
        return detail::take<E, ta_ticket>(most, [&](ta_ticket* tickets, size_t room, uint64_t* n, ta_error* e) {
            return ta_move_take_finished(get(), tickets, room, n, e);
        });
    }
    Result<std::string> metrics(ta_metrics_format format = TA_METRICS_OPENMETRICS) const {
        std::string text;
        uint64_t needed = 0;
        return E::run(
            [&](ta_error* e) {
                ta_status status = ta_kv_pool_write_metrics(get(), format, nullptr, 0, &needed, e);
                while (status == TA_OK && needed > text.size()) {
                    text.resize(needed + 64);  // numbers grow meanwhile
                    status = ta_kv_pool_write_metrics(get(), format, text.data(), text.size(), &needed, e);
                    if (status == TA_E_INVALID && needed > text.size()) status = TA_OK;
                }
                return status;
            },
            [&] { return text.resize(needed - 1), std::move(text); });
    }

  private:
    std::shared_ptr<ta_kv_pool> handle_;
};

// ------------------------------------------------------------------------------------------------------------ groups

namespace detail {

// A receive that was cancelled, and may end with a sequence all the same.
struct LeftReceive {
    std::shared_ptr<ta_group> group;
    std::shared_ptr<ta_kv_pool> pool;
    ta_ticket ticket;

    void wait_and_release() const noexcept {
        auto info = sized<ta_transfer_info>();
        if (ta_transfer_wait(group.get(), ticket, -1, &info, nullptr) == TA_OK && info.seq != 0)
            ta_seq_release(pool.get(), info.seq, nullptr);
    }
    // Runs on a thread of its own, since the wait may take as long as the other rank does; on this thread if no other can be
    // started.
    void wait_elsewhere() const noexcept {
        const auto run = [](void* mine) -> void* {
            std::unique_ptr<LeftReceive>(static_cast<LeftReceive*>(mine))->wait_and_release();
            return nullptr;
        };
        auto copy = std::unique_ptr<LeftReceive>(new (std::nothrow) LeftReceive(*this));
        pthread_t thread;
        if (!copy || pthread_create(&thread, nullptr, run, copy.get()) != 0) return wait_and_release();
        static_cast<void>(copy.release());
        pthread_detach(thread);
    }
};

}  // namespace detail

// A transfer that goes on in the background, also if this object is destroyed. But the destructor of a receive cancels it,
// unless take() or detach() was called before. Until then its sequence belongs to this object, and is released if it still
// arrives.
template <class E>
class BasicTransfer {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // pool: of a receive, which take() needs.
    BasicTransfer(std::shared_ptr<ta_group> group, ta_ticket ticket, std::shared_ptr<ta_kv_pool> pool = nullptr)
        : group_(std::move(group)), pool_(std::move(pool)), ticket_(ticket) {}
    BasicTransfer(BasicTransfer&&) noexcept = default;
    BasicTransfer& operator=(BasicTransfer&& other) noexcept {
        BasicTransfer(std::move(other)).swap(*this);
        return *this;
    }
    ~BasicTransfer() {
        if (!pool_) return;
        ta_transfer_cancel(group_.get(), ticket_, nullptr);
        auto info = detail::sized<ta_transfer_info>();
        if (ta_transfer_query(group_.get(), ticket_, &info, nullptr) != TA_OK) return;  // in a child process, say
        const detail::LeftReceive left{std::move(group_), std::move(pool_), ticket_};
        if (info.state < TA_MOVE_DONE)
            left.wait_elsewhere();
        else
            left.wait_and_release();
    }
    void swap(BasicTransfer& other) noexcept {
        std::swap(group_, other.group_), std::swap(pool_, other.pool_), std::swap(ticket_, other.ticket_);
    }

    // Gives a receive away: somebody else takes or releases its sequence.
    ta_ticket detach() noexcept { return pool_.reset(), ticket_; }
    ta_ticket ticket() const noexcept { return ticket_; }
    Result<ta_transfer_info> query() const {
        auto info = detail::sized<ta_transfer_info>();
        return E::run([&](ta_error* e) { return ta_transfer_query(group_.get(), ticket_, &info, e); }, [&] { return info; });
    }
    // Until it is finished or the time is over: see `state`, which may be TA_MOVE_FAILED.
    Result<ta_transfer_info> wait(std::chrono::nanoseconds limit = forever) const {
        auto info = detail::sized<ta_transfer_info>();
        return E::run([&](ta_error* e) { return ta_transfer_wait(group_.get(), ticket_, detail::count(limit), &info, e); },
                      [&] { return info; });
    }
    Result<void> cancel() const {
        return E::run([&](ta_error* e) { return ta_transfer_cancel(group_.get(), ticket_, e); });
    }
    // Waits for the sequence of a receive and hands it over, once. Fails as the transfer did, or with TA_E_TIMEOUT when the
    // time is over.
    Result<BasicSequence<E>> take(std::chrono::nanoseconds limit = forever) {
        auto info = detail::sized<ta_transfer_info>();
        return E::run(
            [&](ta_error* e) {
                if (!pool_) return detail::fail(e, TA_E_STATE, "no receive, or its sequence was taken");
                const ta_status status = ta_transfer_wait(group_.get(), ticket_, detail::count(limit), &info, e);
                if (status != TA_OK || info.state == TA_MOVE_DONE) return status;
                if (info.state < TA_MOVE_DONE) return detail::fail(e, TA_E_TIMEOUT, "the transfer is not finished");
                detail::fail(e, info.status, info.reason);
                e->block = info.block;
                e->rank = info.rank;
                return info.status;
            },
            [&] { return BasicSequence<E>(std::exchange(pool_, nullptr), info.seq); });
    }

  private:
    std::shared_ptr<ta_group> group_;
    std::shared_ptr<ta_kv_pool> pool_;
    ta_ticket ticket_;
};

// One rank of a group. The last copy of the handle leaves the group.
template <class E>
class BasicGroup {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a handle.
    explicit BasicGroup(ta_group* handle) : handle_(handle, ta_group_destroy) {}

    // A fresh id, which all ranks are to be given.
    static Result<ta_group_id> make_id(ta_group_kind kind) {
        ta_group_id id{};
        return E::run([&](ta_error* e) { return ta_group_make_id(kind, &id, e); }, [&] { return id; });
    }

    ta_group* get() const noexcept { return handle_.get(); }
    const std::shared_ptr<ta_group>& shared() const noexcept { return handle_; }

    // Until the group does not connect any more, or the time is over.
    Result<ta_group_state> wait(std::chrono::nanoseconds limit = forever) const {
        ta_group_state state = 0;
        return E::run([&](ta_error* e) { return ta_group_poll(get(), detail::count(limit), &state, e); },
                      [&] { return state; });
    }
    Result<ta_group_info> info() const {
        auto out = detail::sized<ta_group_info>();
        return E::run([&](ta_error* e) { return ta_group_get_info(get(), &out, e); }, [&] { return out; });
    }
    Result<ta_group_peer> peer(uint32_t rank) const {
        auto out = detail::sized<ta_group_peer>();
        return E::run([&](ta_error* e) { return ta_group_get_peer(get(), rank, &out, e); }, [&] { return out; });
    }
    // Fails with why the group has ended, if it has.
    Result<void> health() const {
        return E::run([&](ta_error* e) { return ta_group_health(get(), e); });
    }
    Result<void> abort() const {
        return E::run([&](ta_error* e) { return ta_group_abort(get(), e); });
    }
    // For poll or epoll; it belongs to the group.
    Result<int32_t> descriptor() const {
        int32_t fd = -1;
        return E::run([&](ta_error* e) { return ta_group_descriptor(get(), &fd, e); }, [&] { return fd; });
    }
    // Tickets that are finished, each once; fewer than `most`: there are no more now.
    Result<std::vector<ta_ticket>> take_finished(size_t most = 256) const {
        return detail::take<E, ta_ticket>(most, [&](ta_ticket* tickets, size_t room, uint64_t* n, ta_error* e) {
            return ta_group_take_finished(get(), tickets, room, n, e);
        });
    }
    // BasicTransfer::take has the sequence.
    Result<BasicTransfer<E>> receive(const BasicPool<E>& pool, uint32_t from, uint64_t tag) const {
        ta_ticket ticket = 0;
        return E::run([&](ta_error* e) { return ta_seq_receive(get(), pool.get(), from, tag, &ticket, e); },
                      [&] { return BasicTransfer<E>(handle_, ticket, pool.shared()); });
    }

  private:
    std::shared_ptr<ta_group> handle_;
};

// ------------------------------------------------------------------------------------------------------------ context

// Bits of each kv head, [layers, kv_heads of the layer], for PoolOptions, and the priorities they follow from.
struct HeadMap {
    std::vector<uint8_t> k_bits, v_bits;
    std::vector<float> k_priority, v_priority;
};

template <class E>
class BasicCalibrator {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a handle for so many heads in all layers.
    BasicCalibrator(ta_calibrator* handle, size_t heads) : handle_(handle, ta_calibrator_destroy), heads_(heads) {}

    ta_calibrator* get() const noexcept { return handle_.get(); }
    Result<void> observe(uint32_t layer, const Input& k, const Input& v) const {
        return E::run([&](ta_error* e) { return ta_calibrator_observe(handle_.get(), layer, k.get(), v.get(), e); });
    }
    // n_low heads of each layer get 2 bits.
    Result<HeadMap> finish(uint32_t n_low) const {
        HeadMap map{std::vector<uint8_t>(heads_), std::vector<uint8_t>(heads_), std::vector<float>(heads_),
                    std::vector<float>(heads_)};
        return E::run(
            [&](ta_error* e) {
                return ta_calibrator_finish(handle_.get(), n_low, map.k_bits.data(), map.v_bits.data(), map.k_priority.data(),
                                            map.v_priority.data(), e);
            },
            [&] { return std::move(map); });
    }
    // The maps of least total cost whose blocks have at most block_bytes. Costs [layers, kv_heads of the layer, 3]: with 8, 4, 2 bits; infinite:
    // never with these bits. Priorities are empty.
    Result<HeadMap> choose(const std::vector<float>& k_cost, const std::vector<float>& v_cost, uint64_t block_bytes) const {
        HeadMap map{std::vector<uint8_t>(heads_), std::vector<uint8_t>(heads_), {}, {}};
        const auto costs = [&](const std::vector<float>& cost) { return cost.size() == 3 * heads_ ? cost.data() : nullptr; };
        return E::run(
            [&](ta_error* e) {
                return ta_calibrator_choose(handle_.get(), costs(k_cost), costs(v_cost), block_bytes, map.k_bits.data(),
                                            map.v_bits.data(), e);
            },
            [&] { return std::move(map); });
    }

  private:
    std::shared_ptr<ta_calibrator> handle_;
    size_t heads_;
};

// The layer groups of a description, which lie struct_size bytes apart there.
inline std::vector<ta_layer_group> layer_groups_of(const ta_kv_pool_description& d) {
    std::vector<ta_layer_group> groups(d.n_layer_groups, detail::sized<ta_layer_group>());
    const auto* from = reinterpret_cast<const std::byte*>(d.layer_groups);
    for (ta_layer_group& g : groups) {
        const size_t stride = reinterpret_cast<const ta_layer_group*>(from)->struct_size;
        std::memcpy(&g, from, std::min(stride, sizeof g));
        g.struct_size = sizeof g;
        from += stride;
    }
    return groups;
}

template <class E>
class BasicContext {
    template <class T>
    using Result = typename E::template Result<T>;

  public:
    // Takes over a handle.
    explicit BasicContext(ta_context* handle) : handle_(handle, ta_context_destroy) {}

    static Result<BasicContext> create(const ContextOptions& options = {}) {
        auto c = detail::sized<ta_context_options>();
        ta_allocator allocator;
        ta_log_sink log;
        c.device = options.device;
        c.device_ordinal = options.device_ordinal;
        c.threads = options.threads;
        c.cpu_isa = options.cpu_isa;
        // Both are released by the library from the call on.
        if (options.allocator) c.allocator = &(allocator = detail::to_c(options.allocator));
        if (options.log) c.log = &(log = detail::to_c(options.log, options.log_level));
        ta_context* context = nullptr;
        return E::run([&](ta_error* e) { return ta_context_create(&c, &context, e); }, [&] { return BasicContext(context); });
    }

    ta_context* get() const noexcept { return handle_.get(); }
    const std::shared_ptr<ta_context>& shared() const noexcept { return handle_; }
    Result<ta_context_info> info() const {
        auto out = detail::sized<ta_context_info>();
        return E::run([&](ta_error* e) { return ta_context_get_info(get(), &out, e); }, [&] { return out; });
    }
    // Fails with TA_E_DEVICE_LOST once the GPU was lost.
    Result<void> health() const {
        return E::run([&](ta_error* e) { return ta_context_health(get(), e); });
    }

    Result<BasicPool<E>> create_pool(const PoolOptions& options) const {
        const ta_numerics numerics = detail::to_c(options.numerics);
        ta_tier_options tiers;
        ta_rotary rotary;
        const auto sizes = detail::map_sizes(options.layers, options.kv_heads, options.head_dim, options.layer_groups);
        std::vector<ta_layer_group> groups;
        ta_kv_pool_options c = detail::shape_to_c(options, groups);
        c.bits = options.bits;
        c.k_bits = options.k_bits.empty() ? nullptr : options.k_bits.data();
        c.v_bits = options.v_bits.empty() ? nullptr : options.v_bits.data();
        c.budget_bytes = options.budget_bytes;
        c.max_sequences = options.max_sequences;
        c.numerics = &numerics;
        if (options.tiers) c.tiers = &(tiers = detail::to_c(*options.tiers));
        if (options.rotary) c.rotary = &(rotary = detail::to_c(*options.rotary, options.layers));
        ta_kv_pool* pool = nullptr;
        return E::run(
            [&](ta_error* e) {
                if ((c.k_bits && options.k_bits.size() != sizes.heads) || (c.v_bits && options.v_bits.size() != sizes.heads))
                    return detail::fail(e, TA_E_SHAPE, "k_bits and v_bits have kv_heads elements for each layer, or none");
                if (numerics.k_offset && options.numerics.k_offset.size() != sizes.channels)
                    return detail::fail(e, TA_E_SHAPE, "k_offset has kv_heads x head_dim elements for each layer, or none");
                if (c.rotary && options.rotary->angles.size() != uint64_t{c.rotary->layers} * (c.rotary->channels / 2))
                    return detail::fail(e, TA_E_SHAPE, "rotary.angles has channels / 2 elements for each layer, or for all");
                return ta_kv_pool_create(get(), &c, &pool, e);
            },
            [&] { return BasicPool<E>(pool); });
    }
    Result<BasicCalibrator<E>> create_calibrator(uint32_t layers, uint32_t kv_heads, uint32_t head_dim) const {
        ta_calibrator* calibrator = nullptr;
        return E::run([&](ta_error* e) { return ta_calibrator_create(get(), layers, kv_heads, head_dim, &calibrator, e); },
                      [&] { return BasicCalibrator<E>(calibrator, size_t{layers} * kv_heads); });
    }
    // For the shape of these options, whose layers may differ; nothing else of them counts.
    Result<BasicCalibrator<E>> create_calibrator(const PoolOptions& options) const {
        ta_calibrator* calibrator = nullptr;
        std::vector<ta_layer_group> groups;
        const ta_kv_pool_options c = detail::shape_to_c(options, groups);
        return E::run([&](ta_error* e) { return ta_calibrator_create_for(get(), &c, &calibrator, e); },
                      [&] {
                          const auto sizes =
                              detail::map_sizes(options.layers, options.kv_heads, options.head_dim, options.layer_groups);
                          return BasicCalibrator<E>(calibrator, static_cast<size_t>(sizes.heads));
                      });
    }
    // Joins a group as one of its ranks; BasicGroup::wait says when it is ready.
    Result<BasicGroup<E>> create_group(const GroupOptions& options) const {
        const ta_group_options c = detail::to_c(options);
        ta_group* group = nullptr;
        return E::run([&](ta_error* e) { return ta_group_create(get(), &c, &group, e); }, [&] { return BasicGroup<E>(group); });
    }

    // q, out: [query tokens, q_heads, head_dim]; k, v: [keys, kv_heads, head_dim]; lse: [query tokens, q_heads], may be null
    Result<void> attend_dense(const Input& q, const Input& k, const Input& v, const Output& out, float* lse = nullptr,
                              const DenseOptions& options = {}) const {
        auto c = detail::sized<ta_dense_options>();
        const ta_attend_options attend = detail::to_c(options.attend);
        c.variant = options.variant;
        c.batch = options.batch;
        c.q_offsets = options.q_offsets.empty() ? nullptr : options.q_offsets.data();
        c.k_offsets = options.k_offsets.empty() ? nullptr : options.k_offsets.data();
        c.v_granularity = options.v_granularity;
        c.nonfinite = options.nonfinite;
        c.attend = &attend;
        c.stream = options.stream;
        c.group_size = options.group_size;
        const size_t offsets = size_t{options.batch == 0 ? 1 : options.batch} + 1;
        return E::run([&](ta_error* e) {
            if ((c.q_offsets && options.q_offsets.size() != offsets) || (c.k_offsets && options.k_offsets.size() != offsets))
                return detail::fail(e, TA_E_INVALID, "q_offsets and k_offsets have batch + 1 elements, or none");
            return ta_attend_dense(get(), q.get(), k.get(), v.get(), out.get(), lse, &c, e);
        });
    }
    // Merges attention of the same queries over disjoint keys into attention over all of them; lses: [parts] of [tokens,
    // heads].
    Result<void> merge_states(std::span<const Input> parts, std::span<const float* const> lses, const Output& out,
                              float* lse = nullptr, ta_stream stream = nullptr) const {
        static_assert(sizeof(Input) == sizeof(ta_tensor));
        return E::run([&](ta_error* e) {
            if (parts.size() != lses.size() || parts.empty() || parts.size() > UINT32_MAX)
                return detail::fail(e, TA_E_INVALID, "there is one lse for each part, and at least one part");
            return ta_merge_states(get(), static_cast<uint32_t>(parts.size()), parts.front().get(), lses.data(), out.get(), lse,
                                   stream, e);
        });
    }

  private:
    std::shared_ptr<ta_context> handle_;
};

// ------------------------------------------------------------------------------------------------------------ names

#ifdef __cpp_exceptions
using Context = BasicContext<Throwing>;
using Pool = BasicPool<Throwing>;
using Plan = BasicPlan<Throwing>;
using Step = BasicStep<Throwing>;
using Row = BasicRow<Throwing>;
using Sequence = BasicSequence<Throwing>;
using Namespace = BasicNamespace<Throwing>;
using Move = BasicMove<Throwing>;
using Group = BasicGroup<Throwing>;
using Transfer = BasicTransfer<Throwing>;
using Calibrator = BasicCalibrator<Throwing>;
#endif

namespace results {
using Context = BasicContext<Returning>;
using Pool = BasicPool<Returning>;
using Plan = BasicPlan<Returning>;
using Step = BasicStep<Returning>;
using Row = BasicRow<Returning>;
using Sequence = BasicSequence<Returning>;
using Namespace = BasicNamespace<Returning>;
using Move = BasicMove<Returning>;
using Group = BasicGroup<Returning>;
using Transfer = BasicTransfer<Returning>;
using Calibrator = BasicCalibrator<Returning>;
}  // namespace results

}  // namespace cpp
}  // namespace ta
#endif  // TURBOATTENTION_HPP
