// One call of each kind that the ABI has, on a pool of a CPU with all tiers. `run` decides what each runs on.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <thread>

#include "support/files.h"
#include "support/handles.h"
#include "support/tiers.h"

namespace ta::testing {

// Makes the call, somewhere, and returns when it has returned.
using RunCall = std::function<void(const char* name, const std::function<ta_status(ta_error*)>& call)>;

inline void make_every_call(const RunCall& run, uint32_t head_dim = 256, ta_cpu_isa isa = TA_CPU_ISA_AUTO) {
    const Folder folder(false);
    const std::string sequence_file = folder.file("sequence"), pool_file = folder.file("pool"), disk_file = folder.file("disk");
    constexpr uint32_t kHeads = 2;
    constexpr int32_t kTokens = 64 * 20 + 10;  // more than a part of attention
    Random random(5);

    ta_context* context = nullptr;
    auto context_options = sized<ta_context_options>();
    context_options.threads = 2;
    context_options.cpu_isa = isa;
    run("ta_context_create", [&](ta_error* e) { return ta_context_create(&context_options, &context, e); });
    ta_kv_pool* pool = nullptr;
    auto options = pool_options(1, kHeads, head_dim);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{64} << 20;
    tiers.disk_path = disk_file.c_str();
    options.tiers = &tiers;
    auto rotary = sized<ta_rotary>();
    const double angle = 0.5;
    rotary.channels = 2;
    rotary.layers = 1;
    rotary.angles = &angle;
    options.rotary = &rotary;
    run("ta_kv_pool_create", [&](ta_error* e) { return ta_kv_pool_create(context, &options, &pool, e); });
    ta_plan* plan = nullptr;
    run("ta_plan_create", [&](ta_error* e) { return ta_plan_create(pool, nullptr, &plan, e); });
    ta_seq seq = 0;
    run("ta_seq_create", [&](ta_error* e) { return ta_seq_create(pool, &seq, e); });

    const auto step = [&](ta_seq of, int32_t n) {
        run("ta_plan_begin", [&](ta_error* e) { return ta_plan_begin(plan, 1, &of, &n, nullptr, nullptr, e); });
        Tensor k(random.normals(n * kHeads * head_dim), n, kHeads, head_dim),
            v(random.normals(n * kHeads * head_dim), n, kHeads, head_dim);
        Tensor q(random.normals(n * 2 * kHeads * head_dim), n, 2 * kHeads, head_dim), out(n, 2 * kHeads, head_dim);
        run("ta_append", [&](ta_error* e) { return ta_append(plan, 0, k.view(), v.view(), e); });
        run("ta_attend", [&](ta_error* e) { return ta_attend(plan, 0, q.view(), out.view(), nullptr, nullptr, e); });
        run("ta_plan_end", [&](ta_error* e) { return ta_plan_end(plan, nullptr, e); });
    };
    const auto move_all = [&](ta_tier tier) {
        ta_ticket ticket = 0;
        run("ta_seq_move", [&](ta_error* e) { return ta_seq_move(pool, seq, 0, 20, tier, &ticket, e); });
        run("ta_move_wait", [&](ta_error* e) {
            auto info = sized<ta_move_info>();
            return ta_move_wait(pool, ticket, -1, &info, e);
        });
    };
    step(seq, kTokens);
    step(seq, 1);
    run("ta_seq_verify", [&](ta_error* e) { return ta_seq_verify(pool, seq, e); });
    run("ta_seq_save", [&](ta_error* e) { return ta_seq_save(pool, seq, sequence_file.c_str(), nullptr, e); });
    ta_seq loaded = 0, forked = 0, matched = 0;
    std::vector<uint8_t> bytes;
    auto sink = sized<ta_sink>();
    sink.user = &bytes;
    sink.write = [](void* user, uint64_t offset, const void* data, uint64_t n) {
        auto& to = *static_cast<std::vector<uint8_t>*>(user);
        to.resize(std::max<size_t>(to.size(), offset + n));
        std::copy_n(static_cast<const uint8_t*>(data), n, to.data() + offset);
        return 0;
    };
    run("ta_seq_export", [&](ta_error* e) { return ta_seq_export(pool, seq, &sink, nullptr, e); });
    ta_seq imported = 0;
    run("ta_seq_import", [&](ta_error* e) { return ta_seq_import(pool, bytes.data(), bytes.size(), &imported, e); });
    run("ta_seq_release", [&](ta_error* e) { return ta_seq_release(pool, imported, e); });
    run("ta_seq_load", [&](ta_error* e) { return ta_seq_load(pool, sequence_file.c_str(), nullptr, &loaded, e); });
    run("ta_seq_fork", [&](ta_error* e) { return ta_seq_fork(pool, seq, &forked, e); });
    run("ta_seq_truncate", [&](ta_error* e) { return ta_seq_truncate(pool, forked, 70, e); });
    step(forked, 3);  // reopens a block
    run("ta_seq_release", [&](ta_error* e) { return ta_seq_release(pool, forked, e); });
    ta_namespace space = 0;
    auto space_options = sized<ta_namespace_options>();
    space_options.salt[0] = 1;
    const std::vector<uint8_t> keys(20 * 32, 1);
    run("ta_namespace_create", [&](ta_error* e) { return ta_namespace_create(pool, &space_options, &space, e); });
    run("ta_seq_publish", [&](ta_error* e) { return ta_seq_publish(pool, loaded, space, keys.data(), 20, e); });
    run("ta_seq_match_prefix", [&](ta_error* e) {
        int64_t length = 0;
        return ta_seq_match_prefix(pool, space, keys.data(), 20, &matched, &length, e);
    });
    run("ta_kv_pool_descriptor", [&](ta_error* e) {
        int32_t descriptor = 0;
        return ta_kv_pool_descriptor(pool, &descriptor, e);
    });
    for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK, TA_TIER_DEVICE, TA_TIER_DISK}) move_all(tier);
    run("ta_move_take_finished", [&](ta_error* e) {
        ta_ticket tickets[8];
        uint64_t n = 0;
        return ta_move_take_finished(pool, tickets, 8, &n, e);
    });
    run("ta_namespace_flush", [&](ta_error* e) { return ta_namespace_flush(pool, space, e); });
    run("ta_seq_suspend", [&](ta_error* e) {
        ta_ticket ticket = 0;
        auto info = sized<ta_move_info>();
        const ta_status status = ta_seq_suspend(pool, seq, TA_TIER_DISK, &ticket, e);
        return status == TA_OK ? ta_move_wait(pool, ticket, -1, &info, e) : status;
    });
    run("ta_kv_pool_fit", [&](ta_error* e) {
        auto f = sized<ta_fit>();
        return ta_kv_pool_fit(pool, 1, &seq, nullptr, &f, e);
    });
    run("ta_kv_pool_save", [&](ta_error* e) { return ta_kv_pool_save(pool, pool_file.c_str(), 0, nullptr, e); });
    step(seq, 1);  // begin waits for the disk
    move_all(TA_TIER_DISK);
    run("ta_seq_reserve", [&](ta_error* e) { return ta_seq_reserve(pool, seq, 500, 0, e); });  // as this does
    run("ta_seq_residency", [&](ta_error* e) {
        auto r = sized<ta_residency>();
        return ta_seq_residency(pool, seq, &r, e);
    });
    run("ta_seq_retain", [&](ta_error* e) {
        auto r = sized<ta_retention>();
        r.priority = 9;
        return ta_seq_retain(pool, seq, 1, 2, &r, e);
    });
    run("ta_seq_describe_blocks", [&](ta_error* e) {
        ta_block_info blocks[3];
        return ta_seq_describe_blocks(pool, seq, 0, 3, blocks, e);
    });
    run("ta_seq_locate_blocks", [&](ta_error* e) {
        const void* blocks[3];
        return ta_seq_locate_blocks(pool, seq, 0, 3, blocks, e);
    });
    run("ta_kv_pool_get_memory", [&](ta_error* e) {
        auto range = sized<ta_memory_range>();
        return ta_kv_pool_get_memory(pool, TA_TIER_HOST, &range, e);
    });
    run("ta_seq_forget", [&](ta_error* e) {
        ta_seq fork = 0;
        const ta_status status = ta_seq_fork(pool, seq, &fork, e);
        return status == TA_OK ? ta_seq_forget(pool, fork, 0, 64, nullptr, e) : status;
    });
    ta_seq shifted = 0;
    run("ta_seq_fork", [&](ta_error* e) { return ta_seq_fork(pool, seq, &shifted, e); });
    run("ta_seq_shift", [&](ta_error* e) { return ta_seq_shift(pool, shifted, 64, 64, e); });
    step(shifted, 2);
    const int64_t at[] = {64 * 20 + 9, 64 * 20};
    const int32_t no_tokens = 0, two = 2;
    auto at_positions = sized<ta_step_options>();
    at_positions.query_positions = at;
    run("ta_plan_begin", [&](ta_error* e) { return ta_plan_begin(plan, 1, &shifted, &no_tokens, &two, &at_positions, e); });
    run("ta_plan_abort", [&](ta_error* e) { return ta_plan_abort(plan, e); });
    run("ta_kv_pool_write_metrics", [&](ta_error* e) {
        std::vector<char> text(1 << 16);
        uint64_t needed = 0;
        return ta_kv_pool_write_metrics(pool, TA_METRICS_OPENMETRICS, text.data(), text.size(), &needed, e);
    });
    // Two ranks of one context.
    ta_group_id id;
    ta_group* groups[2] = {};
    run("ta_group_make_id", [&](ta_error* e) { return ta_group_make_id(TA_GROUP_LOCAL, &id, e); });
    for (const uint32_t rank : {0u, 1u}) {
        auto group_options = sized<ta_group_options>();
        group_options.kind = TA_GROUP_LOCAL;
        group_options.id = &id;
        group_options.rank = rank;
        group_options.ranks = 2;
        run("ta_group_create", [&](ta_error* e) { return ta_group_create(context, &group_options, &groups[rank], e); });
    }
    for (ta_group* group : groups) {  // each rank learns by itself that all have joined
        run("ta_group_poll", [&](ta_error* e) {
            ta_group_state state = 0;
            return ta_group_poll(group, -1, &state, e);
        });
    }
    run("ta_group_get_info", [&](ta_error* e) {
        auto i = sized<ta_group_info>();
        return ta_group_get_info(groups[0], &i, e);
    });
    run("ta_group_get_peer", [&](ta_error* e) {
        auto p = sized<ta_group_peer>();
        return ta_group_get_peer(groups[0], 1, &p, e);
    });
    run("ta_group_health", [&](ta_error* e) { return ta_group_health(groups[0], e); });
    run("ta_group_descriptor", [&](ta_error* e) {
        int32_t fd = 0;
        return ta_group_descriptor(groups[0], &fd, e);
    });
    ta_ticket sent = 0, got = 0;
    auto transfer = sized<ta_transfer_info>();
    run("ta_seq_send", [&](ta_error* e) { return ta_seq_send(groups[0], pool, seq, 1, 1, TA_SEND_COPY, &sent, e); });
    run("ta_seq_receive", [&](ta_error* e) { return ta_seq_receive(groups[1], pool, 0, 1, &got, e); });
    run("ta_transfer_wait", [&](ta_error* e) { return ta_transfer_wait(groups[1], got, -1, &transfer, e); });
    run("ta_transfer_query", [&](ta_error* e) { return ta_transfer_query(groups[1], got, &transfer, e); });
    run("ta_seq_release", [&](ta_error* e) { return ta_seq_release(pool, transfer.seq, e); });
    run("ta_seq_receive", [&](ta_error* e) { return ta_seq_receive(groups[1], pool, 0, 1, &got, e); });
    run("ta_transfer_cancel", [&](ta_error* e) { return ta_transfer_cancel(groups[1], got, e); });
    run("ta_group_take_finished", [&](ta_error* e) {
        ta_ticket finished[4];
        uint64_t n = 0;
        return ta_group_take_finished(groups[1], finished, 4, &n, e);
    });
    ta_kv_pool* peer = nullptr;
    ta_namespace peer_space = 0;
    run("ta_kv_pool_create", [&](ta_error* e) {
        auto plain = options;
        plain.tiers = nullptr;
        return ta_kv_pool_create(context, &plain, &peer, e);
    });
    run("ta_namespace_create", [&](ta_error* e) { return ta_namespace_create(peer, &space_options, &peer_space, e); });
    run("ta_namespace_join", [&](ta_error* e) { return ta_namespace_join(groups[0], pool, space, e); });
    run("ta_namespace_join", [&](ta_error* e) { return ta_namespace_join(groups[1], peer, peer_space, e); });
    run("ta_namespace_lookup", [&](ta_error* e) {
        ta_prefix_place places[20];
        return ta_namespace_lookup(groups[1], peer, peer_space, keys.data(), 20, -1, places, e);
    });
    run("ta_namespace_fetch",
        [&](ta_error* e) { return ta_namespace_fetch(groups[1], peer, peer_space, keys.data(), 20, &got, e); });
    run("ta_transfer_wait", [&](ta_error* e) { return ta_transfer_wait(groups[1], got, -1, &transfer, e); });
    run("ta_namespace_leave", [&](ta_error* e) { return ta_namespace_leave(groups[1], peer, peer_space, e); });
    run("ta_namespace_hash_keys", [&](ta_error* e) {
        std::vector<uint8_t> hashed(keys.size());
        return ta_namespace_hash_keys(pool, space, keys.data(), 20, hashed.data(), e);
    });
    run("ta_namespace_take_events", [&](ta_error* e) {
        ta_prefix_event events[8];
        uint64_t n = 0;
        return ta_namespace_take_events(pool, space, events, 8, &n, e);
    });
    run("ta_namespace_attach_store", [&](ta_error* e) {
        const ta_store_fn none = [](void*, ta_store_item*, uint64_t, int64_t) { return 0; };
        auto store = sized<ta_block_store>();
        store.exists = store.get = store.put = store.remove = none;
        return ta_namespace_attach_store(pool, space, &store, nullptr, e);
    });
    run("ta_namespace_load", [&](ta_error* e) { return ta_namespace_load(pool, space, keys.data(), 20, &got, e); });
    run("ta_move_wait", [&](ta_error* e) {
        auto i = sized<ta_move_info>();
        return ta_move_wait(pool, got, -1, &i, e);
    });
    run("ta_namespace_flush_store", [&](ta_error* e) { return ta_namespace_flush_store(pool, space, 10000000, nullptr, e); });
    run("ta_namespace_get_store_stats", [&](ta_error* e) {
        auto s = sized<ta_store_stats>();
        return ta_namespace_get_store_stats(pool, space, &s, e);
    });
    run("ta_namespace_detach_store", [&](ta_error* e) { return ta_namespace_detach_store(pool, space, e); });
    run("ta_kv_pool_destroy", [&](ta_error*) { return ta_kv_pool_destroy(peer), TA_OK; });
    run("ta_seq_partition", [&](ta_error* e) {
        auto o = sized<ta_partition_options>();
        ta_seq spread = 0;
        const ta_status created = ta_seq_create(pool, &spread, e);
        if (created != TA_OK) return created;
        const ta_status status = ta_seq_partition(groups[0], pool, spread, &o, e);
        ta_seq_release(pool, spread, nullptr);
        return status;
    });
    {
        Tensor q(random.normals(70 * 4 * 64), 70, 4, 64), out(70, 4, 64);
        std::vector<float> lse(70 * 4);
        ta_status elsewhere = TA_OK;
        std::thread other([&] {  // which `run` does not look at
            elsewhere = ta_x_group_attend_dense(groups[1], nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr,
                                                nullptr, nullptr);
        });
        run("ta_x_group_attend_dense", [&](ta_error* e) {
            auto scatter_info = sized<ta_x_scatter_info>();
            return ta_x_group_attend_dense(groups[0], q.view(), q.view(), q.view(), out.view(), lse.data(), nullptr, 0, nullptr,
                                           &scatter_info, e);
        });
        other.join();
        run("ta_x_group_attend_dense elsewhere", [&](ta_error*) { return elsewhere; });
    }
    run("ta_group_abort", [&](ta_error* e) { return ta_group_abort(groups[0], e); });
    for (ta_group* group : groups) run("ta_group_destroy", [&](ta_error*) { return ta_group_destroy(group), TA_OK; });
    run("ta_x_seq_dequantize", [&](ta_error* e) {
        std::vector<float> k(size_t(70 * kHeads * head_dim)), v(k.size());
        return ta_x_seq_dequantize(pool, seq, 0, 0, 70, k.data(), v.data(), e);
    });
    run("a call that fails", [&](ta_error* e) {
        const ta_status s = ta_seq_load(pool, "/nowhere/at/all", nullptr, &loaded, e);
        return s == TA_E_IO ? TA_OK : TA_E_INTERNAL;
    });
    for (const ta_dense_variant variant : {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF, TA_DENSE_DISTR}) {
        const uint32_t d = variant == TA_DENSE_DISTR ? std::min(head_dim, 128u) : head_dim;
        Tensor q(random.normals(300 * 2 * d), 300, 2, d), k(random.normals(300 * 2 * d), 300, 2, d), out(300, 2, d);
        auto dense = sized<ta_dense_options>();
        dense.variant = variant;
        run("ta_attend_dense", [&](ta_error* e) {
            return ta_attend_dense(context, q.view(), k.view(), k.view(), out.view(), nullptr, &dense, e);
        });
    }
    {
        Tensor a(random.normals(300 * 2 * head_dim), 300, 2, head_dim), out(300, 2, head_dim);
        const std::vector<ta_tensor> parts(64, *a.view());
        const std::vector<float> lse(300 * 2, 1.0f);
        const std::vector<const float*> lses(64, lse.data());
        run("ta_merge_states", [&](ta_error* e) {
            return ta_merge_states(context, 64, parts.data(), lses.data(), out.view(), nullptr, nullptr, e);
        });
    }
    ta_calibrator* calibrator = nullptr;
    run("ta_calibrator_create",
        [&](ta_error* e) { return ta_calibrator_create(context, 1, kHeads, head_dim, &calibrator, e); });
    run("ta_calibrator_destroy", [&](ta_error*) { return ta_calibrator_destroy(calibrator), TA_OK; });
    calibrator = nullptr;
    run("ta_calibrator_create_for", [&](ta_error* e) {
        const ta_kv_pool_options shape = pool_options(1, kHeads, head_dim);
        return ta_calibrator_create_for(context, &shape, &calibrator, e);
    });
    run("ta_calibrator_observe", [&](ta_error* e) {
        Tensor k(random.normals(64 * kHeads * head_dim), 64, kHeads, head_dim);
        return ta_calibrator_observe(calibrator, 0, k.view(), k.view(), e);
    });
    run("ta_calibrator_finish", [&](ta_error* e) {
        std::vector<uint8_t> k_bits(kHeads), v_bits(kHeads);
        return ta_calibrator_finish(calibrator, 1, k_bits.data(), v_bits.data(), nullptr, nullptr, e);
    });
    run("ta_calibrator_choose", [&](ta_error* e) {
        std::vector<uint8_t> k_bits(kHeads), v_bits(kHeads);
        const std::vector<float> costs(3 * kHeads);
        return ta_calibrator_choose(calibrator, costs.data(), costs.data(), 1 << 30, k_bits.data(), v_bits.data(), e);
    });
    run("ta_calibrator_destroy", [&](ta_error*) { return ta_calibrator_destroy(calibrator), TA_OK; });
    run("ta_plan_destroy", [&](ta_error*) { return ta_plan_destroy(plan), TA_OK; });
    run("ta_kv_pool_destroy", [&](ta_error*) { return ta_kv_pool_destroy(pool), TA_OK; });
    pool = nullptr;
    run("ta_kv_pool_create", [&](ta_error* e) { return ta_kv_pool_create(context, &options, &pool, e); });
    run("ta_kv_pool_load", [&](ta_error* e) {
        std::vector<ta_loaded_seq> seqs(16);
        uint64_t n = 0;
        return ta_kv_pool_load(pool, pool_file.c_str(), nullptr, seqs.data(), seqs.size(), &n, e);
    });
    run("ta_kv_pool_destroy", [&](ta_error*) { return ta_kv_pool_destroy(pool), TA_OK; });
    run("ta_context_destroy", [&](ta_error*) { return ta_context_destroy(context), TA_OK; });
}

}  // namespace ta::testing
