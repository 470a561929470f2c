// Steps of drafts over tokens that are what their seeds say: a token has the same K, V and query whichever step brings it.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "support/handles.h"
#include "support/numbers.h"

namespace ta::testing {

struct DraftToken {
    uint64_t seed;
    int64_t position;
};
using DraftTokens = std::vector<DraftToken>;

// Of each token its parent: random branches, or a chain.
inline std::vector<int32_t> random_tree(Random& random, int32_t n, int chain_percent = 50) {
    std::vector<int32_t> parent;
    for (int32_t t = 0; t < n; ++t) parent.push_back(random.chance(chain_percent) ? t - 1 : int32_t(random.between(-1, t - 1)));
    return parent;
}
inline bool is_chain(const std::vector<int32_t>& parent) {
    for (size_t t = 0; t < parent.size(); ++t) {
        if (parent[t] != int32_t(t) - 1) return false;
    }
    return true;
}
// Token `last` and its ancestors, first to last.
inline std::vector<int32_t> path_to(const std::vector<int32_t>& parent, int32_t last) {
    std::vector<int32_t> path;
    for (int32_t t = last; t >= 0; t = parent[size_t(t)]) path.insert(path.begin(), t);
    return path;
}

struct DraftShape {
    uint32_t layers = 2, kv_heads = 2, head_dim = 64, group = 2;
    bool loud = true;  // some tokens are, and K turns
    uint32_t q_heads() const { return kv_heads * group; }
    int64_t row() const { return int64_t(kv_heads) * head_dim; }
};

// [n, heads, head_dim] of the tokens. `which`: 0 K, 1 V, 2 queries. K of the last layer has a pair of channels that turns with the
// position, and some tokens are far louder than others: both would show where a token that does not stay had a say.
inline std::vector<float> values_of(const DraftShape& s, const DraftTokens& tokens, uint32_t layer, int which) {
    std::vector<float> x;
    const uint32_t heads = which == 2 ? s.q_heads() : s.kv_heads;
    for (const DraftToken& t : tokens) {
        Random random(t.seed * 1000003 + uint64_t(which) * 17 + layer);
        const float size = s.loud && which < 2 && random.chance(15) ? std::exp2(float(random.between(1, 5))) : 1.0f;
        for (uint32_t h = 0; h < heads; ++h) {
            std::vector<float> row = random.normals(s.head_dim, size);
            if (s.loud && which == 0 && layer + 1 == s.layers) {
                const double angle = 0.2 * double(t.position) + h;
                row[3] += 40.0f * float(std::cos(angle));
                row[3 + s.head_dim / 2] += 40.0f * float(std::sin(angle));
            }
            x.insert(x.end(), row.begin(), row.end());
        }
    }
    return x;
}

struct DraftResult {
    std::vector<std::vector<float>> out, lse;  // [layers]
};

// Begins with the members' tokens, appends and attends, and leaves the plan open.
inline DraftResult open_step(const DraftShape& s, const Plan& plan, const std::vector<ta_seq>& seqs,
                             const std::vector<DraftTokens>& tokens, const ta_step_options* how,
                             const ta_attend_options* options = nullptr) {
    std::vector<int32_t> n_new;
    DraftTokens all;
    for (const DraftTokens& of : tokens) {
        n_new.push_back(int32_t(of.size()));
        all.insert(all.end(), of.begin(), of.end());
    }
    ta_error err;
    require(ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), nullptr, how, &err), err);
    DraftResult result;
    for (uint32_t layer = 0; layer < s.layers; ++layer) {
        const auto n = int64_t(all.size());
        Tensor k(values_of(s, all, layer, 0), n, s.kv_heads, s.head_dim),
            v(values_of(s, all, layer, 1), n, s.kv_heads, s.head_dim),
            q(values_of(s, all, layer, 2), n, s.q_heads(), s.head_dim), out(n, s.q_heads(), s.head_dim);
        std::vector<float> lse(size_t(n) * s.q_heads());
        append(plan, layer, k, v);
        attend(plan, layer, q, out, lse.data(), options);
        result.out.push_back(out.values());
        result.lse.push_back(lse);
    }
    return result;
}
inline void end_step(const Plan& plan, const int32_t* keep = nullptr) {
    ta_error err;
    require(ta_plan_end(plan.get(), keep, &err), err);
}

// The same tokens, and the same bytes in blocks that are full.
inline bool same_sequence(const DraftShape& s, const KvPool& a, ta_seq x, const KvPool& b, ta_seq y) {
    const int64_t n = length(a, x);
    if (length(b, y) != n) return false;
    for (uint32_t layer = 0; layer < s.layers && n > 0; ++layer) {
        if (!(dequantize(a, x, layer, 0, n, s.row()) == dequantize(b, y, layer, 0, n, s.row()))) return false;
    }
    const auto bytes_of = [](const KvPool& pool, ta_seq seq, int64_t block) {
        auto info = sized<ta_x_block_info>();
        ta_error err;
        require(ta_x_seq_block(pool.get(), seq, uint64_t(block), &info, nullptr, 0, &err), err);
        std::vector<uint8_t> bytes(info.bytes);
        require(ta_x_seq_block(pool.get(), seq, uint64_t(block), &info, bytes.data(), bytes.size(), &err), err);
        bytes.resize(info.trailer_offset);
        return bytes;
    };
    for (int64_t block = 0; block < n / 64; ++block) {
        if (bytes_of(a, x, block) != bytes_of(b, y, block)) return false;
    }
    return true;
}

}  // namespace ta::testing
