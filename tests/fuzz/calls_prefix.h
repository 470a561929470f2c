// Calls on namespaces and block stores.
#pragma once

#include <map>
#include <string>

#include "tests/fuzz/calls_sequence.h"

namespace ta::fuzz {

class PrefixCalls : public SequenceCalls {
  protected:
    using SequenceCalls::SequenceCalls;

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

    Values stored_;
};

}  // namespace ta::fuzz
