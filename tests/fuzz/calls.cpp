// A byte string as a program of calls of the public ABI, with right and with hostile arguments: sizes of structs, null and
// misaligned pointers, huge counts, strides, stale ids, the wrong order, budgets that are too small, files in the way.
//
// For each call two bytes: which one, and 0 if all of its arguments are right. Otherwise each argument takes bytes of its own,
// which say how it is wrong. Memory that the library gets is as large as the arguments say and no byte larger, so that
// AddressSanitizer sees what goes beyond. Calls that are the caller's own fault (a tensor larger than its memory, a handle that
// was destroyed) are not made.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "support/counting_allocator.h"
#include "support/files.h"
#include "tests/fuzz/input.h"
#include "turboattention.h"
#include "turboattention_experimental.h"

namespace ta::fuzz {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kQHeads = 4, kDim = 64;
constexpr int32_t kTokens = 70;                    // of a plain append
constexpr size_t kMostBytes = 1 << 20;             // of an array that is handed to the library
constexpr size_t kMostRows = kMostBytes / 2 / 64;  // of a tensor of that size
constexpr uint64_t kMostMemory = 64 << 20;
constexpr size_t kMostHandles = 3, kMostIds = 32;
constexpr size_t kKeys = 8;
using Wide = long double;  // extents of hostile tensors: exact where it matters, and they do not overflow

const testing::Folder& folder() {
    static const testing::Folder f;
    return f;
}

struct Plan {
    ta_plan* handle;
    int64_t n_new = 0, n_query = 0;  // of the last begin that succeeded
    uint32_t next_layer = 0;
};

class Program {
  public:
    Program(const uint8_t* data, size_t size) : in_(data, size) {}
    void run();

  private:
    struct Call {
        const char* name;
        ta_status (Program::*make)(ta_error* err);
    };
    static const Call kCalls[];
    friend Seeds fuzz::seeds();

    // -------------------------------------------------------------------------------------------- arguments
    // Each is the right one in a plain call.

    int64_t number(int64_t right) {
        static constexpr int64_t kOdd[] = {0,        1,          2,         3,         -1,
                                           -2,       63,         64,        65,        96,
                                           127,      128,        256,       255,       1025,
                                           4097,     65535,      65536,     INT32_MAX, INT32_MIN,
                                           1u << 31, UINT32_MAX, 1l << 32,  1l << 34,  (1l << 34) + 1,
                                           1l << 40, 1l << 60,   INT64_MAX, INT64_MIN, -64,
                                           -128,     8};
        if (plain_) return right;
        const uint8_t b = in_.byte();
        if (b < 128) return right;
        if (b < 160) return int64_t(uint64_t(right) + b - 144);
        if (b < 240) return kOdd[b % std::size(kOdd)];
        return int64_t(in_.bits(8));
    }
    // For a number whose large values are right, and slow.
    uint64_t small_if_right(int64_t right, uint64_t most_right) {
        const uint64_t x = uint64_t(number(right));
        return x <= most_right && x > 8 && x != uint64_t(right) ? 1 + x % 8 : x;
    }
    bool odd() { return !plain_ && in_.byte() >= 224; }
    template <class T>
    T* or_null(T* p) {
        return odd() ? nullptr : p;
    }
    // Null, misaligned or as it is.
    template <class T>
    T* array(T* p) {
        if (!odd()) return p;
        return in_.byte() % 2 ? nullptr : reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + 1);
    }
    template <class T>
    T pick(const std::vector<T>& of, T none) {
        if (of.empty() || odd()) return none;
        return plain_ ? of.back() : of[in_.below(of.size())];
    }
    ta_context* context() { return pick<ta_context*>(contexts_, nullptr); }
    ta_kv_pool* pool() { return pick<ta_kv_pool*>(pools_, nullptr); }
    Plan* plan() { return pick<Plan*>(plan_pointers(), nullptr); }
    static ta_plan* handle(const Plan* p) { return p ? p->handle : nullptr; }
    ta_calibrator* calibrator() { return pick<ta_calibrator*>(calibrators_, nullptr); }
    uint64_t id(const std::vector<uint64_t>& of) {
        const uint64_t x = pick<uint64_t>(of, 0);
        return odd() ? uint64_t(number(int64_t(x))) : x;
    }
    std::vector<Plan*> plan_pointers() {
        std::vector<Plan*> p;
        for (const auto& plan : plans_) p.push_back(plan.get());
        return p;
    }

    // Memory that ends where it should; garbage that is a finite number whatever type it is read as. It lives to the end of the
    // call.
    uint8_t* memory(size_t bytes) {
        auto& m = memory_.emplace_back(new uint8_t[bytes]);
        for (size_t i = 0; i < bytes; ++i) m[i] = uint8_t(i * 37 % 61);
        return m.get();
    }
    template <class T>
    T* items(size_t n, T value = {}) {
        T* p = reinterpret_cast<T*>(memory(n * sizeof(T)));
        std::fill(p, p + n, value);
        return p;
    }

    // A struct in memory as large as its struct_size says.
    template <class T>
    T* sized(const T& value) {
        constexpr size_t kKnown = 65536;  // beyond, the library reads nothing but struct_size
        size_t size = sizeof(T);
        if (odd()) size = uint32_t(number(sizeof(T)));
        uint8_t* p = memory(size <= kKnown ? std::max(size, sizeof(uint32_t)) : sizeof(uint32_t));
        if (size <= kKnown) {
            std::memset(p, 0, size);
            std::memcpy(p, &value, std::min(size, sizeof(T)));
            if (size > sizeof(T) && odd()) p[size - 1] = 1;
        }
        const auto told = uint32_t(size);
        std::memcpy(p, &told, sizeof told);
        return or_null(reinterpret_cast<T*>(p));
    }

    // [tokens, heads, head_dim], in memory of just its extent; null where that is too large to have.
    ta_tensor* tensor(int64_t tokens, int64_t heads, int64_t head_dim) {
        ta_tensor t{};
        t.dtype = ta_dtype(number(TA_DTYPE_F32));
        t.tokens = number(tokens), t.heads = number(heads), t.head_dim = number(head_dim);
        t.stride_token = number(0), t.stride_head = number(0);
        const Wide stride_token = t.stride_token ? Wide(t.stride_token) : Wide(t.heads) * t.head_dim;
        const Wide stride_head = t.stride_head ? t.stride_head : t.head_dim;
        const Wide reach[] = {(t.tokens - Wide(1)) * stride_token, (t.heads - Wide(1)) * stride_head};
        Wide low = 0, high = t.head_dim;
        for (const Wide r : reach) (r < 0 ? low : high) += r;
        const size_t element = t.dtype == TA_DTYPE_F32 ? 4 : 2;
        if (t.tokens > 0 && t.heads > 0 && t.head_dim > 0 && high - low <= Wide(kMostBytes / element)) {
            uint8_t* p = memory(size_t(high - low) * element);
            if (odd()) std::memset(p + size_t(in_.bits(3)) % (size_t(high - low) * element), 0xff, 1);
            t.data = array(p + size_t(-low) * element);
        }
        return sized(t);
    }

