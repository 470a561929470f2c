// Which blocks leave first: what the policies promise through the ABI. Outputs are the same to the bit under all of them.
#include <algorithm>
#include <cmath>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

constexpr ta_eviction kPolicies[] = {TA_EVICT_LRU, TA_EVICT_PRIORITY, TA_EVICT_ATTENTION};

void set_priority(const KvPool& pool, ta_seq seq, int32_t priority) {
    ta_error err;
    require(ta_seq_set_priority(pool.get(), seq, priority, &err), err);
}

TEST(Eviction, OutputsAreThoseOfAPoolThatHasAllBlocksInOnePlace) {
    for (const ta_eviction eviction : kPolicies) {
        SCOPED_TRACE("policy " + std::to_string(eviction));
        Twins twins({.device_blocks = 24,
                     .host_bytes = uint64_t{1} << 20,
                     .disk_bytes = kPlenty,
                     .high = 90,
                     .low = 70,
                     .eviction = eviction},
                    7);
        Random random(uint64_t(eviction) + 1);
        for (int i = 0; i < 4; ++i) set_priority(twins.pool, twins.seqs[twins.add()], int32_t(random.between(-2, 2)));
        for (int i = 0; i < 60; ++i) {
            const size_t a = size_t(random.below(4)), b = (a + 1 + size_t(random.below(3))) % 4;
            if (length(twins.pool, twins.seqs[a]) > 900) twins.truncate(a, random.below(500));
            twins.step({a, b}, {int32_t(random.between(1, 120)), 1});
            if (::testing::Test::HasFatalFailure()) return;
        }
        EXPECT_GT(move_stats(twins.pool).bytes_evicted, 0u);
        twins.verify();
    }
}

// Else what was fetched for a request that is next would be what makes room behind it: no plan has used it for longest.
TEST(Eviction, WhatWasPrefetchedStaysUntilItIsUsed) {
    Twins twins({.device_blocks = 40, .host_bytes = kPlenty, .high = 90, .low = 85});
    const size_t next = twins.add(), idle = twins.add(), now = twins.add();
    for (const size_t s : {next, idle, now}) twins.step({s}, {640});
    move_now(twins.pool, twins.seqs[next], 1, 9, TA_TIER_HOST);
    const auto on_host = [&](size_t s) { return residency(twins.pool, twins.seqs[s]).host_blocks; };
    ASSERT_EQ(on_host(next), 9u);
    ta_error err;
    ta_ticket ticket = 0;
    require(ta_seq_prefetch(twins.pool.get(), twins.seqs[next], 0, 10, &ticket, &err), err);
    auto info = sized<ta_move_info>();
    require(ta_move_wait(twins.pool.get(), ticket, -1, &info, &err), err);
    for (int i = 0; i < 20; ++i) twins.step({now}, {64});
    wait_for_moves(twins.pool);
    EXPECT_EQ(on_host(next), 0u);
    EXPECT_GT(on_host(idle), 3u);
    twins.step({next}, {1});
    const ta_move_stats s = move_stats(twins.pool);
    EXPECT_EQ(s.prefetch_used, 9u);
    EXPECT_EQ(s.prefetch_wasted, 0u);
}

TEST(Eviction, SequencesOfLowPriorityLeaveFirst) {
    Twins twins({.device_blocks = 40, .host_bytes = kPlenty, .eviction = TA_EVICT_PRIORITY});
    const size_t high = twins.add(), low = twins.add(), middle = twins.add();
    set_priority(twins.pool, twins.seqs[high], 5);
    set_priority(twins.pool, twins.seqs[low], -5);
    twins.step({high}, {640});  // the one that was not used for longest
    twins.step({middle}, {640});
    twins.step({low}, {640});
    const auto on_host = [&](size_t s) { return residency(twins.pool, twins.seqs[s]).host_blocks; };
    EXPECT_EQ(on_host(high) + on_host(middle) + on_host(low), 0u);
    const size_t other = twins.add();
    set_priority(twins.pool, twins.seqs[other], 9);
    for (int i = 0; i < 32; ++i) {
        twins.step({other}, {64});
        EXPECT_TRUE(on_host(middle) == 0 || on_host(low) == 9) << "a block of higher priority left before";
        EXPECT_TRUE(on_host(high) == 0 || on_host(middle) == 9) << "a block of higher priority left before";
    }
    EXPECT_EQ(on_host(low), 9u);  // all but the sink
    EXPECT_GT(on_host(low) + on_host(middle), 9u);
    EXPECT_EQ(on_host(other), 0u);

    // A fork has its source's priority, and a change counts at once.
    const size_t fork = twins.fork(high);
    twins.truncate(high, 64);
    set_priority(twins.pool, twins.seqs[fork], -9);
    wait_for_moves(twins.pool);  // what was chosen before
    const uint64_t before = on_host(middle);
    for (int i = 0; i < 6; ++i) {
        twins.step({other}, {64});
        const uint64_t now = on_host(middle);
        EXPECT_TRUE(now == before || on_host(fork) == 9) << "a block of higher priority left before";
    }
    EXPECT_GT(on_host(fork), 0u);
    twins.verify();
}

