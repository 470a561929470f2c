// A pool whose layers have shapes of their own, and beside it a pool for each of its layers alone: what that layer gives must be the
// same to the bit. `Rows` is a tensor of the device that computes.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "support/files.h"
#include "support/tiers.h"

namespace ta::testing {

struct UnevenLayer {
    uint32_t kv_heads, head_dim, v_head_dim, group;
    int64_t window;
};
// The first one's shape is the pool's. 48 and 32 channels become 64.
inline const UnevenLayer kUneven[] = {
    {2, 64, 64, 2, 0}, {1, 128, 128, 8, 0}, {4, 48, 32, 1, 100}, {2, 64, 64, 2, 130}, {3, 96, 96, 2, 0}};
inline constexpr uint32_t kUnevenLayers = uint32_t(std::size(kUneven));

inline std::vector<ta_layer_group> uneven_groups() {
    std::vector<ta_layer_group> groups;
    for (uint32_t l = 1; l < kUnevenLayers; ++l) {
        const UnevenLayer& layer = kUneven[l];
        ta_layer_group& g = groups.emplace_back(sized<ta_layer_group>());
        g.first = l;
        g.layers = 1;
        g.window = layer.window;
        if (l == 3) continue;  // the pool's shape
        g.kv_heads = layer.kv_heads;
        g.head_dim = layer.head_dim;
        g.v_head_dim = layer.v_head_dim == layer.head_dim ? 0 : layer.v_head_dim;
    }
    return groups;
}

// `bits`: of K and V, [heads of all layers].
struct UnevenBits {
    std::vector<uint8_t> k, v;
    UnevenBits(uint64_t seed, bool all_8_bits) {
        Random random(seed);
        for (const UnevenLayer& l : kUneven) {
            for (uint32_t h = 0; h < l.kv_heads; ++h) {
                for (std::vector<uint8_t>* map : {&k, &v}) map->push_back(all_8_bits ? 8 : uint8_t(2 << random.below(3)));
            }
        }
    }
};

template <class Rows>
class UnevenTwins {
  public:
    UnevenTwins(const Context& context, bool all_8_bits, const ta_tier_options* tiers = nullptr,
                uint64_t budget = uint64_t{64} << 20, ta_stream stream = nullptr, bool batch_invariant = false)
        : bits_(3, all_8_bits) {
        auto numerics = sized<ta_numerics>();
        numerics.batch_invariant = batch_invariant ? TA_ON : TA_OFF;
        numerics.hadamard = TA_OFF;  // 96 channels cannot be rotated: no layer of the pool is
        Random random(4);
        size_t first = 0;
        std::vector<float> offsets;
        for (const UnevenLayer& l : kUneven) {
            for (uint32_t c = 0; c < l.kv_heads * l.head_dim; ++c) offsets.push_back(float(random.normal()));
        }
        const float* offset = offsets.data();
        for (const UnevenLayer& l : kUneven) {
            auto options = pool_options(1, l.kv_heads, l.head_dim, 4, &numerics);
            options.v_head_dim = l.v_head_dim;
            options.k_bits = bits_.k.data() + first;
            options.v_bits = bits_.v.data() + first;
            numerics.k_offset = offset;
            alone.push_back(make(context, options, stream));
            first += l.kv_heads;
            offset += l.kv_heads * l.head_dim;
        }
        std::vector<ta_layer_group> groups = uneven_groups();
        auto options = pool_options(kUnevenLayers, kUneven[0].kv_heads, kUneven[0].head_dim, 4, &numerics);
        options.k_bits = bits_.k.data();
        options.v_bits = bits_.v.data();
        options.layer_groups = groups.data();
        options.n_layer_groups = uint32_t(groups.size());
        options.tiers = tiers;
        options.budget_bytes = budget;
        numerics.k_offset = offsets.data();
        uneven = make(context, options, stream);
    }

