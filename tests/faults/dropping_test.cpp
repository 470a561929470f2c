// Pools that drop blocks while something fails: sequences grow beyond all budgets, and at most one fault is set. Which blocks
// go may depend on the fault, so there is no pool to compare with to the bit. The remaining blocks are judged alone: attention is
// exact over them, their values are those of a pool that has room for everything, and missing blocks are ones that a begin may have
// dropped. TA_FAULTS_ALL=1 takes every operation, with io_uring and without. Lines that begin with "drop-matrix" are the table
// in docs/testing.md.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "faults/dropping_life.h"

namespace ta::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSlower = 3;
#else
constexpr uint64_t kSlower = 1;
#endif

constexpr DropShape kShapes[] = {
    {"Device", 0, 0, TA_EVICT_ATTENTION, false},       {"DeviceAndDisk", 0, 5, TA_EVICT_LRU, false},
    {"AllTiers", 6, 5, TA_EVICT_LRU, false},           {"DeviceAndHostOfAGpu", 6, 0, TA_EVICT_LRU, true},
    {"DeviceAndDiskOfAGpu", 0, 5, TA_EVICT_LRU, true}, {"AllTiersOfAGpu", 6, 5, TA_EVICT_ATTENTION, true}};

}  // namespace

// Lengths are as they should be, and what is missing is what was, and with `may_lose` blocks that a begin may drop: full ones
// of one sequence that no other plan has, not its sink, not pinned.
void Life::look(bool may_lose) {
    std::map<uint64_t, int> owners;
    for (const Seq& s : seqs_) {
        for (const uint64_t block : s.blocks) ++owners[block];
    }
    for (const Seq& s : seqs_) {
        if (s.id == 0 || s.held) continue;
        EXPECT_EQ(length(pool_, s.id), s.length);
        uint64_t gone = 0;
        for (uint64_t b = 0; b < s.blocks.size(); ++b) {
            const bool was = missing_.contains(s.blocks[b]), is = is_missing(s.id, b);
            gone += is;
            EXPECT_TRUE(is || !was) << "block " << b << " is back";
            if (was || !is) continue;
            missing_.insert(s.blocks[b]);
            EXPECT_TRUE(may_lose) << "block " << b << " was dropped by a call that drops nothing";
            EXPECT_GE(b, 1u) << "a sink was dropped";
            EXPECT_LT(b, s.full) << "a block of the step was dropped";
            EXPECT_EQ(owners[s.blocks[b]], 1) << "block " << b << " is shared and was dropped";
            EXPECT_FALSE(pinned_.contains(s.blocks[b])) << "block " << b << " is pinned and was dropped";
        }
        if (!shape_) continue;
        const ta_residency r = residency(pool_, s.id);
        EXPECT_EQ(r.dropped_blocks, gone);
        EXPECT_EQ(r.device_blocks + r.host_blocks + r.disk_blocks + gone, s.blocks.size());
    }
    // The members of an open step show what they lack when it ends.
    EXPECT_EQ(dropped(), open_ ? dropped_at_begin_ : missing_.size()) << "the statistics do not agree with what is missing";
}

std::vector<DropReference::Part> Life::parts_of(size_t s, size_t row, int64_t n_new, int64_t queries) {
    const Seq& seq = seqs_[s];
    std::vector<DropReference::Part> parts;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const Stored kv = dequantize(pool_, seq.id, layer, 0, seq.length, kRow);
        const std::vector<float> q = inputs_.of(steps_, layer, n_new, queries).q.values();
        for (uint32_t head = 0; head < kQHeads; ++head) {
            for (int64_t key = 0; key < seq.length; ++key) {
                if (key % 64 == 0) parts.emplace_back();
                double dot = 0;
                for (uint32_t c = 0; c < kDim; ++c)
                    dot += double(q[(row * kQHeads + head) * kDim + c]) * double(kv.k[size_t(key * kRow) + c]);
                const double p = std::exp(dot / 8.0);
                parts.back().sum += p;
                for (uint32_t c = 0; c < kDim; ++c) parts.back().o[c] += p * double(kv.v[size_t(key * kRow) + c]);
            }
        }
    }
    return parts;
}

