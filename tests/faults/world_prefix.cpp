// A World's calls for published prefixes, files of whole pools and a persistent disk tier.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "faults/world.h"
#include "src/api/api.h"

namespace ta::testing {
namespace {

// Of the first n blocks of a text.
std::vector<uint8_t> keys_of(uint64_t text, uint64_t n) {
    std::vector<uint8_t> keys(n * 32, 0);
    for (uint64_t i = 0; i < n; ++i) {
        std::memcpy(keys.data() + i * 32, &text, sizeof text);
        std::memcpy(keys.data() + i * 32 + 8, &i, sizeof i);
    }
    return keys;
}

// A store of a few values, whose memory is there from the start: operator new may fail while it is called.
class SmallStore {
  public:
    SmallStore(size_t values, size_t bytes) : bytes_(bytes), room_(values * bytes), entries_(values) {}
    ta_block_store set() {
        auto s = sized<ta_block_store>();
        s.user = this;
        s.exists = [](void* user, ta_store_item* items, uint64_t n, int64_t) {
            return of(user).each(items, n, &SmallStore::has);
        };
        s.get = [](void* user, ta_store_item* items, uint64_t n, int64_t) { return of(user).each(items, n, &SmallStore::get); };
        s.put = [](void* user, ta_store_item* items, uint64_t n, int64_t) { return of(user).each(items, n, &SmallStore::put); };
        s.remove = [](void* user, ta_store_item* items, uint64_t n, int64_t) {
            return of(user).each(items, n, &SmallStore::drop);
        };
        return s;
    }

  private:
    struct Entry {
        uint8_t key[32];
        size_t bytes = 0;  // 0: free
    };
    using One = bool (SmallStore::*)(ta_store_item&, size_t at);
    static SmallStore& of(void* user) { return *static_cast<SmallStore*>(user); }

    int32_t each(ta_store_item* items, uint64_t n, One one) {
        const std::lock_guard lock(mutex_);
        for (uint64_t i = 0; i < n; ++i) {
            size_t at = 0;
            while (at < entries_.size() && !(entries_[at].bytes > 0 && std::memcmp(entries_[at].key, items[i].key, 32) == 0))
                ++at;
            if ((this->*one)(items[i], at)) items[i].result = TA_STORE_DONE;
        }
        return 0;
    }
    bool has(ta_store_item&, size_t at) { return at < entries_.size(); }
    bool get(ta_store_item& item, size_t at) {
        if (at == entries_.size()) return false;
        if (entries_[at].bytes <= item.bytes) std::memcpy(item.data, room_.data() + at * bytes_, entries_[at].bytes);
        item.bytes = entries_[at].bytes;
        return true;
    }
    bool put(ta_store_item& item, size_t at) {
        if (at == entries_.size()) {
            for (at = 0; at < entries_.size() && entries_[at].bytes > 0;) ++at;
        }
        if (at == entries_.size() || item.bytes > bytes_) return false;
        std::memcpy(entries_[at].key, item.key, 32);
        std::memcpy(room_.data() + at * bytes_, item.data, item.bytes);
        entries_[at].bytes = item.bytes;
        return true;
    }
    bool drop(ta_store_item&, size_t at) { return at < entries_.size() && std::exchange(entries_[at].bytes, 0) > 0; }