    const char* path() {
        static const std::string kLong = folder().path() + "/" + std::string(5000, 'x'), kFolder = folder().path();
        static const std::string kFiles[] = {kFolder + "/0", kFolder + "/1", kFolder + "/fifo", kFolder + "/none/x",
                                             kFolder + "/line\nbreak"};
        if (plain_) return kFiles[0].c_str();
        switch (in_.byte()) {
            case 1:
                return nullptr;
            case 2:
                return "";
            case 3:
                return kLong.c_str();
            case 4:
                return kFolder.c_str();
            case 5:
                return "/dev/null";
            case 6:
                return "/proc/self/mem";
            default:
                return kFiles[in_.below(std::size(kFiles))].c_str();
        }
    }
    // A callback set: what the library made of it. `plain`: it was in a plain call.
    struct Watch {
        int32_t patience;  // calls of the progress function before it stops the work
        bool plain;
        std::atomic<int> released = 0;
        std::map<std::string, std::vector<uint8_t>>* values = nullptr;  // of a store
    };
    Watch* watch() {
        const int32_t patience = odd() ? int32_t(in_.byte()) : INT32_MAX;
        auto fresh = std::make_unique<Watch>();
        fresh->patience = patience;
        fresh->plain = plain_;
        return watches_.emplace_back(std::move(fresh)).get();
    }
    static void released(void* user) {
        if (user) ++static_cast<Watch*>(user)->released;
    }
    ta_progress* progress() {
        const auto report = [](void* user, uint64_t, uint64_t) -> int32_t {
            auto* watch = static_cast<Watch*>(user);
            return watch && --watch->patience < 0;
        };
        return sized(ta_progress{0, or_null(+report), watch(), or_null(&released)});
    }
    ta_log_sink* log_sink() {
        const auto log = [](ta_log_level, const char* message, void* user) {
            // A set cut off before `user` has none.
            const auto* watch = static_cast<Watch*>(user);
            require(message && (!watch || watch->released == 0), "a message to a log that was released");
        };
        return sized(ta_log_sink{0, ta_log_level(number(TA_LOG_DEBUG)), or_null(+log), watch(), or_null(&released)});
    }

    // -------------------------------------------------------------------------------------------- calls

    // Memory runs out early, so that huge budgets take no time.
    static void* allocate(size_t bytes, size_t alignment, void* user) {
        auto& allocator = *static_cast<testing::CountingAllocator*>(user);
        const uint64_t left = kMostMemory - std::min(kMostMemory, allocator.bytes_alive());
        return bytes > left ? nullptr : allocator.hooks().allocate(bytes, alignment, user);
    }
    ta_status context_create(ta_error* err) {
        if (contexts_.size() == kMostHandles) return TA_OK;
        ta_allocator hooks = allocator_.hooks();
        hooks.allocate = allocate;
        ta_context_options o{};
        o.device = ta_device_kind(number(TA_DEVICE_CPU));
        o.threads = int32_t(small_if_right(1, 1024));
        if (o.threads > 2 && o.threads <= 1024) o.threads = 2;
        o.cpu_isa = ta_cpu_isa(number(TA_CPU_ISA_AUTO));
        o.allocator = sized(hooks);
        if (!o.allocator) o.device = -1;  // memory that nothing limits
        o.device_ordinal = int32_t(number(0));
        o.log = log_sink();
        return created(contexts_, [&](ta_context** out) { return ta_context_create(sized(o), out, err); });
    }
    ta_status context_destroy(ta_error*) { return destroyed(contexts_, ta_context_destroy); }
    ta_status context_get_info(ta_error* err) { return ta_context_get_info(context(), sized(ta_context_info{}), err); }
    ta_status context_health(ta_error* err) { return ta_context_health(context(), err); }

    ta_numerics numerics() {
        ta_numerics n{};
        n.profile = ta_profile(number(TA_PROFILE_ACCURATE));
        for (int32_t* setting :
             {&n.k_granularity, &n.v_granularity, &n.open_scale, &n.v_exponents, &n.fractional_zero, &n.v_search, &n.k_search,
              &n.unit_slope, &n.hadamard, &n.sink_blocks, &n.exp, &n.p, &n.nonfinite})
            *setting = int32_t(number(0));
        n.hadamard_seed = in_.bits(plain_ ? 0 : 1);
        n.q_bits = uint32_t(number(0));
        n.batch_invariant = n.hadamard_seed % 4 == 1 ? TA_ON : TA_DEFAULT;  // reads nothing, so that inputs stay what they were
        return n;
    }
    ta_tier_options tiers() {
        ta_tier_options t{};
        t.host_node = uint32_t(number(0));
        for (uint64_t* bytes : {&t.host_bytes, &t.disk_bytes}) {
            *bytes = uint64_t(number(1 << 18));
            if (*bytes > 1 << 22 && *bytes < uint64_t{1} << 50) *bytes = 1 << 18;  // they are taken at once
        }
        t.disk_folder = odd() ? path() : folder().path().c_str();
        t.disk_path = odd() ? path() : nullptr;
        for (int32_t* setting :
             {&t.high_percent, &t.low_percent, &t.eviction, &t.drop_coldest, &t.staging, &t.falling_precision})
            *setting = int32_t(number(0));
        if (odd()) {
            const auto route = ta_x_move_route(number(0)), half_life = int32_t(number(0)), layers = int32_t(number(0));
            t.tuning = sized(ta_x_tier_tuning{0, route, uint64_t(number(0)), half_life, layers});
        }
        t.begin_wait_ms = -1;
        return t;
    }
    ta_status pool_create_with(bool with_tiers, bool with_rotary, ta_error* err) {
        ta_kv_pool_options o{};
        o.layers = uint32_t(small_if_right(kLayers, 4096));
        o.kv_heads = uint32_t(small_if_right(kHeads, 1024));
        o.head_dim = uint32_t(number(kDim));
        o.bits = uint32_t(number(4));
        const size_t heads = std::min<size_t>(uint64_t(o.layers) * o.kv_heads, kMostBytes);
        if (odd()) o.k_bits = or_null(items<uint8_t>(heads, uint8_t(number(2))));
        if (odd()) o.v_bits = or_null(items<uint8_t>(heads, uint8_t(number(4))));
        o.budget_bytes = uint64_t(number(1 << 18));
        o.max_sequences = uint32_t(number(16));
        ta_numerics n = numerics();
        const size_t channels = size_t(std::min<uint64_t>(heads * uint64_t(o.head_dim), kMostBytes));
        if (odd() && channels < kMostBytes) n.k_offset = array(items<float>(channels, odd() ? INFINITY : 0.5f));
        o.numerics = sized(n);
        if (with_tiers) o.tiers = sized(tiers());
        if (odd()) {
            o.n_layer_groups = 1;
            const auto first = uint32_t(number(0)), layers = uint32_t(number(1));
            const bool arrays = o.k_bits || o.v_bits || n.k_offset;  // which are as long as the pool's shape has them
            const auto heads_of_group = uint32_t(!arrays && odd() ? number(1) : 0);
            const auto dim = uint32_t(!arrays && odd() ? number(64) : 0);
            o.layer_groups = sized(ta_layer_group{0, first, layers, heads_of_group, number(100), dim, 0});
        }
        if (with_rotary) {
            const auto turned = uint32_t(number(16)), layers = uint32_t(number(1));
            const size_t angles = size_t(std::min<uint64_t>(uint64_t(turned / 2) * layers, kMostBytes));
            auto* a = items<double>(angles, odd() ? NAN : 0.5);
            o.rotary =
                sized(ta_rotary{0, ta_rotary_pairs(number(1)), turned, layers, angles < kMostBytes ? array(a) : nullptr});
        }
        return created(pools_, [&](ta_kv_pool** out) { return ta_kv_pool_create(context(), sized(o), out, err); });
    }
    ta_status pool_create(ta_error* err) { return pool_create_with(false, false, err); }
    ta_status tiered_pool_create(ta_error* err) { return pool_create_with(true, false, err); }
    ta_status rotary_pool_create(ta_error* err) { return pool_create_with(odd(), true, err); }
    ta_status pool_close(ta_error* err) { return ta_kv_pool_close(pool(), err); }
    ta_status pool_destroy(ta_error*) { return destroyed(pools_, ta_kv_pool_destroy); }
    ta_status pool_get_stats(ta_error* err) { return ta_kv_pool_get_stats(pool(), sized(ta_kv_pool_stats{}), err); }

