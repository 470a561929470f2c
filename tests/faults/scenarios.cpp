#include "faults/scenarios.h"

namespace ta::testing {
namespace {

void nothing(World&) {}

void one_sequence(World& w) {
    w.make_pool();
    w.add();
}

// Ten full blocks and a bit, where the pool wants them.
void grown(World& w) {
    one_sequence(w);
    w.step({0}, {300});
    w.step({0}, {350});
}
// Half of it on disk, a third in host memory.
void in_three_tiers(World& w) {
    grown(w);
    w.move(0, 1, 5, TA_TIER_DISK);
    w.move(0, 6, 3, TA_TIER_HOST);
}

void create(World& w) {
    w.make_pool();
    const size_t a = w.add();
    w.step({a}, {200});
    w.move(a, 1, 2, TA_TIER_DISK);
    w.step({a}, {1});
}

void grow_past_device(World& w) {
    for (int i = 0; i < 4; ++i) w.step({0}, {200});
    w.step({0}, {1});
    w.verify(0);
    w.move(0, 1, 5, TA_TIER_HOST);
    w.move(0, 3, 5, TA_TIER_DISK);
    w.step({0}, {1});
}

// Windows pass blocks wherever they are, sequences with such blocks move, fork and sleep.
void pass_and_move(World& w) {
    const size_t b = w.add();
    for (int i = 0; i < 3; ++i) w.step({0, b}, {1, 150});
    w.verify(b);
    w.move(b, 1, 4, TA_TIER_HOST);
    const size_t c = w.fork(b);
    w.step({b, c}, {64, 3});
    w.suspend(b, TA_TIER_DISK);
    w.step({0, b}, {130, 1});
    w.save_and_load(b);
    w.verify(b);
}

void decode_while_evicting(World& w) {
    const size_t b = w.add();
    for (int i = 0; i < 4; ++i) w.step({0, b}, {1, 150});
    w.step({0, b}, {64, 1});
    w.move(b, 1, 4, TA_TIER_HOST);
    w.move(b, 1, 4, TA_TIER_DISK);
    w.step({0, b}, {1, 1});
}

void spill_to_disk(World& w) {
    const size_t b = w.add(), c = w.add();
    w.step({0}, {260});
    w.step({b}, {400});
    w.step({c}, {400});
    w.step({b}, {130});
    w.verify(0);
    w.verify(b);
}

void promote_for_step(World& w) {
    w.step({0}, {1});
    w.move(0, 1, 8, TA_TIER_DISK);
    w.step({0}, {70});
}

void prefetch_then_step(World& w) {
    w.prefetch(0, 1, 3, true);
    w.prefetch(0, 4, 6, false);
    w.step({0}, {1});
    w.step({0}, {1});
}

void move_and_cancel(World& w) {
    w.move_and_cancel(0, 1, 8, TA_TIER_DEVICE);
    w.move_and_cancel(0, 1, 9, TA_TIER_HOST);
    w.move_and_cancel(0, 1, 9, TA_TIER_DISK);
    w.step({0}, {1});
    w.move(0, 2, 6, TA_TIER_DEVICE);
    w.verify(0);
}

void fork_then_truncate(World& w) {
    const size_t f = w.fork(0), g = w.fork(0);
    w.truncate(f, 64 * 4 + 10);  // into a block on disk
    w.truncate(g, 64 * 2);
    w.step({f, g}, {70, 3});
    w.truncate(0, 64 * 7 + 1);  // into one in host memory
    w.move(0, 1, 3, TA_TIER_DEVICE);
    w.step({0}, {65});
    w.release(f);
    w.step({g, 0}, {64, 1});
}

void pin_under_pressure(World& w) {
    w.pin(0, 1, 4, true);
    const size_t b = w.add();
    for (int i = 0; i < 3; ++i) w.step({b}, {190});
    EXPECT_TRUE(!w.tiered() || w.residency(0).device_blocks >= 4) << "a pinned block has left";
    w.pin(0, 1, 4, false);
    w.retain(0, 1, 2, 60);
    w.retain(b, 1, 3, 5);
    w.move(0, 1, 6, TA_TIER_DISK);
    w.step({0, b}, {1, 200});
}

void suspend_and_wake(World& w) {
    w.suspend(0, TA_TIER_HOST);
    w.step({0}, {3});
    const size_t b = w.add();
    w.step({b}, {70});
    w.suspend(b, TA_TIER_DISK);
    w.suspend(0, TA_TIER_DISK);
    w.verify(0);
    w.step({0, b}, {1, 64});
    w.reserve(b, 150);
    w.step({0}, {130});
    w.step({b}, {100});
    w.step({b}, {50});
    w.forget(b, 60, 150);  // some of it below the device
    w.suspend(b, TA_TIER_HOST);
    w.step({b}, {70});
    w.shift(b, 192, 64);
    w.suspend(b, TA_TIER_DISK);
    w.step({b}, {3});
    w.suspend(0, TA_TIER_DISK);
    w.step({0}, {2}, 40);
    w.verify(b);
}

void save_and_load(World& w) {
    const size_t copy = w.save_and_load(0);
    w.step({copy}, {2});
    w.step({0, copy}, {64, 1});
}

void send_and_receive(World& w) {
    const size_t copy = w.send_and_receive(0);
    w.step({copy}, {2});
    w.step({0, copy}, {64, 1});
}

// A prefix whose blocks lie in all tiers goes to another pool.
void fetch_prefix(World& w) {
    w.make_space(1);
    w.publish(0, 1, 7, 9);
    w.fetch(1, 7, 9);
    w.step({0}, {1});
}

void store_and_load(World& w) {
    w.make_space(1);
    w.publish(0, 1, 7, 9);
    w.pass_through_store(1, 7, 9);
    w.step({0}, {1});
}

void partitioned_steps(World& w) {
    w.partition(0);
    w.step({0}, {130});
    w.truncate(0, 640);
    w.step({0}, {1});
}

void no_space_and_recovery(World& w) {
    // The host tier is full and the disk takes nothing: steps that need room fail until it does.
    if (FaultyFiles* files = w.files(); files && !w.has_file_fault() && !w.on_device()) {
        files->break_now(Fault::kEnospc, true);
        w.refuse_step({0}, {900});
        files->heal();
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    const size_t b = w.add();
    w.step({b}, {450});
    w.step({0}, {330});
    w.step({b}, {1});
}

void close_with_moves_in_flight(World& w) {
    w.step({0}, {1});
    w.move_in_background(0, 1, 8, TA_TIER_DISK);
    w.move_in_background(0, 1, 8, TA_TIER_DEVICE);
    w.move_in_background(0, 5, 4, TA_TIER_HOST);
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    w.close_pool();
}

// Several tickets up and down while steps go on.
void both_ways_at_once(World& w) {
    const size_t b = w.add();
    w.step({b}, {330});
    w.move(b, 1, 4, TA_TIER_HOST);
    w.move_in_background(0, 1, 5, TA_TIER_DEVICE);
    w.move_in_background(b, 1, 4, TA_TIER_DEVICE);
    w.move_in_background(0, 6, 4, TA_TIER_HOST);
    w.step({b}, {1});
    w.move_in_background(b, 1, 4, TA_TIER_DISK);
    w.move_in_background(0, 1, 4, TA_TIER_HOST);
    w.step({0}, {1});
    w.settle();
    w.step({0, b}, {64, 1});
}

void background_watermarks(World& w) {
    for (int i = 0; i < 4; ++i) w.step({0}, {128});
    w.settle();
    const size_t b = w.add();
    for (int i = 0; i < 3; ++i) w.step({0, b}, {1, 130});
    w.settle();
    w.step({0, b}, {1, 1});
}

// A block that is damaged in the tier where it lies is not served; without its tail the sequence goes on.
void corrupt_block(World& w) {
    const size_t f = w.fork(0);
    w.truncate(f, 64 * 3);
    if (w.tiered()) {
        w.heal_for([&] {
            w.damage(0, 4);  // on disk
            w.refuse_move(0, 4, TA_TIER_HOST);
            w.refuse_step({0}, {1});
        });
    }
    w.truncate(0, 64 * 4);
    w.step({0}, {300});
    w.move(0, 1, 3, TA_TIER_HOST);
    if (w.tiered()) {
        w.heal_for([&] {
            w.damage(0, 5);  // where it is read in place
            w.refuse_move(0, 5, w.block(0, 5)->tier() == TierKind::kHost ? TA_TIER_DISK : TA_TIER_HOST);
        });
    }
    w.truncate(0, 64 * 5);
    w.move(0, 1, 4, TA_TIER_DISK);
    w.step({0, f}, {64, 1});
}

// Two namespaces, blocks in all tiers that sequences share with them, copies on write.
void publish_and_match(World& w) {
    w.make_space(1);
    w.make_space(2);
    w.publish(0, 1, 7, 9);
    const size_t a = w.match(1, 7, 10), none = w.match(2, 7, 9);
    w.step({a, none}, {70, 66});
    w.publish(a, 1, 7, 10);
    w.publish(none, 2, 8, 1);
    const size_t b = w.match(1, 7, 10);
    w.truncate(b, 64 * 5 + 3);
    w.move(0, 1, 4, TA_TIER_DISK);
    w.step({b}, {64});
    w.release(a);
    w.end_space(1);
    w.step({0, b}, {1, 1});
    w.make_space(1);
    const size_t c = w.add();
    w.step({c}, {200});
    w.publish(c, 1, 7, 3);
    w.step({w.match(1, 7, 9)}, {1});
}

// Blocks that only the namespace has leave the device before all others, are found below, and are dropped where the quota needs it.
void prefixes_without_users(World& w) {
    w.make_space(1);
    w.publish(0, 1, 7, 10);
    w.release(0);
    const size_t b = w.add();
    w.step({b}, {300});
    w.step({b}, {140});
    w.make_space(2, 4);
    w.publish(b, 2, 1, 4);
    const size_t c = w.match(1, 7, 10);
    w.step({c}, {5});
    w.truncate(c, 64 * 6);
    const size_t d = w.add();
    w.step({d}, {256});
    w.refuse_publish(d, 2, 3, 4);
    w.release(b);
    w.publish(d, 2, 3, 4);
    w.release(d);
    w.step({w.match(2, 3, 4), w.match(2, 1, 4)}, {1, 65});
    w.step({c}, {1});
}

void save_and_load_pool(World& w) {
    const size_t f = w.fork(0), empty = w.add();
    w.truncate(f, 64 * 4 + 10);
    w.make_space(1);
    w.publish(0, 1, 7, 10);
    w.save_pool();
    w.end_space(1);
    const size_t copies = w.load_pool();
    w.make_space(1);
    w.step({copies + f, copies + empty}, {2, 1});
    w.release(copies);
    w.step({w.match(1, 7, 10), 0}, {1, 1});
}

// Flushed blocks are in the next pool, and in the one after that.
void persistent_disk(World& w) {
    w.make_pool();
    w.make_space(1);
    const size_t a = w.add(), b = w.add();
    w.step({a}, {330});
    w.move(a, 1, 2, TA_TIER_DISK);
    w.publish(a, 1, 7, 5);
    w.move(a, 3, 2, TA_TIER_DISK);
    w.step({b}, {130});
    w.publish(b, 1, 8, 2);
    w.flush(1);
    w.reopen();
    w.make_space(1);
    const size_t c = w.match(1, 7, 5);
    w.step({c}, {70});
    w.publish(c, 1, 7, 6);
    w.flush(1);
    w.reopen();
    w.make_space(1);
    const size_t d = w.match(1, 7, 6), e = w.match(1, 8, 2);
    w.step({d, e}, {1, 64});
    w.end_space(1);
    w.step({d}, {1});
}

constexpr Scenario kScenarios[] = {
    {"Create", {.host_blocks = 12, .disk_blocks = 24}, nothing, create},
    {"GrowPastDevice", {.device_blocks = 8, .host_blocks = 40, .disk_blocks = 24}, one_sequence, grow_past_device},
    {"PassAndMove", {.device_blocks = 14, .host_blocks = 24, .disk_blocks = 40, .window = 100}, grown, pass_and_move},
    {"DecodeWhileEvicting", {.device_blocks = 10, .host_blocks = 16, .disk_blocks = 40}, grown, decode_while_evicting},
    {"SpillToDisk", {.device_blocks = 9, .host_blocks = 4, .disk_blocks = 40}, one_sequence, spill_to_disk},
    {"GrowThroughPeer",
     {.device_blocks = 8, .host_blocks = 12, .disk_blocks = 24, .peer_blocks = 16},
     one_sequence,
     grow_past_device},
    {"SpillFromPeer", {.device_blocks = 9, .disk_blocks = 40, .peer_blocks = 4}, one_sequence, spill_to_disk},
    {"PromoteForStep", {.device_blocks = 12, .host_blocks = 12, .disk_blocks = 24}, in_three_tiers, promote_for_step},
    {"PrefetchThenStep", {.device_blocks = 12, .host_blocks = 16, .disk_blocks = 24}, in_three_tiers, prefetch_then_step},
    {"MoveAndCancel", {.device_blocks = 14, .host_blocks = 16, .disk_blocks = 24}, in_three_tiers, move_and_cancel},
    {"ForkThenTruncate", {.device_blocks = 16, .host_blocks = 20, .disk_blocks = 40}, in_three_tiers, fork_then_truncate},
    {"PinUnderPressure", {.device_blocks = 14, .host_blocks = 24, .disk_blocks = 30}, grown, pin_under_pressure},
    {"SuspendAndWake", {.device_blocks = 14, .host_blocks = 20, .disk_blocks = 30}, in_three_tiers, suspend_and_wake},
    {"SaveAndLoad", {.device_blocks = 12, .host_blocks = 20, .disk_blocks = 30}, in_three_tiers, save_and_load},
    {"SendAndReceive", {.device_blocks = 12, .host_blocks = 20, .disk_blocks = 30}, in_three_tiers, send_and_receive},
    {"FetchPrefix", {.device_blocks = 12, .host_blocks = 20, .disk_blocks = 30}, in_three_tiers, fetch_prefix},
    {"StoreAndLoad", {.device_blocks = 12, .host_blocks = 20, .disk_blocks = 30}, in_three_tiers, store_and_load},
    {"PartitionedSteps", {.device_blocks = 12, .host_blocks = 20, .disk_blocks = 30}, in_three_tiers, partitioned_steps},
    {"NoSpaceAndRecovery", {.device_blocks = 10, .host_blocks = 6, .disk_blocks = 30}, grown, no_space_and_recovery},
    {"CloseWithMovesInFlight", {.device_blocks = 14, .host_blocks = 14, .disk_blocks = 24}, grown, close_with_moves_in_flight},
    {"BothWaysAtOnce", {.device_blocks = 20, .host_blocks = 24, .disk_blocks = 40}, in_three_tiers, both_ways_at_once},
    {"BackgroundWatermarks",
     {.device_blocks = 14, .host_blocks = 8, .disk_blocks = 40, .high = 60, .low = 30},
     one_sequence,
     background_watermarks},
    {"CorruptBlock", {.device_blocks = 14, .host_blocks = 16, .disk_blocks = 24}, in_three_tiers, corrupt_block},
    {"PublishAndMatch", {.device_blocks = 16, .host_blocks = 20, .disk_blocks = 40}, in_three_tiers, publish_and_match},
    {"PrefixesWithoutUsers",
     {.device_blocks = 12, .host_blocks = 14, .disk_blocks = 40},
     in_three_tiers,
     prefixes_without_users},
    {"SaveAndLoadPool", {.device_blocks = 14, .host_blocks = 24, .disk_blocks = 40}, in_three_tiers, save_and_load_pool},
    {"PersistentDisk",
     {.device_blocks = 12, .host_blocks = 14, .disk_blocks = 30, .persistent = true},
     nothing,
     persistent_disk},
};

}  // namespace

std::span<const Scenario> scenarios() {
    return kScenarios;
}

}  // namespace ta::testing
