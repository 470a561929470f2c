// Shared by every ABI function: handles, the exception barrier, reading of structs of any header's age, status to ta_error.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "include/turboattention.h"
#include "include/turboattention_experimental.h"
#include "src/attend/plan.h"
#include "src/core/callback_set.h"
#include "src/core/context.h"
#include "src/core/no_cancel.h"
#include "src/core/status.h"
#include "src/kv/calibrator.h"
#include "src/kv/pool.h"
#include "src/kv/store/stores.h"

namespace ta::api {

// Of a handle that one thread at a time may use: whether a call uses it.
class Exclusive {
  public:
    bool take() const { return !taken_.exchange(true, std::memory_order_acquire); }
    void give_back() const { taken_.store(false, std::memory_order_release); }

  private:
    mutable std::atomic<bool> taken_{false};
};

}  // namespace ta::api

struct ta_context {
    std::shared_ptr<ta::Context> impl;
};
struct ta_kv_pool {
    std::shared_ptr<ta::Pool> impl;
    // The arrays, the struct and the strings that the results of ta_kv_pool_describe point to.
    std::vector<ta_layer_group> layer_groups{};
    std::vector<uint8_t> all_8_bits{};  // where the geometry's maps say what falls
    std::vector<float> k_offset{};      // where blocks have more channels
    std::vector<double> rotary_angles{};
    ta_rotary rotary{};
    std::string disk_folder{}, disk_path{};
    bool has_tiers = false;
    ta_numerics numerics{};
    ta_tier_options tiers{};
    ta_context peer{};
    ta_x_tier_tuning tuning{};
    std::unique_ptr<ta::store::Stores> stores{};  // ends before the rest
};
struct ta_plan {
    std::unique_ptr<ta::Plan> impl;
    ta::api::Exclusive use{};
};
struct ta_calibrator {
    std::unique_ptr<ta::Calibrator> impl;
    ta::api::Exclusive use{};
};

