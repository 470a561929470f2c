#include "src/api/api.h"
#include "src/kv/files/sequence_file.h"

using namespace ta;
using namespace ta::api;

extern "C" {

ta_status ta_seq_create(ta_kv_pool* pool, ta_seq* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        Result<ta_seq> seq = pool->impl->create_sequence();
        if (!seq.ok()) return std::move(seq).status();
        *out = seq.value();
        return {};
    });
}

ta_status ta_seq_fork(ta_kv_pool* pool, ta_seq source, ta_seq* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        Result<ta_seq> seq = pool->impl->fork_sequence(source);
        if (!seq.ok()) return std::move(seq).status();
        *out = seq.value();
        return {};
    });
}

ta_status ta_seq_truncate(ta_kv_pool* pool, ta_seq seq, int64_t length, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->truncate(seq, length);
    });
}

ta_status ta_seq_release(ta_kv_pool* pool, ta_seq seq, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->release(seq);
    });
}

ta_status ta_seq_set_priority(ta_kv_pool* pool, ta_seq seq, int32_t priority, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->set_priority(seq, priority);
    });
}

ta_status ta_seq_length(const ta_kv_pool* pool, ta_seq seq, int64_t* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        Result<int64_t> length = pool->impl->length(seq);
        if (!length.ok()) return std::move(length).status();
        *out = length.value();
        return {};
    });
}

ta_status ta_seq_verify(const ta_kv_pool* pool, ta_seq seq, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->verify(seq);
    });
}

ta_status ta_seq_save(ta_kv_pool* pool, ta_seq seq, const char* path, const ta_progress* progress, ta_error* err) {
    return guard(err, [&]() -> Status {
        GivenProgress reports(progress, 3);
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_path(path, 2));
        TA_RETURN_IF_ERROR(reports.take_status());
        return at_argument(save_sequence(*pool->impl, seq, path, reports.function(), pool->impl->context().files()), 2);
    });
}

ta_status ta_seq_load(ta_kv_pool* pool, const char* path, const ta_progress* progress, ta_seq* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        GivenProgress reports(progress, 2);
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_path(path, 1));
        TA_RETURN_IF_ERROR(reports.take_status());
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 3));
        Result<ta_seq> seq = load_sequence(*pool->impl, path, reports.function(), pool->impl->context().files());
        if (!seq.ok()) return at_argument(std::move(seq).status(), 1);
        *out = seq.value();
        return {};
    });
}

}  // extern "C"