    size_t add() {
        for_all([](Side& s) { s.seqs.push_back(make_sequence(s.pool)); });
        return uneven.seqs.size() - 1;
    }
    void fork(size_t from) {
        for_all([&](Side& s) { s.seqs.push_back(fork_sequence(s.pool, s.seqs[from])); });
    }
    // False: windows have passed what would be needed.
    bool truncate(size_t s, int64_t n) {
        ta_error err;
        const ta_status cut = ta_seq_truncate(uneven.pool.get(), uneven.seqs[s], n, &err);
        if (cut == TA_E_STATE) return false;
        require(cut, err);
        for (Side& side : alone) require(ta_seq_truncate(side.pool.get(), side.seqs[s], n, &err), err);
        return true;
    }
    void forget(size_t s, int64_t first, int64_t n) {
        forgets_ = true;
        for_all([&](Side& side) {
            ta_error err;
            require(ta_seq_forget(side.pool.get(), side.seqs[s], first, n, nullptr, &err), err);
        });
    }
    // `keep`: of a step of drafts; empty: of none.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, const std::vector<int32_t>& keep = {},
              bool in_order = false) {
        int64_t n = 0;
        for (const int32_t of : n_new) n += of;
        auto how = sized<ta_step_options>();
        how.drafts = keep.empty() ? TA_OFF : TA_ON;
        how.layers_in_order = in_order ? TA_ON : TA_OFF;
        for_all([&](Side& side) {
            std::vector<ta_seq> seqs;
            for (const size_t m : members) seqs.push_back(side.seqs[m]);
            ta_error err;
            require(ta_plan_begin(side.plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), nullptr, &how, &err), err);
        });
        for (uint32_t l = 0; l < kUnevenLayers; ++l) {
            const UnevenLayer& layer = kUneven[l];
            const int64_t heads = layer.kv_heads, q_heads = heads * layer.group;
            const std::vector<float> k = random_.normals(n * heads * layer.head_dim),
                                     v = random_.normals(n * heads * layer.v_head_dim),
                                     q = random_.normals(n * q_heads * layer.head_dim);
            const std::vector<float> a = attend(uneven, l, layer, n, k, v, q, 0);
            const std::vector<float> b = attend(alone[l], 0, layer, n, k, v, q, layer.window);
            ASSERT_TRUE(a == b) << "layer " << l;
        }
        for_all([&](Side& side) {
            ta_error err;
            require(ta_plan_end(side.plan.get(), keep.empty() ? nullptr : keep.data(), &err), err);
        });
    }
    // Compares the stored values where no window has passed them.
    void verify() {
        for (size_t s = 0; s < uneven.seqs.size(); ++s) {
            ta_error err;
            require(ta_seq_verify(uneven.pool.get(), uneven.seqs[s], &err), err);
            const int64_t n = length(uneven.pool, uneven.seqs[s]);
            for (const uint32_t l : {0u, 1u, 4u}) {
                ASSERT_EQ(length(alone[l].pool, alone[l].seqs[s]), n);
                if (n == 0 || forgets_) continue;
                const int64_t row = int64_t(kUneven[l].kv_heads) * kUneven[l].head_dim;
                ASSERT_TRUE(dequantize(uneven.pool, uneven.seqs[s], l, 0, n, row) ==
                            dequantize(alone[l].pool, alone[l].seqs[s], 0, 0, n, row));
            }
        }
    }
    // Steps, forks, truncates and drafts at random; suspends to tier `below`, where there is one, and ways through files between them.
    void walk(int rounds, std::optional<ta_tier> below) {
        for (int i = 0; i < 3; ++i) add();
        step({0}, {70});
        fork(0);
        step({0, 3}, {1, 2});  // of a block that they share
        step({1}, {190});
        ASSERT_TRUE(truncate(1, 120));  // within a closed block
        step({1}, {1});
        const Folder folder;
        for (int round = 0; round < rounds; ++round) {
            const size_t s = random_.below(uneven.seqs.size()), other = random_.below(uneven.seqs.size());
            const auto some = [&] { return int32_t(random_.chance(60) ? random_.between(0, 3) : random_.between(0, 190)); };
            const int what = int(random_.below(8));
            if (what == 3 && uneven.seqs.size() < 5) {
                fork(s);
            } else if (what <= 1) {
                const int64_t n = length(uneven.pool, uneven.seqs[s]);
                truncate(s, random_.between(std::max<int64_t>(0, n - 80), n));
            } else if (what == 4 && round > rounds / 2) {
                const int64_t n = length(uneven.pool, uneven.seqs[s]), at = random_.between(0, n);
                forget(s, at, random_.between(0, n - at));
            } else if (what == 2) {
                const int32_t drafts = some();
                step({s}, {drafts}, {int32_t(random_.between(0, drafts))});
            } else if (s == other) {
                step({s}, {some()}, {}, random_.chance(50));
            } else {
                step({s, other}, {some(), some()}, {}, random_.chance(50));
            }
            if (::testing::Test::HasFatalFailure()) return;
            if (below && round % 3 == 0) suspend(s, *below);
            if (round % 11 == 10 && round < rounds / 2) reload(s, folder.file(std::to_string(round).c_str()));
        }
        verify();
    }

    struct Side {
        KvPool pool;
        Plan plan;
        std::vector<ta_seq> seqs;
    };
    Side uneven;
    std::vector<Side> alone;

  private:
    void suspend(size_t s, ta_tier below) {
        ta_ticket ticket = 0;
        ta_error err;
        require(ta_seq_suspend(uneven.pool.get(), uneven.seqs[s], below, &ticket, &err), err);
    }
    void reload(size_t s, const std::string& path) {
        ta_error err;
        require(ta_seq_save(uneven.pool.get(), uneven.seqs[s], path.c_str(), nullptr, &err), err);
        require(ta_seq_release(uneven.pool.get(), uneven.seqs[s], &err), err);
        require(ta_seq_load(uneven.pool.get(), path.c_str(), nullptr, &uneven.seqs[s], &err), err);
    }
    static Side make(const Context& context, const ta_kv_pool_options& options, ta_stream stream) {
        Side side;
        side.pool = make_pool(context, options);
        side.plan = make_plan(side.pool);
        ta_error err;
        if (stream) require(ta_plan_set_stream(side.plan.get(), stream, &err), err);
        return side;
    }
    template <class F>
    void for_all(F f) {
        f(uneven);
        for (Side& side : alone) f(side);
    }
    std::vector<float> attend(Side& side, uint32_t l, const UnevenLayer& layer, int64_t n, const std::vector<float>& k,
                              const std::vector<float>& v, const std::vector<float>& q, int64_t window) {
        const int64_t heads = layer.kv_heads, q_heads = heads * layer.group;
        Rows rows_k(k, n, heads, layer.head_dim), rows_v(v, n, heads, layer.v_head_dim), rows_q(q, n, q_heads, layer.head_dim),
            out(n, q_heads, layer.v_head_dim);
        auto options = sized<ta_attend_options>();
        options.window = window;
        ta_error err;
        require(ta_append(side.plan.get(), l, rows_k.view(), rows_v.view(), &err), err);
        require(ta_attend(side.plan.get(), l, rows_q.view(), out.view(), nullptr, &options, &err), err);
        return out.values();
    }

    UnevenBits bits_;
    Random random_{5};
    bool forgets_ = false;  // some tokens: what is stored cannot be compared as a whole
};

}  // namespace ta::testing
