#include "src/api/api.h"
#include "src/kv/files/memory_files.h"
#include "src/kv/files/sequence_file.h"

using namespace ta;
using namespace ta::api;

extern "C" {

ta_status ta_seq_create(ta_kv_pool* pool, ta_seq* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        Result<ta_seq> seq = pool->impl->sequences().create();
        if (!seq.ok()) return std::move(seq).status();
        *out = seq.value();
        return {};
    });
}

ta_status ta_seq_fork(ta_kv_pool* pool, ta_seq source, ta_seq* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        Result<ta_seq> seq = pool->impl->sequences().fork(source);
        if (!seq.ok()) return std::move(seq).status();
        *out = seq.value();
        return {};
    });
}

ta_status ta_seq_forget(ta_kv_pool* pool, ta_seq seq, int64_t first, int64_t n, int64_t* forgotten, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_aligned(forgotten, "forgotten", 4));
        Result<int64_t> tokens = pool->impl->sequences().forget(seq, first, n);
        if (!tokens.ok()) return std::move(tokens).status();
        if (forgotten) *forgotten = tokens.value();
        return {};
    });
}

ta_status ta_seq_shift(ta_kv_pool* pool, ta_seq seq, int64_t first, int64_t n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().shift(seq, first, n);
    });
}

ta_status ta_seq_truncate(ta_kv_pool* pool, ta_seq seq, int64_t length, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().truncate(seq, length);
    });
}

ta_status ta_seq_release(ta_kv_pool* pool, ta_seq seq, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().release(seq);
    });
}

ta_status ta_seq_reserve(ta_kv_pool* pool, ta_seq seq, int64_t tokens, int32_t wait_ms, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_wait_ms(wait_ms, "wait_ms", 3));
        return pool->impl->sequences().reserve(seq, tokens, pool->impl->tier_settings().patience.or_of(wait_ms));
    });
}

ta_status ta_kv_pool_fit(const ta_kv_pool* pool, uint32_t n_seqs, const ta_seq* seqs, const int32_t* n_new, ta_fit* out,
                         ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        if (n_seqs == 0) return fail(TA_E_INVALID, "n_seqs is 0").argument(1);
        TA_RETURN_IF_ERROR(check_pointer(seqs, "seqs", 2));
        TA_RETURN_IF_ERROR(check_aligned(n_new, "n_new", 3));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 4));
        TA_RETURN_IF_ERROR(check_struct_size(out, "out", 4));
        Result<ta_fit> fit = pool->impl->sequences().fit({seqs, n_seqs}, n_new);
        if (!fit.ok()) return std::move(fit).status();
        return write_struct(fit.value(), out, "out", 4);
    });
}

ta_status ta_seq_set_priority(ta_kv_pool* pool, ta_seq seq, int32_t priority, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().set_priority(seq, priority);
    });
}

ta_status ta_seq_length(const ta_kv_pool* pool, ta_seq seq, int64_t* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        Result<int64_t> length = pool->impl->sequences().length(seq);
        if (!length.ok()) return std::move(length).status();
        *out = length.value();
        return {};
    });
}

ta_status ta_seq_verify(const ta_kv_pool* pool, ta_seq seq, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().verify(seq);
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

ta_status ta_seq_export(ta_kv_pool* pool, ta_seq seq, const ta_sink* sink, uint64_t* bytes, ta_error* err) {
    return guard(err, [&]() -> Status {
        CallbackSet<ta_sink> set;
        Status taken = take_set(sink, "sink", 2, set);
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(sink, "sink", 2));
        TA_RETURN_IF_ERROR(std::move(taken));
        if (!set->write) return fail(TA_E_INVALID, "sink.write is null").argument(2);
        TA_RETURN_IF_ERROR(check_aligned(bytes, "bytes", 3));
        SinkFile files(
            [&](uint64_t offset, const void* data, uint64_t n) { return set->write(set->user, offset, data, n) == 0; });
        Status saved = save_sequence(*pool->impl, seq, {}, [&](const std::function<Status(File&)>& write) -> Status {
            File file(files, "the sink");
            file.open("", 0);
            return write(file);
        });
        if (files.stopped()) return fail(TA_E_CANCELLED, "the sink stopped the export");
        if (saved.ok() && bytes) *bytes = files.bytes();
        return saved;
    });
}

ta_status ta_seq_import(ta_kv_pool* pool, const void* data, uint64_t bytes, ta_seq* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(static_cast<const uint8_t*>(data), "data", 1));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 3));
        MemoryFile files({static_cast<const uint8_t*>(data), bytes});
        Result<ta_seq> seq = load_sequence(*pool->impl, "the given memory", {}, files);
        if (!seq.ok()) return at_argument(std::move(seq).status(), 1);
        *out = seq.value();
        return {};
    });
}

}  // extern "C"
