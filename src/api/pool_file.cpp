#include "src/kv/pool_file.h"

#include <algorithm>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

extern "C" {

ta_status ta_kv_pool_save(ta_kv_pool* pool, const char* path, ta_save_flags flags, ta_progress_fn progress, void* user,
                          ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_path(path, 1));
        if (flags & ~TA_SAVE_PUBLISHED)
            return fail(TA_E_INVALID, "flags has bits of no meaning: 0x%x", unsigned(flags)).argument(2);
        return at_argument(save_pool(*pool->impl, path, (flags & TA_SAVE_PUBLISHED) != 0, progress_of(progress, user),
                                     pool->impl->context().files()),
                           1);
    });
}

ta_status ta_kv_pool_load(ta_kv_pool* pool, const char* path, ta_progress_fn progress, void* user, ta_loaded_seq* loaded,
                          uint64_t most, uint64_t* n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_path(path, 1));
        TA_RETURN_IF_ERROR(check_aligned(loaded, "loaded", 4));
        TA_RETURN_IF_ERROR(check_pointer(n, "n", 6));
        if (!loaded) {
            Result<uint64_t> count = count_sequences(*pool->impl, path, pool->impl->context().files());
            if (!count.ok()) return at_argument(std::move(count).status(), 1);
            *n = count.value();
            return {};
        }
        Result<std::vector<LoadedSequence>> all =
            load_pool(*pool->impl, path, most, progress_of(progress, user), pool->impl->context().files());
        if (!all.ok()) return at_argument(std::move(all).status(), 1);
        std::transform(all.value().begin(), all.value().end(), loaded, [](const LoadedSequence& s) {
            return ta_loaded_seq{s.saved, s.loaded};
        });
        *n = all.value().size();
        return {};
    });
}

}  // extern "C"
