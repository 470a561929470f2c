// Shared by all ABI functions: handles, the exception barrier, reading structs of older and newer headers, turning a Status
// into a ta_error.
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

// Tells whether a call uses a handle, for handles that only one thread at a time may use.
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
    // What the results of ta_kv_pool_describe point to.
    std::vector<ta_layer_group> layer_groups{};
    std::vector<uint8_t> all_8_bits{};  // for pools that fall: the geometry's maps then hold the bits after the fall
    std::vector<float> k_offset{};      // for pools whose blocks have more channels than the caller
    std::vector<double> rotary_angles{};
    ta_rotary rotary{};
    std::string disk_folder{}, disk_path{};
    bool has_tiers = false;
    ta_numerics numerics{};
    ta_tier_options tiers{};
    ta_context peer{};
    ta_x_tier_tuning tuning{};
    std::unique_ptr<ta::store::Stores> stores{};  // destroyed before the rest
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

// Runs the body of an ABI function. Turns a Status into ta_status + ta_error, and an exception into TA_E_MEMORY or
// TA_E_INTERNAL. If err is not aligned, only the returned status says so.
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

// Deletes a handle of this process, which may be null. A forked child has none of the parent's threads and locks, so there the
// memory is left alone.
template <class Handle, class ContextOf>
void destroy(Handle* handle, ContextOf&& context_of) {
    without_cancel([&]() noexcept {
        if (handle && context_of(*handle).owned_by_this_process()) delete handle;
        return 0;
    });
}

// Marks a handle as used by a call, from the call's first look at it to its end.
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

// Checks a pointer of the caller's, which may be null. `in`: the struct that it is a field of, if any.
template <class T>
Status check_aligned(const T* p, const char* name, int argument, const char* in = nullptr) {
    if (reinterpret_cast<uintptr_t>(p) % alignof(T) == 0) return {};
    return fail(TA_E_ALIGNMENT, "%s%s%s is not aligned to %zu bytes, as its type needs", in ? in : "", in ? "." : "", name,
                alignof(T))
        .argument(argument);
}

// Checks a pointer that must not be null.
template <class T>
Status check_pointer(const T* p, const char* name, int argument) {
    if (p) return check_aligned(p, name, argument);
    return fail(TA_E_INVALID, "%s is null", name).argument(argument);
}

inline Status check_process(const Context& context) {
    if (context.owned_by_this_process()) return {};
    return fail(TA_E_FORKED, "the handle was made before fork(); create a context in the child process");
}

// Reads the layer groups of a pool's options, each with the fields that this header knows.
Status read_layer_groups(const ta_kv_pool_options& options, std::vector<ta_layer_group>& groups);

inline constexpr uint32_t kMaxStructBytes = 1 << 16;

// An array field of a struct. Such an array is longer than the struct's alignment.
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

// Reads the struct_size of a struct that the call reads or writes. It must be the size in some version of the header, older or
// newer than this one.
template <class T>
Result<uint32_t> read_struct_size(const T* given, const char* name, int argument) {
    TA_RETURN_IF_ERROR(check_aligned(given, name, argument));
    const uint32_t size = given->struct_size;
    if (size < 2 * sizeof(uint32_t) || size > kMaxStructBytes) {
        return fail(TA_E_STRUCT, "%s.struct_size is %u; set it to sizeof, which is %zu here", name, size, sizeof(T))
            .argument(argument);
    }
    // A sizeof is a multiple of the alignment, and only arrays are longer than the alignment. So a size that is a multiple of
    // it can cut no field but an array.
    bool cuts = size < sizeof(T) && size % alignof(T) != 0;
    for (const ArrayField& f : kArrayFields<T>) cuts = cuts || (size > f.offset && size < f.offset + f.bytes);
    if (!cuts) return size;
    return fail(TA_E_STRUCT, "%s.struct_size is %u, the size of no header's struct; set it to sizeof, which is %zu here", name,
                size, sizeof(T))
        .argument(argument);
}

// Copies the fields that this library knows into `known`. If struct_size is wrong, fails and leaves `known` as it is. Also
// fails if the caller's header has fields that this one lacks, unless they are zero.
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

// Reads a struct. Fields that the caller's header lacks become zero; fields that this header lacks must be zero.
template <class T>
Result<T> read_struct(const T* given, const char* name, int argument) {
    T known{};
    TA_RETURN_IF_ERROR(read_known(given, name, argument, known));
    return known;
}