namespace ta::api {

// Fills in *err, also on success.
ta_status report(const Status& status, ta_error* err) noexcept;

// Runs the body of an ABI function: a Status comes out as ta_status + ta_error, an exception as TA_E_MEMORY or TA_E_INTERNAL.
// An err that is not aligned can only be told of by the status.
template <class Body>
ta_status guard(ta_error* err, Body&& body) {
    if (reinterpret_cast<uintptr_t>(err) % alignof(ta_error) != 0) return TA_E_ALIGNMENT;
    return without_cancel([&]() noexcept -> ta_status {
        try {
            return report(body(), err);
        } catch (const std::bad_alloc&) {
            return report(fail(TA_E_MEMORY, "no memory: the C++ operator new failed"), err);
        } catch (const std::exception& e) {
            return report(fail(TA_E_INTERNAL, "unexpected exception: %s", e.what()), err);
        } catch (...) {
            return report(fail(TA_E_INTERNAL, "unexpected exception"), err);
        }
    });
}

// Deletes a handle of this process, which may be null. In a forked child the threads and locks of the parent do not exist: the
// memory is left alone.
template <class Handle, class ContextOf>
void destroy(Handle* handle, ContextOf&& context_of) {
    without_cancel([&]() noexcept {
        if (handle && context_of(*handle).owned_by_this_process()) delete handle;
        return 0;
    });
}

// A call's use of such a handle, from its first look at it to its end.
class Use {
  public:
    explicit Use(const Exclusive& handle) : handle_(handle.take() ? &handle : nullptr) {}
    ~Use() {
        if (handle_) handle_->give_back();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    Status status(const char* name) const {
        if (handle_) return {};
        return fail(TA_E_BUSY, "another call on the %s runs; it takes one at a time", name).argument(0);
    }

  private:
    const Exclusive* const handle_;
};

// A pointer of the caller's, which may be null. `in`: of which struct, if it is a field.
template <class T>
Status check_aligned(const T* p, const char* name, int argument, const char* in = nullptr) {
    if (reinterpret_cast<uintptr_t>(p) % alignof(T) == 0) return {};
    return fail(TA_E_ALIGNMENT, "%s%s%s is not aligned to %zu bytes, as its type needs", in ? in : "", in ? "." : "", name,
                alignof(T))
        .argument(argument);
}

// One that may not be null.
template <class T>
Status check_pointer(const T* p, const char* name, int argument) {
    if (p) return check_aligned(p, name, argument);
    return fail(TA_E_INVALID, "%s is null", name).argument(argument);
}

inline Status check_process(const Context& context) {
    if (context.owned_by_this_process()) return {};
    return fail(TA_E_FORKED, "the handle was made before fork(); create a context in the child process");
}

inline constexpr uint32_t kMaxStructBytes = 1 << 16;

// The place of an array field in a struct. An array is longer than its struct's alignment.
struct ArrayField {
    size_t offset, bytes;
};
template <class T>
inline constexpr std::array<ArrayField, 0> kArrayFields{};
template <>
inline constexpr std::array<ArrayField, 2> kArrayFields<ta_context_info>{
    {{offsetof(ta_context_info, device_name), sizeof(ta_context_info::device_name)},
     {offsetof(ta_context_info, degraded), sizeof(ta_context_info::degraded)}}};
template <>
inline constexpr std::array<ArrayField, 1> kArrayFields<ta_namespace_options>{
    {{offsetof(ta_namespace_options, salt), sizeof(ta_namespace_options::salt)}}};
template <>
inline constexpr std::array<ArrayField, 1> kArrayFields<ta_store_stats>{
    {{offsetof(ta_store_stats, failure), sizeof(ta_store_stats::failure)}}};
template <>
inline constexpr std::array<ArrayField, 1> kArrayFields<ta_tier_stats>{
    {{offsetof(ta_tier_stats, reason), sizeof(ta_tier_stats::reason)}}};

// The struct_size of a struct that a call reads or writes: that of some header, older or younger than this one.
template <class T>
Result<uint32_t> read_struct_size(const T* given, const char* name, int argument) {
    TA_RETURN_IF_ERROR(check_aligned(given, name, argument));
    const uint32_t size = given->struct_size;
    if (size < 2 * sizeof(uint32_t) || size > kMaxStructBytes) {
        return fail(TA_E_STRUCT, "%s.struct_size is %u; set it to sizeof, which is %zu here", name, size, sizeof(T))
            .argument(argument);
    }
    // A sizeof is a multiple of the alignment, and no field but an array is longer than that: what is one cuts no other field.
    bool cuts = size < sizeof(T) && size % alignof(T) != 0;
    for (const ArrayField& f : kArrayFields<T>) cuts = cuts || (size > f.offset && size < f.offset + f.bytes);
    if (!cuts) return size;
    return fail(TA_E_STRUCT, "%s.struct_size is %u, the size of no header's struct; set it to sizeof, which is %zu here", name,
                size, sizeof(T))
        .argument(argument);
}

// Copies the fields that this library knows into `known`, which stays as it is where struct_size is that of no header. Fails also
// where the caller's header has fields that this one lacks, unless they are zero.
template <class T>
Status read_known(const T* given, const char* name, int argument, T& known) {
    Result<uint32_t> read = read_struct_size(given, name, argument);
    if (!read.ok()) return std::move(read).status();
    const uint32_t size = read.value();
    std::memcpy(&known, given, size < sizeof(T) ? size : sizeof(T));
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (size_t i = sizeof(T); i < size; ++i) {
        if (bytes[i] == 0) continue;
        return fail(TA_E_STRUCT, "%s has a field at byte %zu that this version (%u bytes) does not know; it must be zero", name,
                    i, unsigned(sizeof(T)))
            .argument(argument);
    }
    return {};
}

// The struct as this library knows it: fields that the caller's header lacks are zero; fields that this header lacks must be.
template <class T>
Result<T> read_struct(const T* given, const char* name, int argument) {
    T known{};
    TA_RETURN_IF_ERROR(read_known(given, name, argument, known));
    return known;
}

// Element i of an array of structs, which lie as far apart as the caller's struct is long. `name`: of the element.
template <class T>
Result<const T*> element_of(const T* array, uint32_t i, const char* name, int argument) {
    const auto* element = reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(array) + size_t(i) * array->struct_size);
    TA_RETURN_IF_ERROR(check_aligned(element, name, argument));
    if (element->struct_size == array->struct_size) return element;
    return fail(TA_E_STRUCT, "%s.struct_size is %u, but that of the first %u; elements of an array have one size", name,
                element->struct_size, array->struct_size)
        .argument(argument);
}

// Takes a set of callbacks that a call was given, which may be null, so that it is released whatever becomes of the call. The
// status is for later.
template <class Set>
Status take_set(const Set* given, const char* name, int argument, CallbackSet<Set>& to) {
    if (!given) return {};
    Set known{};
    Status read = read_known(given, name, argument, known);
    to = CallbackSet<Set>(known);
    return read;
}

// The struct_size of what a call will write.
template <class T>
Status check_struct_size(const T* out, const char* name, int argument) {
    return read_struct_size(out, name, argument).status();
}

// Writes a filled-in struct to the caller, as much of it as fits its struct_size, and zeros beyond.
template <class T>
Status write_struct(const T& filled, T* out, const char* name, int argument) {
    Result<uint32_t> read = read_struct_size(out, name, argument);
    if (!read.ok()) return std::move(read).status();
    const uint32_t size = read.value();
    auto* bytes = reinterpret_cast<unsigned char*>(out);
    const size_t known = size < sizeof(T) ? size : sizeof(T);
    std::memcpy(bytes + sizeof size, reinterpret_cast<const unsigned char*>(&filled) + sizeof size, known - sizeof size);
    if (size > known) std::memset(bytes + known, 0, size - known);
    return {};
}

// A tensor argument: pointer, struct, then the checks of view_tensor.
Result<TensorView> read_tensor(const ta_tensor* tensor, const char* name, int argument);

// ta_attend_options behind a pointer that may be null, `name` for texts. `storage` keeps the copy.
Result<const ta_attend_options*> read_attend_options(const ta_attend_options* given, const char* name, int argument,
                                                     ta_attend_options* storage);

// A wait of a caller's.
inline Status check_wait_ms(int32_t wait_ms, const char* name, int argument) {
    if (wait_ms >= -1 && wait_ms <= Patience::kMostWait) return {};
    return fail(TA_E_INVALID, "%s is %d; it takes -1 to %d", name, int(wait_ms), int(Patience::kMostWait)).argument(argument);
}

// A path, which is argument `argument`.
inline Status check_path(const char* path, int argument) {
    TA_RETURN_IF_ERROR(check_pointer(path, "path", argument));
    if (*path) return {};
    return fail(TA_E_INVALID, "path is empty").argument(argument);
}

// A failure that says that an argument is wrong, or that it names what is no more: that argument, if it names none yet.
inline Status at_argument(Status s, int argument) {
    constexpr ta_status kWrongArguments = 0x01;
    const bool wrong = s.code() >> 8 == kWrongArguments || s.code() == TA_E_STALE;
    return wrong && s.detail() && s.detail()->argument < 0 ? std::move(s).argument(argument) : std::move(s);
}

// The progress set of a call, taken before anything of the call can fail.
class GivenProgress {
  public:
    GivenProgress(const ta_progress* given, int argument) : status_(take_set(given, "progress", argument, set_)) {}

    Status take_status() { return std::move(status_); }
    // The callback that the work calls; it returns false to stop the work.
    std::function<bool(uint64_t done, uint64_t total)> function() const {
        if (!set_->report) return {};
        return [this](uint64_t done, uint64_t total) { return set_->report(set_->user, done, total) == 0; };
    }

  private:
    CallbackSet<ta_progress> set_;
    Status status_;
};

// The pool behind a handle, once it may be used here.
inline Status check_pool(const ta_kv_pool* pool) {
    TA_RETURN_IF_ERROR(check_pointer(pool, "pool", 0));
    return check_process(pool->impl->context());
}

// Keys [n, 32] of blocks, at `argument`, their number behind it.
inline Status check_keys(const uint8_t* keys, uint64_t n, int argument) {
    if (n > 0) TA_RETURN_IF_ERROR(check_pointer(keys, "keys", argument));
    constexpr uint64_t kMost = uint64_t{1} << 34;  // blocks of a sequence
    if (n <= kMost) return {};
    return fail(TA_E_INVALID, "n is %llu; a sequence has up to 2^34 blocks", (unsigned long long)n).argument(argument + 1);
}

}  // namespace ta::api