void Life::expect_attention(const Seq& s, size_t row, const std::vector<float>* out, const std::vector<float>* lse) {
    const std::vector<DropReference::Part>& parts = reference_.queries.at(queries_++);
    ASSERT_EQ(parts.size(), kLayers * kQHeads * s.blocks.size());
    auto part = parts.begin();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        double error = 0, norm = 0;
        for (size_t at = row * kQHeads; at < (row + 1) * kQHeads; ++at) {
            DropReference::Part rest;
            for (const uint64_t block : s.blocks) {
                const DropReference::Part& p = *part++;
                if (missing_.contains(block)) continue;
                rest.sum += p.sum;
                for (uint32_t c = 0; c < kDim; ++c) rest.o[c] += p.o[c];
            }
            EXPECT_NEAR(double(lse[layer][at]), std::log(rest.sum), 0.02) << "query " << queries_ - 1 << ", layer " << layer;
            for (uint32_t c = 0; c < kDim; ++c) {
                const double want = rest.o[c] / rest.sum, got = double(out[layer][at * kDim + c]);
                error += (got - want) * (got - want);
                norm += want * want;
            }
        }
        EXPECT_LT(std::sqrt(error / norm), 0.03) << "query " << queries_ - 1 << ", layer " << layer;
    }
}

// Checks that the remaining values are right, that all is released and that nothing stays behind.
void Life::finish() {
    constexpr ta_tier kTiers[] = {TA_TIER_DEVICE, TA_TIER_HOST, TA_TIER_DISK};
    const auto soon = [](auto&& holds) {
        for (const auto end = Clock::now() + kPatience; !holds() && Clock::now() < end;) std::this_thread::sleep_for(200us);
        return holds();
    };
    look(false);
    std::set<uint64_t> seen;
    uint64_t sum = 0, bytes = 0;
    for (size_t i = 0, left = 0; i < seqs_.size(); ++i) {
        const Seq& s = seqs_[i];
        if (s.id == 0) continue;
        if (!shape_) reference_.sequences.emplace_back();
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            if (!shape_) reference_.sequences.back().push_back(dequantize(pool_, s.id, layer, 0, s.length, kRow));
            const Stored& all = reference_.sequences[left][layer];
            for (size_t b = 0; b < s.blocks.size(); ++b) {
                if (missing_.contains(s.blocks[b])) continue;
                const int64_t first = int64_t(b) * 64, n = std::min<int64_t>(64, s.length - first);
                const Stored has = dequantize(pool_, s.id, layer, first, n, kRow);
                EXPECT_EQ(std::memcmp(has.k.data(), all.k.data() + first * kRow, size_t(n * kRow) * 4), 0) << "block " << b;
                EXPECT_EQ(std::memcmp(has.v.data(), all.v.data() + first * kRow, size_t(n * kRow) * 4), 0) << "block " << b;
                sum += layer == 0 && seen.insert(s.blocks[b]).second;
            }
        }
        EXPECT_EQ(ta_seq_verify(pool_.get(), s.id, nullptr), TA_OK);
        ++left;
    }
    const auto in_tiers = [&](uint64_t& blocks) {
        blocks = bytes = 0;
        for (const ta_tier t : kTiers) {
            if (!shape_ || tier_missing(t)) continue;
            const ta_tier_stats st = tier_stats(pool_, t);
            EXPECT_LE(st.bytes_used, st.bytes_budget);
            blocks += st.blocks;
            bytes += st.bytes_used;
        }
        return blocks;
    };
    uint64_t found = 0;
    EXPECT_TRUE(!shape_ || soon([&] { return in_tiers(found) == sum; })) << found << " places for " << sum << " blocks";
    arm();  // giving back needs nothing that may fail
    for (Seq& s : seqs_) {
        if (s.id != 0 && ta_seq_release(pool_.get(), std::exchange(s.id, 0), nullptr) != TA_OK) ADD_FAILURE() << "no release";
    }
    disarm();
    EXPECT_TRUE(soon([&] { return in_tiers(found) == 0 && bytes == 0; })) << bytes << " bytes in tiers at the end";
    device_ = nullptr;
    plan_.reset();
    other_.reset();
    pool_.reset();
    context_.reset();
    EXPECT_EQ(allocator_.bytes_alive(), 0u) << "leaked";
    EXPECT_EQ(allocator_.faults(), 0u) << "the hooks were called with wrong sizes or alignments";
    if (!files_) return;
    EXPECT_TRUE(soon([&] { return files_.use_count() == 1; }));
    EXPECT_TRUE(files_->wait_until_closed()) << "a file stays open";
    EXPECT_EQ(folder_.entries(), 0u) << "a file is left behind";
}