    ta_status seq_create(ta_error* err) {
        return new_id(seqs_, [&](ta_seq* out) { return ta_seq_create(pool(), out, err); });
    }
    ta_status seq_fork(ta_error* err) {
        return new_id(seqs_, [&](ta_seq* out) { return ta_seq_fork(pool(), id(seqs_), out, err); });
    }
    ta_status seq_truncate(ta_error* err) { return ta_seq_truncate(pool(), id(seqs_), number(40), err); }
    ta_status seq_set_priority(ta_error* err) { return ta_seq_set_priority(pool(), id(seqs_), int32_t(number(1)), err); }
    ta_status seq_release(ta_error* err) { return ta_seq_release(pool(), id(seqs_), err); }
    ta_status seq_length(ta_error* err) { return ta_seq_length(pool(), id(seqs_), array(items<int64_t>(1)), err); }
    ta_status seq_verify(ta_error* err) { return ta_seq_verify(pool(), id(seqs_), err); }
    ta_status seq_residency(ta_error* err) { return ta_seq_residency(pool(), id(seqs_), sized(ta_residency{}), err); }
    ta_status seq_save(ta_error* err) {
        const char* to = path();
        if (plain_ && to) std::filesystem::remove(to);
        return ta_seq_save(pool(), id(seqs_), to, progress(), err);
    }
    ta_status seq_export(ta_error* err) {
        exported_.clear();
        const auto write = [](void* user, uint64_t offset, const void* data, uint64_t n) -> int32_t {
            if (!user) return 1;  // a sink that was cut off before it
            auto& to = *static_cast<std::vector<uint8_t>*>(user);
            to.resize(std::max<size_t>(to.size(), offset + n));
            std::copy_n(static_cast<const uint8_t*>(data), n, to.data() + offset);
            return 0;
        };
        const ta_sink* sink = sized(ta_sink{0, 0, or_null(+write), &exported_, nullptr});
        return ta_seq_export(pool(), id(seqs_), odd() ? nullptr : sink, nullptr, err);
    }
    ta_status seq_import(ta_error* err) {
        if (odd() && !exported_.empty()) exported_[size_t(number(3)) % exported_.size()] ^= 4;
        return new_id(seqs_, [&](ta_seq* out) { return ta_seq_import(pool(), exported_.data(), exported_.size(), out, err); });
    }
    ta_status seq_load(ta_error* err) {
        return new_id(seqs_, [&](ta_seq* out) { return ta_seq_load(pool(), path(), progress(), out, err); });
    }
    ta_status pool_save(ta_error* err) {
        const char* to = path();
        if (plain_ && to) std::filesystem::remove(to);
        return ta_kv_pool_save(pool(), to, ta_save_flags(number(TA_SAVE_PUBLISHED)), progress(), err);
    }
    ta_status pool_load(ta_error* err) {
        constexpr size_t kMost = 4;
        auto* loaded = items<ta_loaded_seq>(kMost);
        const uint64_t most = odd() ? in_.below(kMost) : kMost;
        auto* n = items<uint64_t>(1);
        const bool counts = odd();
        const ta_status s = ta_kv_pool_load(pool(), path(), progress(), counts ? nullptr : array(loaded), most, array(n), err);
        for (uint64_t i = 0; s == TA_OK && !counts && i < *n; ++i) remember(seqs_, loaded[i].loaded);
        return s;
    }

