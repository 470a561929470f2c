// Random walks of a tiered pool, each several times with something failing at a random moment. TA_WALK_SECONDS (4) is the time
// of all walks together, TA_WALK_SEED (1) where they begin; a failure prints the seed.
#include <gtest/gtest.h>

#include "faults/world.h"

namespace ta::testing {
namespace {

constexpr int kMoves = 30, kFaultsOfAWalk = 6;
constexpr int64_t kMostTokens = 64 * 28, kMostOfOne = 64 * 11;

bool has_peer(uint64_t seed) {
    return seed % 2 == 0;
}

// The same calls for the same seed, on any pool.
void walk(World& w, uint64_t seed) {
    Random random(seed);
    std::vector<int64_t> lengths{0};
    std::vector<size_t> alive{0};
    w.add();
    bool pinned = false;
    const auto total = [&] {
        int64_t n = 0;
        for (size_t s : alive) n += lengths[s];
        return n;
    };
    const auto full = [&](size_t s) { return uint64_t(lengths[s] / 64); };
    for (int move = 0; move < kMoves; ++move) {
        const size_t s = random.pick(alive);
        const uint64_t first = full(s) > 1 ? uint64_t(random.between(1, int64_t(full(s)) - 1)) : 0;
        const uint64_t n = first ? uint64_t(random.between(1, int64_t(full(s) - first))) : 0;
        switch (random.below(12)) {
            case 0:
                if (alive.size() >= 5) break;
                alive.push_back(w.add());
                lengths.push_back(0);
                break;
            case 1:
                if (alive.size() >= 5 || total() + lengths[s] > kMostTokens) break;
                alive.push_back(w.fork(s));
                lengths.push_back(lengths[s]);
                break;
            case 2:
                if (s == 0) break;  // it may be pinned
                lengths[s] = random.between(0, lengths[s]);
                w.truncate(s, lengths[s]);
                break;
            case 3:
                if (s == 0) break;
                w.release(s);
                lengths[s] = 0;
                std::erase(alive, s);
                break;
            case 4:
                if (n)
                    w.move_in_background(s, first, n,
                                         ta_tier(random.between(TA_TIER_DEVICE, has_peer(seed) ? TA_TIER_PEER : TA_TIER_DISK)));
                break;
            case 5:
                if (n) w.prefetch(s, first, n, false);
                break;
            case 6:
                if (!pinned && full(0) > 3) {
                    w.pin(0, 1, 2, pinned = true);
                } else if (pinned) {
                    w.pin(0, 1, 2, pinned = false);
                }
                break;
            case 7:
                w.verify(s);
                break;
            case 8:
                if (alive.size() >= 5 || total() + lengths[s] > kMostTokens) break;
                alive.push_back(w.save_and_load(s));
                lengths.push_back(lengths[s]);
                break;
            default: {
                std::vector<size_t> members;
                std::vector<int32_t> n_new;
                int64_t sum = total();
                for (size_t m : alive) {
                    const int64_t more = random.chance(50) ? 1 : random.between(1, 130);
                    if (m != s && random.chance(60)) continue;
                    if (lengths[m] + more > kMostOfOne || sum + more > kMostTokens || members.size() == 2) continue;
                    sum += more;
                    members.push_back(m);
                    n_new.push_back(int32_t(more));
                }
                if (members.empty()) break;
                w.step(members, n_new);
                for (size_t i = 0; i < members.size(); ++i) lengths[members[i]] += n_new[i];
            }
        }
    }
    if (pinned) w.pin(0, 1, 2, false);
}

TEST(FaultWalk, AnythingInAnyOrderWhileSomethingFails) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(number_from("TA_WALK_SECONDS", 4));
    uint64_t seed = number_from("TA_WALK_SEED", 1), walks = 0, failures = 0;
    do {
        // A sequence of a step fits beside what the others have pinned down, wherever moves in the background have put them.
        PoolShape shape{.device_blocks = 34, .host_blocks = 30, .disk_blocks = 70, .high = 70, .low = 40};
        if (has_peer(seed)) shape.peer_blocks = 20;
        Inputs inputs;
        World plain(shape, inputs, nullptr, {}, false, false);
        plain.make_pool();
        walk(plain, seed);
        plain.finish();
        const Reference reference = plain.take_record();
        Random random(seed + 1000000);
        for (int f = 0; f < kFaultsOfAWalk && !HasFailure(); ++f, ++walks) {
            FaultPlan fault;
            fault.kind = FaultKind(random.between(0, kFaultKinds - 1));
            fault.at = uint64_t(random.below(is_memory(fault.kind) ? 300 : 60));
            fault.forever = random.chance(50);
            const bool on_device = is_copy(fault.kind) || random.chance(50), uring = random.chance(50);
            const std::string what = std::string(name_of(fault.kind)) + " at operation " + std::to_string(fault.at) +
                                     (fault.forever ? " and all after it" : "") + (on_device ? ", simulated device" : "");
            SCOPED_TRACE(::testing::Message() << "TA_WALK_SEED=" << seed << ": " << what);
            World world(shape, inputs, &reference, fault, on_device, uring);
            try {
                world.make_pool();
                world.begin_faults();
                walk(world, seed);
            } catch (const std::exception& e) {
                ADD_FAILURE() << e.what();
            }
            world.finish();
            failures += world.failures();
        }
        ++seed;
    } while (!HasFailure() && std::chrono::steady_clock::now() < end);
    std::printf("%llu walks of %d moves, %llu calls failed and were made again; the next seed is %llu\n",
                (unsigned long long)walks, kMoves, (unsigned long long)failures, (unsigned long long)seed);
}

}  // namespace
}  // namespace ta::testing
