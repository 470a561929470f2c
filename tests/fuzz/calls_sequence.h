// Calls on sequences and their moves.
#pragma once

#include <filesystem>

#include "tests/fuzz/calls_pool.h"

namespace ta::fuzz {

class SequenceCalls : public PoolCalls {
  protected:
    using PoolCalls::PoolCalls;

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
    ta_status seq_locate_blocks(ta_error* err) {
        uint64_t n = uint64_t(number(1));
        if (n > 64 && n < uint64_t{1} << 40) n = 64;
        auto* const out = items<const void*>(size_t(std::min<uint64_t>(n, 64)));
        return ta_seq_locate_blocks(pool(), id(seqs_), uint64_t(number(0)), n, out, err);
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

  private:
    std::vector<uint8_t> exported_;  // by the last export
};

}  // namespace ta::fuzz