// The attention that a step's queries gave its blocks, in float64: q as given, keys as stored; the mean over layers, heads and the
// last 16 tokens.
std::vector<double> exact_mass(const KvPool& pool, ta_seq seq, const std::vector<std::vector<float>>& q, int64_t n_query,
                               int64_t window) {
    const int64_t n = length(pool, seq), observed = std::min<int64_t>(n_query, 16);
    std::vector<double> mass(size_t((n + 63) / 64));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const Stored stored = dequantize(pool, seq, layer, 0, n, kRow);
        for (int64_t row = n_query - observed; row < n_query; ++row) {
            const int64_t position = n - n_query + row;
            for (uint32_t head = 0; head < kQHeads; ++head) {
                std::vector<double> p(size_t(n), 0.0);
                double sum = 0.0;
                for (int64_t key = window ? std::max<int64_t>(0, position - window + 1) : 0; key <= position; ++key) {
                    double dot = 0.0;
                    for (uint32_t c = 0; c < kDim; ++c) {
                        dot += double(q[layer][size_t((row * kQHeads + head) * kDim + c)]) *
                               double(stored.k[size_t(key * kRow + head / 2 * kDim + c)]);
                    }
                    sum += p[size_t(key)] = std::exp(dot / 8.0);
                }
                for (int64_t key = 0; key < n; ++key)
                    mass[size_t(key / 64)] += p[size_t(key)] / sum / double(kLayers * kQHeads * observed);
            }
        }
    }
    return mass;
}

std::vector<float> mass_of(const KvPool& pool, ta_seq seq) {
    std::vector<float> mass(size_t((length(pool, seq) + 63) / 64));
    ta_error err;
    require(ta_x_seq_attention(pool.get(), seq, 0, mass.size(), mass.data(), &err), err);
    return mass;
}