    ta_status namespace_create(ta_error* err) {
        ta_namespace_options o{};
        o.quota_bytes = uint64_t(odd() ? number(0) : 0);
        o.salt[0] = uint8_t(number(1));
        return new_id(spaces_, [&](ta_namespace* out) { return ta_namespace_create(pool(), sized(o), out, err); });
    }
    ta_status namespace_destroy(ta_error* err) { return ta_namespace_destroy(pool(), id(spaces_), err); }
    ta_status namespace_get_stats(ta_error* err) {
        return ta_namespace_get_stats(pool(), id(spaces_), sized(ta_namespace_stats{}), err);
    }
    // A store that has what was put to it. One that is written to is filled and let go of at once: whatever goes on in the background
    // would change the pool beside the calls that are judged.
    using Values = std::map<std::string, std::vector<uint8_t>>;
    enum StoreCall { kExists, kGet, kPut, kRemove };
    template <StoreCall kCall>
    static int32_t store_call(void* user, ta_store_item* given, uint64_t n, int64_t) {
        if (!user) return 1;  // a set that was cut off before it
        Values& values = *static_cast<Watch*>(user)->values;
        for (uint64_t i = 0; i < n; ++i) {
            ta_store_item& item = given[i];
            const std::string key(reinterpret_cast<const char*>(item.key), 32);
            const auto* data = static_cast<const uint8_t*>(item.data);
            if (kCall == kPut) values[key].assign(data, data + item.bytes);
            const auto found = values.find(key);
            if (found == values.end()) continue;
            if (kCall == kGet) {
                const size_t size = found->second.size();
                if (size <= item.bytes) std::copy_n(found->second.data(), size, static_cast<uint8_t*>(item.data));
                item.bytes = size;
            }
            item.result = TA_STORE_DONE;
            if (kCall == kRemove) values.erase(found);
        }
        return 0;
    }
    ta_status namespace_attach_store(ta_error* err) {
        if (odd() && !stored_.empty()) {
            std::vector<uint8_t>& value = stored_.begin()->second;
            value[size_t(number(200)) % value.size()] ^= 4;
        }
        ta_store_options o{};
        o.timeout_ms = int32_t(number(60000));
        if (o.timeout_ms > 0 && o.timeout_ms < 60000) o.timeout_ms = 60000;  // none is ever late
        o.write_through = ta_switch(number(TA_ON));
        o.authenticate = ta_switch(number(TA_DEFAULT));
        o.batch_bytes = uint64_t(number(0));
        Watch* const w = watch();
        w->values = &stored_;
        const ta_block_store* store =
            sized(ta_block_store{0, 0, or_null(&store_call<kExists>), or_null(&store_call<kGet>), or_null(&store_call<kPut>),
                                 or_null(&store_call<kRemove>), w, or_null(&released)});
        const ta_namespace space = id(spaces_);
        ta_kv_pool* const at = pool();
        const ta_status s = ta_namespace_attach_store(at, space, odd() ? nullptr : store, odd() ? nullptr : sized(o), err);
        if (s == TA_OK && ta_namespace_flush_store(at, space, -1, nullptr, nullptr) == TA_OK) {
            ta_namespace_detach_store(at, space, nullptr);
            ta_store_options only_read{};
            only_read.struct_size = sizeof only_read;
            only_read.write_through = TA_OFF;
            Watch* const again = watch();
            again->values = &stored_;
            ta_block_store set{
                sizeof set, 0, store_call<kExists>, store_call<kGet>, store_call<kPut>, store_call<kRemove>, again, released};
            ta_namespace_attach_store(at, space, &set, &only_read, nullptr);
        }
        return s;
    }
    ta_status namespace_detach_store(ta_error* err) { return ta_namespace_detach_store(pool(), id(spaces_), err); }
    ta_status namespace_load(ta_error* err) {
        const uint64_t n = key_count(1);
        auto* ticket = items<ta_ticket>(1);
        ta_kv_pool* const at = pool();
        const ta_status s = ta_namespace_load(at, id(spaces_), keys(), n, array(ticket), err);
        if (s != TA_OK) return s;
        remember(tickets_, *ticket);
        ta_move_info info{};
        info.struct_size = sizeof info;
        require(ta_move_wait(at, *ticket, -1, &info, nullptr) == TA_OK, "a load's ticket is not known");
        return s;
    }
    ta_status namespace_flush_store(ta_error* err) {
        return ta_namespace_flush_store(pool(), id(spaces_), number(-1), array(items<uint64_t>(1)), err);
    }
    ta_status namespace_get_store_stats(ta_error* err) {
        return ta_namespace_get_store_stats(pool(), id(spaces_), sized(ta_store_stats{}), err);
    }

    ta_status namespace_flush(ta_error* err) { return ta_namespace_flush(pool(), id(spaces_), err); }
    // As many keys as there is memory for, or so many that they have to be refused unread.
    uint64_t key_count(uint64_t right) {
        const auto n = uint64_t(number(int64_t(right)));
        return n > kKeys && n <= uint64_t{1} << 34 ? n % kKeys : n;
    }
    const uint8_t* keys() { return or_null(items<uint8_t>(32 * kKeys, 7)); }
    ta_status seq_publish(ta_error* err) {
        const uint64_t n = key_count(1);
        return ta_seq_publish(pool(), id(seqs_), id(spaces_), keys(), n, err);
    }
    ta_status seq_match_prefix(ta_error* err) {
        const uint64_t n = key_count(1);
        return new_id(seqs_, [&](ta_seq* out) {
            return ta_seq_match_prefix(pool(), id(spaces_), keys(), n, out, array(items<int64_t>(1)), err);
        });
    }