// Element i of an array of structs, which lie as far apart as the caller's struct_size says. `name`: the element's name in
// error texts.
template <class T>
Result<const T*> element_of(const T* array, uint32_t i, const char* name, int argument) {
    const auto* element = reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(array) + size_t(i) * array->struct_size);
    TA_RETURN_IF_ERROR(check_aligned(element, name, argument));
    if (element->struct_size == array->struct_size) return element;
    return fail(TA_E_STRUCT, "%s.struct_size is %u, but that of the first %u; elements of an array have one size", name,
                element->struct_size, array->struct_size)
        .argument(argument);
}

// Takes a caller's callback set, which may be null. From then on it is released, whatever becomes of the call. The caller of
// this function checks the returned status later.
template <class Set>
Status take_set(const Set* given, const char* name, int argument, CallbackSet<Set>& to) {
    if (!given) return {};
    Set known{};
    Status read = read_known(given, name, argument, known);
    to = CallbackSet<Set>(known);
    return read;
}

// Checks the struct_size of a struct that the call will write.
template <class T>
Status check_struct_size(const T* out, const char* name, int argument) {
    return read_struct_size(out, name, argument).status();
}

// Writes a filled-in struct to the caller: as much of it as struct_size allows, then zeros.
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

// Reads a tensor argument: checks the pointer and the struct, then does the checks of view_tensor().
Result<TensorView> read_tensor(const ta_tensor* tensor, const char* name, int argument);

// Reads ta_attend_options through a pointer that may be null. `name`: its name in error texts. `storage` holds the copy.
Result<const ta_attend_options*> read_attend_options(const ta_attend_options* given, const char* name, int argument,
                                                     ta_attend_options* storage);

// Checks a wait that a caller passed.
inline Status check_wait_ms(int32_t wait_ms, const char* name, int argument) {
    if (wait_ms >= -1 && wait_ms <= Patience::kMostWait) return {};
    return fail(TA_E_INVALID, "%s is %d; it takes -1 to %d", name, int(wait_ms), int(Patience::kMostWait)).argument(argument);
}

// Checks a path that is argument number `argument`.
inline Status check_path(const char* path, int argument) {
    TA_RETURN_IF_ERROR(check_pointer(path, "path", argument));
    if (*path) return {};
    return fail(TA_E_INVALID, "path is empty").argument(argument);
}

// Sets the argument of a failure that has none yet, if it says that an argument is wrong or names something that no longer
// exists.
inline Status at_argument(Status s, int argument) {
    constexpr ta_status kWrongArguments = 0x01;
    const bool wrong = s.code() >> 8 == kWrongArguments || s.code() == TA_E_STALE;
    return wrong && s.detail() && s.detail()->argument < 0 ? std::move(s).argument(argument) : std::move(s);
}

// Takes the progress set of a call. Construct it before anything in the call can fail.
class GivenProgress {
  public:
    GivenProgress(const ta_progress* given, int argument) : status_(take_set(given, "progress", argument, set_)) {}

    Status take_status() { return std::move(status_); }
    // Called by the work to report progress; it returns false to stop the work.
    std::function<bool(uint64_t done, uint64_t total)> function() const {
        if (!set_->report) return {};
        return [this](uint64_t done, uint64_t total) { return set_->report(set_->user, done, total) == 0; };
    }

  private:
    CallbackSet<ta_progress> set_;
    Status status_;
};

// Checks that the handle's pool may be used in this process.
inline Status check_pool(const ta_kv_pool* pool) {
    TA_RETURN_IF_ERROR(check_pointer(pool, "pool", 0));
    return check_process(pool->impl->context());
}

// Checks block keys [n, 32] at `argument`; `n` is the argument behind it.
inline Status check_keys(const uint8_t* keys, uint64_t n, int argument) {
    if (n > 0) TA_RETURN_IF_ERROR(check_pointer(keys, "keys", argument));
    constexpr uint64_t kMost = uint64_t{1} << 34;  // blocks of a sequence
    if (n <= kMost) return {};
    return fail(TA_E_INVALID, "n is %llu; a sequence has up to 2^34 blocks", (unsigned long long)n).argument(argument + 1);
}

}  // namespace ta::api