TEST(Eviction, AttentionIsWhatTheQueriesGiveToBlocks) {
    for (const ta_cpu_isa isa : available_isas()) {
        SCOPED_TRACE("instruction set " + std::to_string(isa));
        const Context context = make_context(2, isa);
        ta_tier_options tiers;
        auto options = options_of({.eviction = TA_EVICT_ATTENTION}, tiers);
        options.budget_bytes = kPlenty;
        auto tuning = sized<ta_x_tier_tuning>();
        tuning.attention_half_life = 4;
        tiers.tuning = &tuning;
        const KvPool pool = make_pool(context, options);
        const Plan plan = make_plan(pool);
        const ta_seq seq = make_sequence(pool);
        Random random(5);
        // Parts of a sequence in one job and in several, few rows and many, a block that closes.
        struct Case {
            int32_t n_new, n_query;
            int64_t window;
        };
        std::vector<double> want;
        for (const Case& c :
             std::vector<Case>{{200, 200, 0}, {1, 1, 0}, {55, 3, 0}, {1000, 0, 0}, {1, 1, 0}, {0, 2, 100}, {300, 130, 0}}) {
            SCOPED_TRACE(std::to_string(length(pool, seq)) + " tokens, " + std::to_string(c.n_query) + " queries");
            begin(plan, {seq}, {c.n_new}, {c.n_query});
            std::vector<std::vector<float>> q;
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                Tensor k(random.normals(c.n_new * kRow), c.n_new, kHeads, kDim),
                    v(random.normals(c.n_new * kRow), c.n_new, kHeads, kDim);
                q.push_back(random.normals(c.n_query * kQHeads * kDim));
                for (float& x : q.back()) x *= 2.0f;
                Tensor query(q.back(), c.n_query, kQHeads, kDim), out(c.n_query, kQHeads, kDim);
                append(plan, layer, k, v);
                auto attend_options = sized<ta_attend_options>();
                attend_options.window = c.window;
                attend(plan, layer, query, out, nullptr, &attend_options);
            }
            end(plan);
            const std::vector<float> got = mass_of(pool, seq);
            for (double& x : want) x *= std::exp2(-0.25);
            want.resize(got.size());
            if (c.n_query > 0) {
                const std::vector<double> more = exact_mass(pool, seq, q, c.n_query, c.window);
                for (size_t b = 0; b < want.size(); ++b) want[b] += more[b];
            }
            double sum = 0.0, want_sum = 0.0;
            for (size_t b = 0; b < want.size(); ++b) {
                // New tokens were read at 8 bits, and are stored at 4.
                EXPECT_NEAR(double(got[b]), want[b], 0.02 * want[b] + 0.01) << "block " << b;
                sum += double(got[b]);
                want_sum += want[b];
            }
            EXPECT_NEAR(sum, want_sum, 1e-4 * want_sum);
        }
        ta_error err;
        float none;
        EXPECT_EQ(ta_x_seq_attention(pool.get(), seq, 20, 10, &none, &err), TA_E_INVALID) << err.message;
        const KvPool other = make_pool(context, pool_options(kLayers, kHeads, kDim));
        EXPECT_EQ(ta_x_seq_attention(other.get(), make_sequence(other), 0, 0, &none, &err), TA_E_UNSUPPORTED);
    }
}

// Some layers of a sequence, a pool of their own: in each, all queries look at another block.
class LookedAt {
  public:
    LookedAt(const Context& context, const std::vector<uint32_t>& layers, int32_t attention_layers) : layers_(layers) {
        auto tiers = sized<ta_tier_options>();
        tiers.eviction = TA_EVICT_ATTENTION;
        auto tuning = sized<ta_x_tier_tuning>();
        tuning.attention_half_life = 1 << 30;
        tuning.attention_layers = attention_layers;
        tiers.tuning = &tuning;
        auto options = pool_options(uint32_t(layers.size()), kHeads, kDim);
        options.tiers = &tiers;
        pool_ = make_pool(context, options);
        plan_ = make_plan(pool_);
        seq_ = make_sequence(pool_);
        append_all();
    }
    void append_all() {
        begin(plan_, {seq_}, {int32_t(kTokens)}, {0});
        for (uint32_t i = 0; i < layers_.size(); ++i) {
            Random random(layers_[i] + 1);
            std::vector<float> k = random.normals(kTokens * kRow);
            for (int64_t at = 0; at < int64_t(k.size()); ++at)
                k[size_t(at)] = 0.1f * k[size_t(at)] + (at / kRow / 64 == layers_[i] ? 0.6f : 0.0f);
            Tensor key(k, kTokens, kHeads, kDim);
            append(plan_, i, key, key);
        }
        end(plan_);
    }
    // A step that attends to all layers, or to all but one. Returns the attention that each block got.
    std::vector<float> attend_all(bool commit = true, int64_t but = -1) {
        const std::vector<float> before = mass_of(pool_, seq_);
        begin(plan_, {seq_}, {0}, {1});
        Tensor q(std::vector<float>(kQHeads * kDim, 1.0f), 1, kQHeads, kDim), out(1, kQHeads, kDim);
        for (uint32_t i = 0; i < layers_.size(); ++i) {
            if (int64_t(i) != but) attend(plan_, i, q, out);
        }
        ta_error err;
        require(commit ? ta_plan_end(plan_.get(), nullptr, &err) : ta_plan_abort(plan_.get(), &err), err);
        std::vector<float> got = mass_of(pool_, seq_);
        for (size_t b = 0; b < got.size(); ++b) got[b] -= before[b];
        return got;
    }