    ta_status seq_move(ta_error* err) {
        return new_id(tickets_, [&](ta_ticket* out) {
            return ta_seq_move(pool(), id(seqs_), uint64_t(number(0)), uint64_t(number(1)), ta_tier(number(TA_TIER_HOST)), out,
                               err);
        });
    }
    ta_status seq_prefetch(ta_error* err) {
        return new_id(tickets_, [&](ta_ticket* out) {
            return ta_seq_prefetch(pool(), id(seqs_), uint64_t(number(0)), uint64_t(number(1)), out, err);
        });
    }
    ta_status seq_pin(ta_error* err) { return ta_seq_pin(pool(), id(seqs_), uint64_t(number(0)), uint64_t(number(1)), err); }
    ta_status seq_unpin(ta_error* err) {
        return ta_seq_unpin(pool(), id(seqs_), uint64_t(number(0)), uint64_t(number(1)), err);
    }
    ta_status seq_shift(ta_error* err) { return ta_seq_shift(pool(), id(seqs_), number(64), number(64), err); }
    ta_status seq_forget(ta_error* err) { return ta_seq_forget(pool(), id(seqs_), number(0), number(64), nullptr, err); }
    ta_status seq_retain(ta_error* err) {
        const ta_retention r{0, uint32_t(number(40)), number(5)};
        const ta_retention* const given = odd() ? nullptr : sized(r);
        return ta_seq_retain(pool(), id(seqs_), uint64_t(number(0)), uint64_t(number(1)), given, err);
    }
    ta_status seq_describe_blocks(ta_error* err) {
        uint64_t n = uint64_t(number(1));
        if (n > 64 && n < uint64_t{1} << 40) n = 64;  // no sequence has more than 2^34 blocks
        auto* const out = items<ta_block_info>(size_t(std::min<uint64_t>(n, 64)));
        return ta_seq_describe_blocks(pool(), id(seqs_), uint64_t(number(0)), n, out, err);
    }
    ta_status seq_reserve(ta_error* err) {
        auto wait_ms = int32_t(number(-1));
        if (wait_ms > 1 && wait_ms < 1 << 30) wait_ms = 1;  // no waiting
        return ta_seq_reserve(pool(), id(seqs_), number(kTokens), wait_ms, err);
    }
    ta_status seq_suspend(ta_error* err) {
        return new_id(tickets_, [&](ta_ticket* out) {
            return ta_seq_suspend(pool(), id(seqs_), ta_tier(number(TA_TIER_HOST)), out, err);
        });
    }
    ta_status pool_fit(ta_error* err) {
        const auto n = uint32_t(plain_ ? 1 : in_.below(4));
        auto* seqs = items<ta_seq>(n);
        auto* n_new = items<int32_t>(n);
        for (uint32_t i = 0; i < n; ++i) {
            seqs[i] = id(seqs_);
            n_new[i] = int32_t(number(kTokens));
        }
        ta_fit* out = sized(ta_fit{});
        const ta_status s = ta_kv_pool_fit(pool(), n, array(seqs), array(n_new), out, err);
        if (s == TA_OK && out->struct_size >= sizeof *out)
            require(out->after_eviction >= out->now && (out->first_lacking < 0) == (out->after_eviction == 1), "a fit");
        return s;
    }
    ta_status move_query(ta_error* err) { return ta_move_query(pool(), id(tickets_), sized(ta_move_info{}), err); }
    ta_status move_wait(ta_error* err) { return ta_move_wait(pool(), id(tickets_), number(-1), sized(ta_move_info{}), err); }
    ta_status pool_descriptor(ta_error* err) {
        int32_t descriptor = 0;
        return ta_kv_pool_descriptor(pool(), odd() ? nullptr : &descriptor, err);
    }
    ta_status move_take_finished(ta_error* err) {
        ta_ticket tickets[4];
        uint64_t n = 0;
        return ta_move_take_finished(pool(), odd() ? nullptr : tickets, 4, odd() ? nullptr : &n, err);
    }
    ta_status move_cancel(ta_error* err) { return ta_move_cancel(pool(), id(tickets_), err); }
    ta_status get_move_stats(ta_error* err) { return ta_kv_pool_get_move_stats(pool(), sized(ta_move_stats{}), err); }
    ta_status pool_describe(ta_error* err) { return ta_kv_pool_describe(pool(), sized(ta_kv_pool_description{}), err); }
    ta_status get_tier_stats(ta_error* err) {
        return ta_kv_pool_get_tier_stats(pool(), ta_tier(number(TA_TIER_DEVICE)), sized(ta_tier_stats{}), err);
    }
    ta_status write_metrics(ta_error* err) {
        const size_t bytes = odd() ? in_.below(64) : 32768;
        return ta_kv_pool_write_metrics(pool(), ta_metrics_format(number(TA_METRICS_JSON)),
                                        or_null(reinterpret_cast<char*>(memory(bytes))), bytes, array(items<uint64_t>(1)), err);
    }

    ta_status plan_create(ta_error* err) {
        ta_plan* out = nullptr;
        if (plans_.size() == kMostHandles) return TA_OK;
        const ta_status s = ta_plan_create(pool(), odd() ? this : nullptr, or_null(&out), err);
        if (s == TA_OK) plans_.push_back(std::make_unique<Plan>(Plan{out}));
        return s;
    }
    ta_status plan_destroy(ta_error*) {
        if (plans_.empty()) return TA_OK;
        const size_t i = plain_ ? plans_.size() - 1 : in_.below(plans_.size());
        ta_plan_destroy(plans_[i]->handle);
        plans_.erase(plans_.begin() + ptrdiff_t(i));
        return TA_OK;
    }
    ta_status plan_set_stream(ta_error* err) { return ta_plan_set_stream(handle(plan()), nullptr, err); }
    ta_status plan_begin(ta_error* err) { return plan_begin_with(false, err); }
    ta_status plan_begin_at(ta_error* err) { return plan_begin_with(true, err); }
    ta_status plan_begin_with(bool positions, ta_error* err) {
        Plan* p = plan();
        const auto n = uint32_t(plain_ ? 1 : in_.below(4));
        auto* seqs = items<ta_seq>(n);
        int32_t *n_new = items<int32_t>(n), *n_query = items<int32_t>(n);
        for (uint32_t i = 0; i < n; ++i) {
            seqs[i] = id(seqs_);
            n_new[i] = int32_t(number(kTokens));
            n_query[i] = int32_t(number(2));
        }
        n_new = array(n_new), n_query = array(n_query);
        ta_step_options how{};
        how.wait_ms = -1;
        how.drafts = ta_switch(number(0));
        how.layers_in_order = ta_switch(number(0));
        int64_t total = 0;  // of tokens that can have a parent
        for (uint32_t i = 0; i < n && n_new && reinterpret_cast<uintptr_t>(n_new) % alignof(int32_t) == 0; ++i)
            total += std::max(n_new[i], 0);
        if (odd() && total <= 4 * kTokens) {
            auto* parents = items<int32_t>(size_t(total));
            for (int64_t i = 0; i < total; ++i) parents[i] = int32_t(number(i % 5 - 1));
            how.tree_parent = array(parents);
        }
        int64_t queries = 0;
        for (uint32_t i = 0; i < n && positions && n_query && reinterpret_cast<uintptr_t>(n_query) % alignof(int32_t) == 0; ++i)
            queries += std::max(n_query[i], 0);
        if (positions && n_query && queries <= 4 * kTokens) {
            auto* at = items<int64_t>(size_t(queries));
            for (int64_t i = 0; i < queries; ++i) at[i] = number(i % 50);
            how.query_positions = array(at);
        }
        const ta_step_options* options = plain_ && !positions ? nullptr : sized(how);
        const ta_status s = ta_plan_begin(handle(p), n, array(seqs), n_new, n_query, options, err);
        if (s != TA_OK) return s;
        p->n_new = p->n_query = p->next_layer = 0;
        for (uint32_t i = 0; i < n; ++i) {
            p->n_new += n_new ? n_new[i] : 0;
            p->n_query += n_query ? n_query[i] : n_new ? n_new[i] : 0;
        }
        return s;
    }
    ta_status append(ta_error* err) {
        Plan* p = plan();
        const int64_t n = p ? p->n_new : kTokens;
        const auto layer = uint32_t(number(p ? p->next_layer : 0));
        const ta_tensor *k = tensor(n, kHeads, kDim), *v = tensor(n, kHeads, kDim);
        const ta_status s = ta_append(handle(p), layer, k, v, err);
        if (s == TA_OK) p->next_layer = layer + 1;
        return s;
    }
    ta_attend_options* attend_options() {
        ta_attend_options o{};
        o.mask = ta_mask(number(TA_MASK_CAUSAL));
        o.exp = ta_exp(number(0));
        o.p = ta_p(number(0));
        o.window = number(0);
        if (odd()) o.scale = std::bit_cast<float>(uint32_t(in_.bits(4)));
        if (odd()) o.softcap = std::bit_cast<float>(uint32_t(in_.bits(4)));
        if (odd()) o.alibi_slopes = array(items<float>(kMostRows, odd() ? INFINITY : -0.5f));
        if (odd()) o.sinks = array(items<float>(kMostRows, odd() ? NAN : 0.5f));
        return plain_ ? nullptr : sized(o);
    }
    float* lse() { return array(items<float>(kMostRows)); }
    ta_status attend(ta_error* err) {
        Plan* p = plan();
        const int64_t n = p ? p->n_query : 1;
        const auto layer = uint32_t(number(p && p->next_layer > 0 ? p->next_layer - 1 : 0));
        const ta_tensor* q = tensor(n, kQHeads, kDim);
        const ta_tensor* out = odd() ? q : tensor(n, kQHeads, kDim);
        return ta_attend(handle(p), layer, q, out, lse(), attend_options(), err);
    }
    ta_status plan_end(ta_error* err) {
        auto* keep = items<int32_t>(4);
        for (int i = 0; i < 4; ++i) keep[i] = int32_t(number(1));
        return ta_plan_end(handle(plan()), odd() ? array(keep) : nullptr, err);
    }
    ta_status plan_abort(ta_error* err) { return ta_plan_abort(handle(plan()), err); }

