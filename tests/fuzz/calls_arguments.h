// What a program of calls is made of: arguments, right or hostile, and the handles and ids that calls gave.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/counting_allocator.h"
#include "support/files.h"
#include "tests/fuzz/input.h"
#include "turboattention.h"
#include "turboattention_experimental.h"

namespace ta::fuzz {

inline constexpr uint32_t kLayers = 2, kHeads = 2, kQHeads = 4, kDim = 64;
inline constexpr int32_t kTokens = 70;                    // of a plain append
inline constexpr size_t kMostBytes = 1 << 20;             // of an array that is handed to the library
inline constexpr size_t kMostRows = kMostBytes / 2 / 64;  // of a tensor of that size
inline constexpr uint64_t kMostMemory = 64 << 20;
inline constexpr size_t kMostHandles = 3, kMostIds = 32;
inline constexpr size_t kKeys = 8;
using Wide = long double;  // extents of hostile tensors: exact where it matters, and they do not overflow

inline const testing::Folder& folder() {
    static const testing::Folder f;
    return f;
}

struct Plan {
    ta_plan* handle;
    int64_t n_new = 0, n_query = 0;  // of the last begin that succeeded
    uint32_t next_layer = 0;
};

class Arguments {
  public:
    Arguments(const uint8_t* data, size_t size) : in_(data, size) {}

  protected:
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

    static constexpr ta_error kNoError{TA_OK, -1, -1, -1, -1, -1, -1, -1, -1, -1, ""};

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
};

}  // namespace ta::fuzz