    static constexpr int64_t kTokens = 5 * 64;

  private:
    const std::vector<uint32_t> layers_;
    KvPool pool_;
    Plan plan_;
    ta_seq seq_ = 0;
};

TEST(Eviction, LayersAreObservedInTurn) {
    const Context context = make_context(2);
    const std::vector<uint32_t> layers = {0, 1, 2, 3, 4};
    std::vector<std::vector<float>> alone;
    for (const uint32_t layer : layers) {
        alone.push_back(LookedAt(context, {layer}, 0).attend_all());
        EXPECT_GT(alone.back()[layer], 0.9f);
    }
    const auto expect_layers = [&](const std::vector<float>& got, const std::vector<size_t>& observed) {
        for (size_t b = 0; b < got.size(); ++b) {
            double want = 0.0;
            for (const size_t layer : observed) want += double(alone[layer][b]) / double(observed.size());
            EXPECT_NEAR(double(got[b]), want, 1e-5) << "block " << b;
        }
    };
    for (const int32_t attention_layers : {0, 1, 2, 3, 5, 6, INT32_MAX}) {
        SCOPED_TRACE("one of " + std::to_string(attention_layers));
        const size_t every = attention_layers == 0 ? 1 : std::min(size_t(attention_layers), layers.size());
        const auto observed = [&](size_t turn) {
            std::vector<size_t> in_turn;
            for (size_t layer = 0; layer < layers.size(); ++layer) {
                if ((layer + turn) % every == 0) in_turn.push_back(layer);
            }
            return in_turn;
        };
        LookedAt pool(context, layers, attention_layers);
        for (size_t turn = 0; turn < 12; ++turn) {
            SCOPED_TRACE("turn " + std::to_string(turn));
            expect_layers(pool.attend_all(), observed(turn));
            // No turns: a step that is done again has the one that it had.
            if (turn % 3 == 1) expect_layers(pool.attend_all(false), {});
        }
        // Of what is observed only what was attended to counts, and without any of it nothing.
        std::vector<size_t> in_turn = observed(12);
        const size_t but = in_turn.back();
        in_turn.pop_back();
        expect_layers(pool.attend_all(true, int64_t(but)), in_turn);
    }
}

// Else a plan whose steps are by turns of one kind and of the other would never observe some layers.
TEST(Eviction, StepsWithoutQueriesAreNoTurns) {
    const Context context = make_context(2);
    LookedAt pool(context, {0, 1}, 2);
    for (size_t turn = 0; turn < 4; ++turn) {
        const std::vector<float> got = pool.attend_all();
        EXPECT_GT(got[turn % 2], 0.1f) << "turn " << turn;
        EXPECT_LT(got[1 - turn % 2], 0.05f) << "turn " << turn;
        pool.append_all();
    }
}

TEST(Eviction, BlocksThatNobodyLooksAtLeaveFirst) {
    ta_tier_options tiers;
    const auto options = options_of({.device_blocks = 24, .host_bytes = kPlenty, .eviction = TA_EVICT_ATTENTION}, tiers);
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, options);
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    // Keys of two blocks point where all queries look, those of the others away from there.
    constexpr int64_t kLooked[] = {5, 11};
    Random random(3);
    for (int64_t done = 0; done < 60 * 64; done += 64) {
        begin(plan, {seq}, {64}, {1});
        const bool looked = std::find(std::begin(kLooked), std::end(kLooked), done / 64) != std::end(kLooked);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            std::vector<float> k = random.normals(64 * kRow), q(kQHeads * kDim, 1.0f);
            for (float& x : k) x = 0.1f * x + (looked ? 0.8f : -0.2f);
            Tensor key(k, 64, kHeads, kDim), v(random.normals(64 * kRow), 64, kHeads, kDim);
            Tensor query(q, 1, kQHeads, kDim), out(1, kQHeads, kDim);
            append(plan, layer, key, v);
            attend(plan, layer, query, out);
        }
        end(plan);
    }
    EXPECT_GT(residency(pool, seq).host_blocks, 15u);
    for (const int64_t b : kLooked) {
        const ta_move_info info = move_now(pool, seq, uint64_t(b), 1, TA_TIER_DEVICE);
        EXPECT_EQ(info.present, 1u) << "block " << b << " left";
    }
    const std::vector<float> mass = mass_of(pool, seq);
    EXPECT_GT(mass[5], 10 * mass[6]);
}