    ta_status attend_dense(ta_error* err) {
        constexpr uint32_t kBatch = 2;
        ta_dense_options o{};
        o.variant = ta_dense_variant(number(TA_DENSE_INT8_PAGE));
        o.batch = uint32_t(number(1));
        for (const int64_t** offsets : {&o.q_offsets, &o.k_offsets}) {
            if (!odd()) continue;
            auto* list = items<int64_t>(kBatch + 1);
            for (uint32_t i = 0; i <= kBatch; ++i) list[i] = number(i);
            *offsets = array(list);
            if (o.batch > kBatch) o.batch = kBatch;
        }
        o.v_granularity = ta_granularity(number(0));
        o.nonfinite = ta_nonfinite(number(0));
        o.attend = odd() ? attend_options() : nullptr;
        if (odd()) o.stream = reinterpret_cast<ta_stream>(this);
        if (odd()) o.variant = TA_DENSE_DISTR;
        o.group_size = uint32_t(number(0));
        const ta_tensor *q = tensor(3, kQHeads, kDim), *k = tensor(5, kHeads, kDim), *v = tensor(5, kHeads, kDim);
        const ta_tensor* out = tensor(3, kQHeads, kDim);
        return ta_attend_dense(context(), q, k, v, out, lse(), sized(o), err);
    }

    ta_status merge_states(ta_error* err) {
        constexpr size_t kParts = 3;
        std::vector<ta_tensor> parts;
        for (size_t i = 0; i < kParts; ++i) {
            const ta_tensor* t = tensor(3, kQHeads, kDim);
            if (t && t->struct_size == sizeof *t) parts.push_back(*t);
        }
        // Rows may coincide, so there can be more of them than elements: too many have no LSEs.
        const Wide rows = parts.empty() ? Wide(0) : Wide(parts[0].tokens) * parts[0].heads;
        const bool fits = rows >= 0 && rows <= Wide(kMostBytes);
        const auto lse_of_rows = [&](float value) { return fits ? array(items<float>(size_t(rows), value)) : nullptr; };
        auto* list = items<ta_tensor>(parts.size());
        std::copy(parts.begin(), parts.end(), list);
        auto* lses = items<const float*>(kParts);
        for (size_t i = 0; i < kParts; ++i) lses[i] = lse_of_rows(odd() ? NAN : odd() ? -INFINITY : 0.5f);
        const ta_tensor* out = odd() && !parts.empty() ? list : tensor(3, kQHeads, kDim);
        // The arrays do not say how long they are: no more than that.
        const auto n = uint32_t(number(int64_t(parts.size())));
        return ta_merge_states(context(), n <= parts.size() || n > 64 ? n : 0, array(list), array(lses), out, lse_of_rows(0.0f),
                               odd() ? reinterpret_cast<ta_stream>(this) : nullptr, err);
    }

    ta_status calibrator_create(ta_error* err) {
        const auto layers = uint32_t(small_if_right(kLayers, 4096)), heads = uint32_t(small_if_right(kHeads, 1024));
        return created(calibrators_, [&](ta_calibrator** out) {
            return ta_calibrator_create(context(), layers, heads, uint32_t(number(kDim)), out, err);
        });
    }
    ta_status calibrator_destroy(ta_error*) { return destroyed(calibrators_, ta_calibrator_destroy); }
    ta_status calibrator_observe(ta_error* err) {
        ta_calibrator* c = calibrator();
        const auto layer = uint32_t(number(0));
        const ta_tensor *k = tensor(3, kHeads, kDim), *v = tensor(3, kHeads, kDim);
        return ta_calibrator_observe(c, layer, k, v, err);
    }
    ta_status calibrator_finish(ta_error* err) {
        constexpr size_t kMost = 64;  // 8 x 8: small_if_right
        return ta_calibrator_finish(calibrator(), uint32_t(number(1)), or_null(items<uint8_t>(kMost)),
                                    or_null(items<uint8_t>(kMost)), array(items<float>(kMost)), array(items<float>(kMost)),
                                    err);
    }
    ta_status calibrator_choose(ta_error* err) {
        constexpr size_t kMost = 64;
        return ta_calibrator_choose(calibrator(), or_null(items<float>(3 * kMost)), or_null(items<float>(3 * kMost)),
                                    number(1 << 20), or_null(items<uint8_t>(kMost)), or_null(items<uint8_t>(kMost)), err);
    }

    ta_status x_seq_block(ta_error* err) {
        const size_t bytes = odd() ? in_.below(65536) : 65536;
        return ta_x_seq_block(pool(), id(seqs_), uint64_t(number(0)), sized(ta_x_block_info{}), or_null(memory(bytes)), bytes,
                              err);
    }
    ta_status x_seq_dequantize(ta_error* err) {
        constexpr int64_t kMost = 8, kWidest = 8 * 256;
        int64_t n = number(1);
        if (n > kMost && n < INT32_MAX) n %= kMost;
        return ta_x_seq_dequantize(pool(), id(seqs_), uint32_t(number(0)), number(0), n, array(items<float>(kMost * kWidest)),
                                   array(items<float>(kMost * kWidest)), err);
    }
    ta_status x_seq_attention(ta_error* err) {
        constexpr uint64_t kMost = 64;
        auto n = uint64_t(number(1));
        if (n > kMost && n < INT32_MAX) n %= kMost;
        return ta_x_seq_attention(pool(), id(seqs_), uint64_t(number(0)), n, array(items<float>(kMost)), err);
    }
    ta_status about(ta_error* err) {
        const ta_status s = ta_status(number(TA_E_INVALID));
        require(ta_status_name(s) && ta_build_info() && ta_version() > 0 && ta_abi_version() == TA_ABI_VERSION,
                "about the library");
        if (err) *err = kNoError;
        return TA_OK;
    }

