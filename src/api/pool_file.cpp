#include "src/kv/files/pool_file.h"

#include <algorithm>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

extern "C" {

ta_status ta_kv_pool_save(ta_kv_pool* pool, const char* path, ta_save_flags flags, const ta_progress* progress, ta_error* err) {
    return guard(err, [&]() -> Status {
        GivenProgress reports(progress, 3);
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_path(path, 1));
        TA_RETURN_IF_ERROR(reports.take_status());
        if (flags & ~TA_SAVE_PUBLISHED)
            return fail(TA_E_INVALID, "flags has bits of no meaning: 0x%x", unsigned(flags)).argument(2);
        return at_argument(
            save_pool(*pool->impl, path, (flags & TA_SAVE_PUBLISHED) != 0, reports.function(), pool->impl->context().files()),
            1);
    });
}

ta_status ta_kv_pool_load(ta_kv_pool* pool, const char* path, const ta_progress* progress, ta_loaded_seq* loaded, uint64_t most,
                          uint64_t* n, ta_error* err) {
    return guard(err, [&]() -> Status {
        GivenProgress reports(progress, 2);
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_path(path, 1));
        TA_RETURN_IF_ERROR(reports.take_status());
        TA_RETURN_IF_ERROR(check_aligned(loaded, "loaded", 3));
        TA_RETURN_IF_ERROR(check_pointer(n, "n", 5));
        if (!loaded) {
            Result<uint64_t> count = count_sequences(*pool->impl, path, pool->impl->context().files());
            if (!count.ok()) return at_argument(std::move(count).status(), 1);
            *n = count.value();
            return {};
        }
        Result<std::vector<LoadedSequence>> all =
            load_pool(*pool->impl, path, most, reports.function(), pool->impl->context().files());
        if (!all.ok()) return at_argument(std::move(all).status(), 1);
        std::transform(all.value().begin(), all.value().end(), loaded, [](const LoadedSequence& s) {
            return ta_loaded_seq{s.saved, s.loaded};
        });
        *n = all.value().size();
        return {};
    });
}

}  // extern "C"