TEST(Eviction, ABeginThatIsRefusedIsNoUse) {
    for (const bool does_not_fit : {false, true}) {
        SCOPED_TRACE(does_not_fit ? "does not fit" : "names a sequence twice");
        ta_tier_options tiers;
        const auto options = options_of({.device_blocks = 10, .drop_coldest = TA_ON, .begin_wait_ms = -1}, tiers);
        const KvPool pool = make_pool(make_context(), options);
        const Plan plan = make_plan(pool);
        const auto step = [&](ta_seq seq, int32_t n) {
            begin(plan, {seq}, {n}, {0});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                Tensor k(std::vector<float>(size_t(n * kRow), 1.0f), n, kHeads, kDim);
                append(plan, layer, k, k);
            }
            end(plan);
        };
        const ta_seq first = make_sequence(pool), second = make_sequence(pool), third = make_sequence(pool);
        step(first, 5 * 64);
        step(second, 5 * 64);
        const ta_tier_stats device = tier_stats(pool, TA_TIER_DEVICE);
        const ta_seq twice[] = {first, first};
        const uint64_t blocks = device.bytes_budget / stats(pool).channel_block_bytes;
        const int32_t n_new[] = {does_not_fit ? int32_t(blocks * 64) : 1, 1};
        EXPECT_EQ(ta_plan_begin(plan.get(), does_not_fit ? 1 : 2, twice, n_new, nullptr, nullptr, nullptr),
                  does_not_fit ? TA_E_TIER_FULL : TA_E_INVALID);
        step(third, int32_t(device.bytes_free / stats(pool).channel_block_bytes + 2) * 64);
        EXPECT_GT(residency(pool, first).dropped_blocks, 0u);
        EXPECT_EQ(residency(pool, second).dropped_blocks, 0u) << "it was used later";
    }
}

TEST(Eviction, WrongValuesAreRefused) {
    const Context context = make_context();
    ta_error err;
    for (const ta_eviction wrong : {-1, 99}) {
        ta_tier_options tiers;
        const auto options = options_of({.host_bytes = kPlenty, .eviction = wrong}, tiers);
        ta_kv_pool* none = nullptr;
        EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID);
        EXPECT_NE(std::string(err.message).find("eviction"), std::string::npos) << err.message;
        EXPECT_EQ(err.argument, 1);
    }
    ta_tier_options tiers;
    auto options = options_of({.host_bytes = kPlenty}, tiers);
    auto tuning = sized<ta_x_tier_tuning>();
    tiers.tuning = &tuning;
    tuning.route = 3;
    ta_kv_pool* none = nullptr;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tuning.route = TA_X_MOVE_ROUTE_AUTO;
    tuning.attention_half_life = -1;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tuning.attention_half_life = 0;
    for (const ta_eviction eviction : kPolicies) {
        tiers.eviction = eviction;
        tuning.attention_layers = -1;
        EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
        EXPECT_NE(std::string(err.message).find("attention_layers is -1"), std::string::npos) << err.message;
        tuning.attention_layers = 7;
        make_pool(context, options);
    }
    tiers.eviction = TA_EVICT_LRU;
    tuning.attention_layers = 0;
    tiers.begin_wait_ms = -2;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tiers.begin_wait_ms = 86'400'001;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tiers.begin_wait_ms = 0;
    tiers.drop_coldest = 3;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    EXPECT_EQ(ta_seq_set_priority(pool.get(), seq, INT32_MIN, &err), TA_OK);  // without tiers it has nothing to do
    EXPECT_EQ(ta_seq_set_priority(pool.get(), seq + 1, 1, &err), TA_E_STALE);
    EXPECT_EQ(ta_seq_set_priority(nullptr, seq, 1, &err), TA_E_INVALID);
    require(ta_kv_pool_close(pool.get(), &err), err);
    EXPECT_EQ(ta_seq_set_priority(pool.get(), seq, 1, &err), TA_E_CLOSED);
}

}  // namespace
}  // namespace ta::testing