    // -------------------------------------------------------------------------------------------- handles and ids

    template <class T, class Create>
    ta_status created(std::vector<T*>& handles, Create&& create) {
        if (handles.size() == kMostHandles) return TA_OK;
        T* out = nullptr;
        const ta_status s = create(or_null(&out));
        require((s == TA_OK) == (out != nullptr), "a handle from a call that failed, or none from one that did not");
        if (out) handles.push_back(out);
        return s;
    }
    template <class T>
    ta_status destroyed(std::vector<T*>& handles, void (*destroy)(T*)) {
        if (handles.empty()) return destroy(nullptr), TA_OK;
        const size_t i = plain_ ? handles.size() - 1 : in_.below(handles.size());
        destroy(handles[i]);
        handles.erase(handles.begin() + ptrdiff_t(i));
        return TA_OK;
    }
    static void remember(std::vector<uint64_t>& ids, uint64_t x) {
        if (ids.size() == kMostIds) ids.erase(ids.begin());
        ids.push_back(x);
    }
    template <class Make>
    ta_status new_id(std::vector<uint64_t>& ids, Make&& make) {
        uint64_t out = 0;
        const ta_status s = make(or_null(&out));
        require((s == TA_OK) == (out != 0), "an id from a call that failed, or none from one that did not");
        if (out) remember(ids, out);
        return s;
    }

    // -------------------------------------------------------------------------------------------- what must hold

    static constexpr ta_error kNoError{TA_OK, -1, -1, -1, -1, -1, -1, -1, -1, -1, ""};
    // The values of the pools that only a call that succeeds may change.
    std::vector<uint64_t> state() const {
        std::vector<uint64_t> s;
        for (const ta_kv_pool* p : pools_) {
            ta_kv_pool_stats stats{};
            stats.struct_size = sizeof stats;
            if (ta_kv_pool_get_stats(p, &stats, nullptr) == TA_OK)
                s.insert(s.end(), {stats.sequences, stats.tokens, stats.bytes_promised});
        }
        return s;
    }
    static void check_error(const Call& call, ta_status s, const ta_error& err) {
        const auto* end = static_cast<const char*>(std::memchr(err.message, 0, sizeof err.message));
        require(end != nullptr, call.name, "wrote a text without an end");
        require(err.code == s, call.name, "returned something else than it wrote to err");
        require((s == TA_OK) == (end == err.message), call.name, err.message);
        require(std::strcmp(ta_status_name(s), "unknown") != 0, call.name, "returned an unknown status");
        require(s != TA_E_INTERNAL, call.name, err.message);
        require(std::find(err.message, end, '\n') == end, call.name, err.message);
    }

    Input in_;
    bool plain_ = true;
    testing::CountingAllocator allocator_;
    std::vector<std::unique_ptr<uint8_t[]>> memory_;
    std::vector<std::unique_ptr<Watch>> watches_;
    std::vector<ta_context*> contexts_;
    std::vector<ta_kv_pool*> pools_;
    std::vector<std::unique_ptr<Plan>> plans_;
    std::vector<ta_calibrator*> calibrators_;
    std::vector<uint64_t> seqs_, spaces_, tickets_;
    std::vector<uint8_t> exported_;  // by the last export
    Values stored_;
};

// New ones are added at the end: inputs name calls by their place here.
const Program::Call Program::kCalls[] = {
    {"context_create", &Program::context_create},
    {"context_destroy", &Program::context_destroy},
    {"context_get_info", &Program::context_get_info},
    {"context_health", &Program::context_health},
    {"pool_create", &Program::pool_create},
    {"tiered_pool_create", &Program::tiered_pool_create},
    {"pool_close", &Program::pool_close},
    {"pool_destroy", &Program::pool_destroy},
    {"pool_get_stats", &Program::pool_get_stats},
    {"seq_create", &Program::seq_create},
    {"seq_fork", &Program::seq_fork},
    {"seq_truncate", &Program::seq_truncate},
    {"seq_set_priority", &Program::seq_set_priority},
    {"seq_release", &Program::seq_release},
    {"seq_length", &Program::seq_length},
    {"seq_verify", &Program::seq_verify},
    {"seq_residency", &Program::seq_residency},
    {"seq_save", &Program::seq_save},
    {"seq_load", &Program::seq_load},
    {"pool_save", &Program::pool_save},
    {"pool_load", &Program::pool_load},
    {"namespace_create", &Program::namespace_create},
    {"namespace_destroy", &Program::namespace_destroy},
    {"namespace_get_stats", &Program::namespace_get_stats},
    {"namespace_flush", &Program::namespace_flush},
    {"seq_publish", &Program::seq_publish},
    {"seq_match_prefix", &Program::seq_match_prefix},
    {"seq_move", &Program::seq_move},
    {"seq_prefetch", &Program::seq_prefetch},
    {"seq_pin", &Program::seq_pin},
    {"seq_unpin", &Program::seq_unpin},
    {"move_query", &Program::move_query},
    {"move_wait", &Program::move_wait},
    {"pool_descriptor", &Program::pool_descriptor},
    {"move_cancel", &Program::move_cancel},
    {"get_tier_stats", &Program::get_tier_stats},
    {"write_metrics", &Program::write_metrics},
    {"plan_create", &Program::plan_create},
    {"plan_destroy", &Program::plan_destroy},
    {"plan_set_stream", &Program::plan_set_stream},
    {"plan_begin", &Program::plan_begin},
    {"append", &Program::append},
    {"attend", &Program::attend},
    {"plan_end", &Program::plan_end},
    {"plan_abort", &Program::plan_abort},
    {"attend_dense", &Program::attend_dense},
    {"calibrator_create", &Program::calibrator_create},
    {"calibrator_destroy", &Program::calibrator_destroy},
    {"calibrator_observe", &Program::calibrator_observe},
    {"calibrator_finish", &Program::calibrator_finish},
    {"calibrator_choose", &Program::calibrator_choose},
    {"x_seq_block", &Program::x_seq_block},
    {"x_seq_dequantize", &Program::x_seq_dequantize},
    {"x_seq_attention", &Program::x_seq_attention},
    {"about", &Program::about},
    {"get_move_stats", &Program::get_move_stats},
    {"pool_describe", &Program::pool_describe},
    {"merge_states", &Program::merge_states},
    {"seq_reserve", &Program::seq_reserve},
    {"seq_suspend", &Program::seq_suspend},
    {"pool_fit", &Program::pool_fit},
    {"move_take_finished", &Program::move_take_finished},
    {"seq_export", &Program::seq_export},
    {"seq_import", &Program::seq_import},
    {"namespace_attach_store", &Program::namespace_attach_store},
    {"namespace_detach_store", &Program::namespace_detach_store},
    {"namespace_load", &Program::namespace_load},
    {"namespace_flush_store", &Program::namespace_flush_store},
    {"namespace_get_store_stats", &Program::namespace_get_store_stats},
    {"seq_forget", &Program::seq_forget},
    {"seq_retain", &Program::seq_retain},
    {"seq_describe_blocks", &Program::seq_describe_blocks},
    {"rotary_pool_create", &Program::rotary_pool_create},
    {"seq_shift", &Program::seq_shift},
    {"plan_begin_at", &Program::plan_begin_at},
};

