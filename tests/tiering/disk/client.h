// Shared by the tests of the disk tier: a client that collects completions, blocks whose bytes follow from their identity.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tiering/disk/disk.h"

namespace ta::testing {

class Collector final : public DiskClient {
  public:
    ~Collector() override { EXPECT_EQ(pending(), 0u) << "requests were never completed"; }
    void expect(size_t n) {
        std::lock_guard lock(mutex_);
        expected_ += n;
    }
    void on_done(DiskCompletion completion) noexcept override {
        std::lock_guard lock(mutex_);
        const uint64_t tag = completion.tag;
        if (!done_.emplace(tag, std::move(completion)).second) ADD_FAILURE() << "request " << tag << " completed twice";
        ++seen_;
        changed_.notify_all();
    }
    // False when some request takes longer than any deadline of these tests.
    bool wait() {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return seen_ == expected_; });
    }
    size_t pending() {
        std::lock_guard lock(mutex_);
        return expected_ - seen_;
    }
    DiskCompletion take(uint64_t tag) {
        std::lock_guard lock(mutex_);
        auto found = done_.extract(tag);
        if (found.empty()) {
            ADD_FAILURE() << "no completion of request " << tag;
            return {};
        }
        return std::move(found.mapped());
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t expected_ = 0, seen_ = 0;
    std::map<uint64_t, DiskCompletion> done_;
};

// Submits one batch and waits for it. The completions in the order of the requests; empty when submit() failed, with `why`.
inline std::vector<DiskCompletion> run(DiskTier& tier, std::vector<DiskRequest> requests, Status* why = nullptr) {
    Collector collector;
    for (size_t i = 0; i < requests.size(); ++i) requests[i].tag = i;
    collector.expect(requests.size());
    Result<DiskBatch> batch = tier.submit(requests, collector);
    if (!batch.ok()) {
        collector.expect(-requests.size());
        if (why) *why = std::move(batch).status();
        return {};
    }
    EXPECT_TRUE(collector.wait()) << "a request hangs";
    std::vector<DiskCompletion> done;
    for (size_t i = 0; i < requests.size(); ++i) done.push_back(collector.take(i));
    return done;
}

inline BlockIdentity make_identity(uint64_t block_index, uint64_t content_id) {
    BlockIdentity id;
    id.block_index = block_index;
    id.content_id = content_id;
    id.tokens = 64;
    id.key[0] = uint8_t(block_index);
    id.key[31] = uint8_t(content_id);
    return id;
}

// Bytes that differ from block to block and from place to place.
inline std::vector<uint8_t> make_bytes(const BlockIdentity& id, size_t bytes) {
    std::vector<uint8_t> data(bytes);
    uint64_t x = (id.content_id * 0x9e3779b97f4a7c15u) ^ (id.block_index << 32);
    for (size_t i = 0; i < bytes; ++i) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        data[i] = uint8_t(x >> 56);
    }
    return data;
}

inline DiskRequest write_request(Slot slot, const BlockIdentity& id, std::vector<uint8_t>& bytes) {
    DiskRequest r;
    r.kind = DiskRequest::Kind::kWrite;
    r.slot = slot;
    r.bytes = bytes.size();
    r.memory = bytes.data();
    r.identity = id;
    return r;
}
inline DiskRequest read_request(Slot slot, const BlockIdentity& id, std::vector<uint8_t>& bytes) {
    DiskRequest r = write_request(slot, id, bytes);
    r.kind = DiskRequest::Kind::kRead;
    return r;
}

// Both OK, or the test says why not.
inline ::testing::AssertionResult is_ok(const Status& s) {
    if (s.ok()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << std::hex << s.code() << ": " << (s.detail() ? s.detail()->message : "");
}

inline ::testing::AssertionResult write_block(DiskTier& tier, Slot slot, const BlockIdentity& id,
                                              std::vector<BlockKey> more_keys = {}) {
    std::vector<uint8_t> bytes = make_bytes(id, tier.slot_bytes(slot.slot_class));
    DiskRequest request = write_request(slot, id, bytes);
    request.more_keys = std::move(more_keys);
    Status why;
    auto done = run(tier, {request}, &why);
    return is_ok(done.empty() ? why : done[0].status);
}
inline Status read_status(DiskTier& tier, Slot slot, const BlockIdentity& id) {
    const size_t n = tier.slot_bytes(slot.slot_class);
    std::vector<uint8_t> bytes(n, 0xee);
    Status why;
    auto done = run(tier, {read_request(slot, id, bytes)}, &why);
    if (!done.empty()) why = std::move(done[0].status);
    if (why.ok()) {
        EXPECT_TRUE(bytes == make_bytes(id, n)) << "wrong bytes of block " << id.block_index << " content " << id.content_id;
    } else {
        EXPECT_TRUE(bytes == std::vector<uint8_t>(n, 0xee)) << "a failed read left something in memory";
    }
    return why;
}
inline ::testing::AssertionResult read_block(DiskTier& tier, Slot slot, const BlockIdentity& id) {
    return is_ok(read_status(tier, slot, id));
}

}  // namespace ta::testing