namespace {

void script(Life& life) {
    const size_t a = life.add(), b = life.add();
    life.step({a}, {5 * 64 + 9});
    life.pin(a, 2, 2, true);
    life.step({b}, {3 * 64 + 20});
    const size_t c = life.fork(b);
    life.step({c}, {2 * 64});
    life.pin(c, 3, 2, true);
    for (int i = 0; i < 3; ++i) {
        life.step({a}, {2 * 64 + i});
        life.step({b}, {100});
    }
    life.refuse(a);
    life.pin(c, 3, 2, false);  // the oldest, but held
    life.hold(c);
    life.step({a, b}, {70, 64});
    life.let_go(c);
    life.release(c);
    life.step({b}, {5 * 64});
    const size_t d = life.fork(a);
    life.step({d}, {64});
    life.truncate(a, 4);
    life.step({a}, {3 * 64 + 1});
    life.release(d);
    life.pin(a, 2, 2, false);
    for (const ta_tier t : {TA_TIER_HOST, TA_TIER_DISK}) life.move(a, t);
    life.step({a, b}, {2 * 64, 2 * 64});
    life.verify(a);
    life.verify(b);
}

class DroppingFaults : public ::testing::TestWithParam<int> {
  protected:
    DroppingFaults() {
        Life plain(nullptr, inputs_, reference_, {}, false);
        script(plain);
        plain.finish();
    }
    struct Sums {
        uint64_t operations = 0, runs = 0, failures = 0, lost_by_failures = 0, lost = 0;
    };
    const DropShape& shape() const { return kShapes[GetParam()]; }

    uint64_t run(const FaultPlan& fault, bool uring, Sums& sums) {
        SCOPED_TRACE(::testing::Message() << shape().name << ": " << name_of(fault.kind) << " at operation " << fault.at
                                          << (fault.forever ? " and all after it" : "") << (uring ? "" : ", no io_uring"));
        Life life(&shape(), inputs_, reference_, fault, uring);
        try {
            script(life);
            life.finish();
        } catch (const std::exception& e) {
            ADD_FAILURE() << e.what();
        }
        // Without tiers below there is one order in which blocks go, and no room is made twice.
        if (shape().host_blocks + shape().disk_blocks == 0) {
            if (fault.kind == FaultKind::kNone) reference_.missing = life.missing();
            EXPECT_EQ(life.missing(), reference_.missing);
        }
        EXPECT_GT(life.missing().size(), 5u);
        ++sums.runs;
        sums.failures += life.failures();
        sums.lost += life.missing().size();
        sums.lost_by_failures += life.lost_by_failures();
        return life.operations();
    }
    void sweep(FaultKind kind, uint64_t tries, bool uring) {
        Sums clean, sums;
        for (int i = 0; i < 2; ++i) sums.operations = std::max(sums.operations, run({.counts = kind}, uring, clean));
        ASSERT_EQ(clean.failures, 0u) << "something fails by itself";
        const uint64_t stride = std::max<uint64_t>((sums.operations + tries - 1) / tries, 1);
        for (const bool forever : {false, true}) {
            for (uint64_t at = 0; at < sums.operations && !HasFailure(); at += stride)
                run({.kind = kind, .at = at, .forever = forever}, uring, sums);
        }
        std::printf("drop-matrix | %s | %s | %llu/%llu/%llu/%llu | %.1f lost, %.1f\n", shape().name, name_of(kind),
                    (unsigned long long)sums.operations, (unsigned long long)sums.runs, (unsigned long long)sums.failures,
                    (unsigned long long)sums.lost_by_failures, double(clean.lost) / double(clean.runs),
                    double(sums.lost) / double(std::max<uint64_t>(sums.runs, 1)));
        std::fflush(stdout);
    }

    Inputs inputs_;
    DropReference reference_;
};

TEST_P(DroppingFaults, Sweep) {
    const bool all = std::getenv("TA_FAULTS_ALL") != nullptr;
    const char* only = std::getenv("TA_FAULTS_KIND");
    for (const FaultKind kind : {FaultKind::kHooks, FaultKind::kNew, FaultKind::kEio, FaultKind::kEnospc, FaultKind::kShort,
                                 FaultKind::kTorn, FaultKind::kCopyFails, FaultKind::kCopyWrong, FaultKind::kCopyLate}) {
        if (only && std::string(only) != name_of(kind)) continue;
        if ((is_file(kind) && shape().disk_blocks == 0) || (is_copy(kind) && !shape().simulated)) continue;
        const uint64_t tries = all ? UINT64_MAX / 2 : (kind == FaultKind::kNew ? 12 : 6) / kSlower;
        for (const bool uring : {false, true}) {
            if ((all && is_file(kind)) || uring == (int(kind) % 2 == 0)) sweep(kind, tries, uring);
            if (HasFailure()) return;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, DroppingFaults, ::testing::Range(0, int(std::size(kShapes))),
                         [](const auto& i) { return std::string(kShapes[i.param].name); });

}  // namespace
}  // namespace ta::testing