void Program::run() {
    constexpr int kMostCalls = 64;
    for (int i = 0; i < kMostCalls && !in_.empty(); ++i) {
        const Call& call = kCalls[in_.below(std::size(kCalls))];
        plain_ = in_.byte() < 96;
        const std::vector<uint64_t> before = state();
        const size_t pools = pools_.size();
        ta_error err = kNoError;
        const bool with_error = !odd();
        const ta_status s = (this->*call.make)(with_error ? &err : nullptr);
        if (with_error) check_error(call, s, err);
        if (s != TA_OK && pools == pools_.size()) require(state() == before, call.name, "failed and changed the pool");
        memory_.clear();
    }
    // In any order: this one depends on the input.
    plain_ = false;
    while (contexts_.size() + pools_.size() + plans_.size() + calibrators_.size() > 0) {
        switch (in_.empty() ? 4 : in_.byte() % 4) {
            case 0:
                context_destroy(nullptr);
                break;
            case 1:
                pool_destroy(nullptr);
                break;
            case 2:
                plan_destroy(nullptr);
                break;
            case 3:
                calibrator_destroy(nullptr);
                break;
            default:
                if (!contexts_.empty())
                    context_destroy(nullptr);
                else if (!pools_.empty())
                    pool_destroy(nullptr);
                else if (!plans_.empty())
                    plan_destroy(nullptr);
                else
                    calibrator_destroy(nullptr);
        }
    }
    require(allocator_.blocks_alive() == 0, "memory was not given back");
    for (const auto& w : watches_)
        require(w->released == 1 || (w->released == 0 && !w->plain), "a callback set was not released once");
    require(allocator_.faults() == 0, "memory was asked for or given back as the ABI excludes");
}

}  // namespace

Seeds seeds() {
    static const std::pair<const char*, std::vector<const char*>> kPrograms[] = {
        {"step",
         {"context_create", "pool_create", "seq_create", "plan_create", "plan_begin", "append", "attend", "append", "attend",
          "plan_end", "seq_length", "seq_verify", "x_seq_block", "x_seq_dequantize", "pool_get_stats", "context_get_info"}},
        {"files",
         {"context_create", "pool_create", "seq_create", "plan_create", "plan_begin", "append", "append", "plan_end",
          "seq_fork", "seq_truncate", "seq_save", "seq_load", "pool_save", "pool_load", "seq_release"}},
        {"prefix",
         {"context_create", "tiered_pool_create", "seq_create", "plan_create", "plan_begin", "append", "append", "plan_end",
          "namespace_create", "seq_publish", "seq_match_prefix", "seq_verify", "namespace_get_stats", "namespace_flush",
          "pool_save", "namespace_destroy", "pool_load"}},
        {"tiers",
         {"context_create", "tiered_pool_create", "seq_create",   "plan_create", "plan_begin", "append",    "append",
          "plan_end",       "plan_begin",         "append",       "append",      "plan_end",   "seq_move",  "move_query",
          "move_wait",      "seq_residency",      "seq_prefetch", "move_cancel", "seq_pin",    "seq_unpin", "get_tier_stats",
          "write_metrics",  "plan_begin",         "append",       "attend",      "plan_abort"}},
        {"room",
         {"context_create", "tiered_pool_create", "seq_create", "seq_reserve", "plan_create", "plan_begin",    "append",
          "append",         "plan_end",           "pool_fit",   "seq_suspend", "move_wait",   "seq_residency", "seq_reserve",
          "seq_fork",       "plan_begin",         "append",     "attend",      "append",      "plan_end",      "pool_get_stats",
          "seq_release"}},
        {"store",
         {"context_create",
          "pool_create",
          "seq_create",
          "plan_create",
          "plan_begin",
          "append",
          "append",
          "plan_end",
          "namespace_create",
          "seq_publish",
          "namespace_attach_store",
          "namespace_get_store_stats",
          "namespace_destroy",
          "namespace_create",
          "namespace_attach_store",
          "namespace_load",
          "move_query",
          "seq_match_prefix",
          "seq_verify",
          "namespace_flush_store",
          "namespace_detach_store"}},
        {"dense",
         {"context_create", "attend_dense", "merge_states", "calibrator_create", "calibrator_observe", "calibrator_finish",
          "context_health", "about"}},
        {"closed",
         {"context_create", "pool_create", "seq_create", "plan_create", "plan_begin", "pool_close", "append", "plan_destroy",
          "pool_close", "seq_create", "plan_create", "context_destroy", "pool_get_stats"}},
    };
    Seeds all;
    for (const auto& [name, calls] : kPrograms) {
        auto& [seed_name, bytes] = all.emplace_back(name, std::vector<uint8_t>{});
        for (const char* call : calls) {
            const auto* found = std::find_if(std::begin(Program::kCalls), std::end(Program::kCalls),
                                             [&](const Program::Call& c) { return std::strcmp(c.name, call) == 0; });
            require(found != std::end(Program::kCalls), "a seed has no call", call);
            bytes.insert(bytes.end(), {uint8_t(found - std::begin(Program::kCalls)), 0});
        }
    }
    return all;
}

}  // namespace ta::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const bool made = mkfifo(ta::fuzz::folder().file("fifo").c_str(), 0600) == 0;
    ta::fuzz::require(made, "no fifo");
    for (const char* left : {"0", "1", "line\nbreak"}) std::filesystem::remove(ta::fuzz::folder().file(left));
    ta::fuzz::Program(data, size).run();
    return 0;
}