    const size_t bytes_;
    std::vector<uint8_t> room_;
    std::vector<Entry> entries_;
    std::mutex mutex_;
};

}  // namespace

void World::add_spaces(Reference::State& state) {
    for (const auto& [salt, space] : spaces_) {
        if (!space.open) continue;
        auto s = sized<ta_namespace_stats>();
        ta_error err;
        require(ta_namespace_get_stats(pool.get(), space.id, &s, &err), err);
        s.hits -= space.before.hits;
        s.misses -= space.before.misses;
        s.published -= space.before.published;
        s.evicted -= space.before.evicted;
        state.spaces.push_back(s);
    }
}

bool World::spaces_match(const Reference::State& now, const Reference::State& expected) const {
    if (now.spaces.size() != expected.spaces.size()) return false;
    for (size_t i = 0; i < now.spaces.size(); ++i) {
        ta_namespace_stats a = now.spaces[i];
        const ta_namespace_stats& b = expected.spaces[i];
        if (fault_.kind != FaultKind::kNone && a.evicted > b.evicted && a.entries + a.evicted == b.entries + b.evicted) {
            a.evicted = b.evicted;  // where a fault leaves no room, what nobody uses goes
            a.entries = b.entries;
            a.bytes = b.bytes;
        }
        if (std::memcmp(&a, &b, sizeof a) != 0) return false;
    }
    return true;
}

std::string World::name_spaces(const Reference::State& state) {
    std::string text;
    for (const ta_namespace_stats& s : state.spaces) {
        text += (text.empty() ? "" : "; ") + std::to_string(s.entries) + " entries of " + std::to_string(s.bytes) + " bytes (" +
                std::to_string(s.bytes_shared) + " shared), " + std::to_string(s.hits) + " hits, " + std::to_string(s.misses) +
                " misses, " + std::to_string(s.published) + " published, " + std::to_string(s.evicted) + " evicted";
    }
    return text;
}

void World::make_space(uint8_t salt, uint64_t quota) {
    static const ta_kv_pool_stats sizes = stats(testing::make_pool(make_context(), pool_options(kLayers, kHeads, kDim)));
    auto options = sized<ta_namespace_options>();
    std::memset(options.salt, salt, sizeof options.salt);
    if (quota) options.quota_bytes = sizes.token_block_bytes + (quota - 1) * sizes.channel_block_bytes;
    Space& space = spaces_[salt];
    call("ta_namespace_create", Kind::kCommon, [&](ta_error* err) -> ta_status {
        if (!tiered() && space.id) return space.open = true, TA_OK;
        ta_namespace id = 0;
        const ta_status status = ta_namespace_create(pool.get(), &options, &id, err);
        if (status == TA_OK) space = {id, true, {}};
        return status;
    });
}

void World::end_space(uint8_t salt) {
    call("ta_namespace_destroy", Kind::kCommon, [&](ta_error* err) {
        const ta_status status = ta_namespace_destroy(pool.get(), spaces_[salt].id, err);
        if (status == TA_OK) spaces_[salt] = {};
        return status;
    });
}

void World::publish(size_t s, uint8_t salt, uint64_t text, uint64_t n) {
    const std::vector<uint8_t> keys = keys_of(text, n);
    call("ta_seq_publish", Kind::kCommon,
         [&](ta_error* err) { return ta_seq_publish(pool.get(), seqs[s], spaces_[salt].id, keys.data(), n, err); });
}

void World::refuse_publish(size_t s, uint8_t salt, uint64_t text, uint64_t n) {
    const std::vector<uint8_t> keys = keys_of(text, n);
    call("ta_seq_publish beyond the quota", Kind::kCommon, [&](ta_error* err) -> ta_status {
        const ta_status status = ta_seq_publish(pool.get(), seqs[s], spaces_[salt].id, keys.data(), n, err);
        EXPECT_NE(status, TA_OK);
        return status == TA_E_LIMIT ? TA_OK : status;
    });
}

size_t World::match(uint8_t salt, uint64_t text, uint64_t n) {
    const std::vector<uint8_t> keys = keys_of(text, n);
    int64_t found = -1;
    call("ta_seq_match_prefix", Kind::kCommon, [&](ta_error* err) {
        ta_seq seq = 0;
        const ta_status status = ta_seq_match_prefix(pool.get(), spaces_[salt].id, keys.data(), n, &seq, &found, err);
        if (status == TA_OK) seqs.push_back(seq);
        return status;
    });
    if (!tiered()) {
        record_.matched.push_back(found);
        return seqs.size() - 1;
    }
    const int64_t expected = reference_->matched.at(matches_++);
    EXPECT_LE(found, expected);
    if (found < expected) throw LostPrefix();
    return seqs.size() - 1;
}

void World::fetch(uint8_t salt, uint64_t text, uint64_t n) {
    const std::vector<uint8_t> keys = keys_of(text, n);
    std::vector<ta_prefix_place> places(n);
    ta_kv_pool_options shape = pool_options(kLayers, kHeads, kDim);
    const ta_kv_pool_stats sizes = stats(pool);
    shape.budget_bytes = 2 * n * sizes.token_block_bytes;
    auto space_options = sized<ta_namespace_options>();
    std::memset(space_options.salt, salt, sizeof space_options.salt);
    call("ta_namespace_fetch", Kind::kCommon, [&](ta_error* err) {
        ta_kv_pool* other = nullptr;
        ta_status status = ta_kv_pool_create(context.get(), &shape, &other, err);
        const KvPool peer(other);
        GroupHandle ranks[2];
        ta_group_id id;
        if (status == TA_OK) status = ta_group_make_id(TA_GROUP_LOCAL, &id, err);
        for (uint32_t r = 0; r < 2 && status == TA_OK; ++r) {
            auto options = group_options(id, r, 2);
            options.silence_ms = 2000;
            options.operation_ms = options.connect_ms = 4000;
            options.staging_bytes = 3 * sizes.channel_block_bytes;
            ta_group* made = nullptr;
            status = ta_group_create(context.get(), &options, &made, err);
            ranks[r].reset(made);
        }
        ta_group_state group_state = 0;
        for (uint32_t r = 0; r < 2 && status == TA_OK; ++r) status = ta_group_poll(ranks[r].get(), -1, &group_state, err);
        ta_namespace there = 0;
        if (status == TA_OK) status = ta_namespace_create(other, &space_options, &there, err);
        if (status == TA_OK) status = ta_namespace_join(ranks[0].get(), pool.get(), spaces_[salt].id, err);
        if (status == TA_OK) status = ta_namespace_join(ranks[1].get(), other, there, err);
        if (status == TA_OK) status = ta_namespace_lookup(ranks[1].get(), other, there, keys.data(), n, -1, places.data(), err);
        ta_ticket ticket = 0;
        if (status == TA_OK) status = ta_namespace_fetch(ranks[1].get(), other, there, keys.data(), n, &ticket, err);
        auto info = sized<ta_transfer_info>();
        if (status == TA_OK) status = ta_transfer_wait(ranks[1].get(), ticket, -1, &info, err);
        if (status != TA_OK) return status;
        EXPECT_TRUE(info.state != TA_MOVE_DONE || info.length == int64_t(64 * n)) << info.length;
        ta_seq seq = 0;
        int64_t length = 0;
        if (info.state == TA_MOVE_DONE) {
            status = ta_seq_match_prefix(other, there, keys.data(), n, &seq, &length, err);
            if (status == TA_OK) status = ta_seq_verify(other, seq, err);
            if (status != TA_OK) return status;
            EXPECT_EQ(length, info.length);
        }
        std::snprintf(err->message, sizeof err->message, "%s", info.reason);
        return err->code = info.status;
    });
}

void World::pass_through_store(uint8_t salt, uint64_t text, uint64_t n) {
    const std::vector<uint8_t> keys = keys_of(text, n);
    const ta_kv_pool_stats sizes = stats(pool);
    ta_kv_pool_options shape = pool_options(kLayers, kHeads, kDim);
    shape.budget_bytes = 2 * n * sizes.token_block_bytes;
    auto space_options = sized<ta_namespace_options>();
    std::memset(space_options.salt, salt, sizeof space_options.salt);
    auto how = sized<ta_store_options>();
    how.batch_bytes = 3 * sizes.token_block_bytes;
    SmallStore store(2 * n, 2 * sizes.token_block_bytes);
    const ta_block_store set = store.set();
    struct Detach {
        ta_kv_pool* pool;
        ta_namespace space;
        ~Detach() { ta_namespace_detach_store(pool, space, nullptr); }
    };
    call("ta_namespace_load", Kind::kCommon, [&](ta_error* err) -> ta_status {
        ta_kv_pool* other = nullptr;
        ta_status status = ta_kv_pool_create(context.get(), &shape, &other, err);
        const KvPool reader(other);
        ta_namespace there = 0;
        if (status == TA_OK) status = ta_namespace_create(other, &space_options, &there, err);
        if (status == TA_OK) status = ta_namespace_attach_store(pool.get(), spaces_[salt].id, &set, &how, err);
        if (status != TA_OK) return status;
        const Detach detach{pool.get(), spaces_[salt].id};
        uint64_t missing = 0, moved = 0;
        ta_ticket ticket = 0;
        auto info = sized<ta_move_info>();
        status = ta_namespace_flush_store(pool.get(), spaces_[salt].id, -1, &missing, err);
        if (status == TA_OK) status = ta_namespace_attach_store(other, there, &set, &how, err);
        if (status == TA_OK) status = ta_namespace_load(other, there, keys.data(), n, &ticket, err);
        if (status == TA_OK) status = ta_move_wait(other, ticket, -1, &info, err);
        if (status != TA_OK) return status;
        ta_seq seq = 0;
        int64_t length = 0;
        if (info.state == TA_MOVE_DONE) {
            // A block that could not be read or put is none that came.
            moved = info.moved;
            EXPECT_TRUE(moved == n || fault_.kind != FaultKind::kNone) << moved << " of " << n << ", " << missing << " missing";
            status = ta_seq_match_prefix(other, there, keys.data(), n, &seq, &length, err);
            if (status == TA_OK && seq) status = ta_seq_verify(other, seq, err);
            if (status != TA_OK) return status;
            EXPECT_EQ(length, int64_t(64 * moved));
            return TA_OK;
        }
        std::snprintf(err->message, sizeof err->message, "the load failed");
        return err->code = info.status;
    });
}

void World::save_pool() {
    // As saving a sequence: it waits for its file as long as the system does.
    const bool faults = faults_on_;
    if (fault_.kind == FaultKind::kStall) {
        disarm();
        faults_on_ = false;
    }
    const std::string path = folder_.file("pool");
    const size_t others = shape_.persistent && tiered() ? 1 : 0;
    call("ta_kv_pool_save", Kind::kCommon, [&](ta_error* err) {
        return saved(ta_kv_pool_save(pool.get(), path.c_str(), TA_SAVE_PUBLISHED, nullptr, err), *err, path);
    });
    EXPECT_EQ(folder_.entries(), 1 + others) << "a save that failed has left something behind";
    saved_ = seqs;
    faults_on_ = faults;
}

size_t World::load_pool() {
    const bool faults = faults_on_;
    if (fault_.kind == FaultKind::kStall) {
        disarm();
        faults_on_ = false;
    }
    const std::string path = folder_.file("pool");
    const size_t first = seqs.size();
    std::vector<ta_loaded_seq> loaded(saved_.size());
    uint64_t n = 0;
    call("ta_kv_pool_load", Kind::kCommon, [&](ta_error* err) {
        const ta_status status = ta_kv_pool_load(pool.get(), path.c_str(), nullptr, loaded.data(), loaded.size(), &n, err);
        for (size_t s = 0; status == TA_OK && s < saved_.size(); ++s) {
            const auto found = std::find_if(loaded.begin(), loaded.begin() + ptrdiff_t(n),
                                            [&](const ta_loaded_seq& l) { return l.saved == saved_[s]; });
            seqs.push_back(saved_[s] ? found->loaded : 0);
        }
        return status;
    });
    EXPECT_EQ(n, uint64_t(std::count_if(saved_.begin(), saved_.end(), [](ta_seq s) { return s != 0; })));
    faults_on_ = faults;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("pool") || name.find(".new-") != std::string::npos) std::filesystem::remove(entry.path());
    }
    return first;
}

void World::flush(uint8_t salt) {
    call("ta_namespace_flush", Kind::kCommon,
         [&](ta_error* err) -> ta_status { return tiered() ? ta_namespace_flush(pool.get(), spaces_[salt].id, err) : TA_OK; });
}

void World::reopen() {
    if (!tiered()) before_ = stats(pool);
    for (auto& [salt, space] : spaces_) {
        if (!tiered() && space.open) {
            space.before = sized<ta_namespace_stats>();
            ta_error err;
            require(ta_namespace_get_stats(pool.get(), space.id, &space.before, &err), err);
        }
        space.open = false;
    }
    for (ta_seq& seq : seqs) {
        ta_error err;
        if (!tiered() && seq) require(ta_seq_release(pool.get(), seq, &err), err);
        seq = 0;
    }
    if (!tiered()) return;
    arm();
    plan.reset();
    pool.reset();
    relax();
    create_pool();
}

}  // namespace ta::testing
