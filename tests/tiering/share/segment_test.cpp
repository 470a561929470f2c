// Memory that the processes of a host share: records of every size arrive in order, what is damaged is seen, and who may join.
#include "tiering/share/segment.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "support/numbers.h"

namespace ta::share {
namespace {

using ta::testing::Random;

uint64_t fresh_name() {
    static Random random(uint64_t(Clock::now().time_since_epoch().count()));
    return random.bits();
}

TEST(Segment, RecordsOfEverySizeArriveInOrder) {
    const uint64_t name = fresh_name();
    const std::shared_ptr<Segment> a = Segment::join(name, 0, 2).take(), b = Segment::join(name, 1, 2).take();
    Ring out = a->ring(0, 1), in = b->ring(0, 1);
    Random random(1);
    std::vector<std::vector<uint8_t>> sent;
    size_t read = 0;
    for (int i = 0; i < 20000; ++i) {
        if (random.chance(60)) {
            std::vector<uint8_t> body(size_t(random.chance(10) ? random.below(int64_t(out.most()) + 1) : random.below(200)));
            for (uint8_t& x : body) x = uint8_t(random.bits());
            const Record record{uint32_t(body.size()), Record::Kind::kPacketEnd, 0, 0};
            if (out.put(record, body.data())) sent.push_back(body);
        } else {
            Record record{};
            const Ring::Next next = in.next(record);
            ASSERT_NE(next, Ring::Next::kDamaged);
            ASSERT_EQ(next == Ring::Next::kRecord, read < sent.size());
            if (next == Ring::Next::kNone) continue;
            std::vector<uint8_t> body(record.bytes);
            in.read(record, body.data());
            in.drop(record);
            ASSERT_TRUE(body == sent[read++]);
        }
    }
    EXPECT_GT(read, 5000u);
    a->remove_name();
}

TEST(Segment, WhatIsDamagedIsSeen) {
    const uint8_t body[64] = {};
    for (const Record& record : {Record{65, Record::Kind::kPacket, 0, 0}, Record{UINT32_MAX, Record::Kind::kBytes, 0, 0},
                                 Record{64, Record::Kind(0), 0, 0}, Record{64, Record::Kind(9), 0, 0}}) {
        std::vector<uint8_t> data(4096);
        Ring::Header header{};
        Ring ring(&header, data.data(), data.size());
        ASSERT_TRUE(ring.put({64, Record::Kind::kPacket, 0, 0}, body));
        std::memcpy(data.data(), &record, sizeof record);
        Record got{};
        EXPECT_EQ(ring.next(got), Ring::Next::kDamaged);
        header.tail = 1;
        header.head = data.size() + 2;  // more than there is
        EXPECT_EQ(ring.next(got), Ring::Next::kDamaged);
    }
}

// Puts records of one packet together.
class Stream final : public StreamTransport {
  public:
    Stream() : StreamTransport(1) {}
    std::optional<Packet> take(const Record& record) {
        return take_record(0, record, [&](uint8_t* to) {
            if (taken == 0) first = to;
            taken += record.bytes;
            std::memset(to, 3, record.bytes);
        });
    }
    uint8_t* first = nullptr;  // where the first record went
    size_t taken = 0;

  private:
    void leaves(uint32_t) override {}
    std::optional<Received> receive(Time) override { return {}; }
    void wake() override {}
    std::optional<bool> has_joined(uint32_t) const override { return {}; }
    bool waits(uint32_t) const override { return false; }
    Result<bool> reaches(uint32_t) override { return false; }
    Route route(uint32_t) override { return {}; }
    Result<bool> all_reach() override { return false; }
    bool all_cpus() const override { return true; }
    Result<Shared> share_memory(std::shared_ptr<uint8_t>, uint64_t) override { return Shared(); }
    Result<std::shared_ptr<uint8_t>> find_memory(uint32_t, const MemoryName&, uint64_t) override {
        return std::shared_ptr<uint8_t>();
    }
};

TEST(Segment, APacketIsAsLongAsItsRecordsSay) {
    const auto part = [](uint32_t bytes, uint64_t all) { return Record{bytes, Record::Kind::kPacket, 0, all}; };
    const auto end = [](uint32_t bytes, uint64_t all) { return Record{bytes, Record::Kind::kPacketEnd, 0, all}; };
    for (const std::vector<Record>& bad : std::vector<std::vector<Record>>{{part(60, 60)},
                                                                           {part(64, 100), part(64, 100)},
                                                                           {part(60, 100), end(64, 100)},
                                                                           {end(64, 100)},
                                                                           {part(64, kMostPacketBytes + 1)}}) {
        Stream stream;
        for (const Record& r : bad) {
            const std::optional<Packet> got = stream.take(r);
            ASSERT_EQ(got.has_value(), &r == &bad.back());
            if (got) {
                EXPECT_TRUE(got->empty());
            }
        }
    }
    Stream stream;
    EXPECT_FALSE(stream.take(part(60, 100)).has_value());
    const std::optional<Packet> whole = stream.take(end(40, 100));
    ASSERT_TRUE(whole.has_value());
    EXPECT_EQ(whole->size(), 100u);
    EXPECT_EQ(whole->capacity(), 100u);
}

// A peer can say that gigabytes follow, and send nothing.
TEST(Segment, APacketTakesNoMemoryBeforeItComes) {
    Stream stream;
    EXPECT_FALSE(stream.take({64, Record::Kind::kPacket, 0, kMostPacketBytes}).has_value());
    EXPECT_LE(malloc_usable_size(stream.first), 2 * kFirstPacketBytes);
    constexpr uint64_t kAll = 9 * kFirstPacketBytes + 1;
    Stream whole;
    std::optional<Packet> packet;
    for (uint64_t left = kAll; left > 0;) {
        const uint64_t n = std::min(left, kFirstPacketBytes / 3);
        left -= n;
        ASSERT_FALSE(packet.has_value());
        packet = whole.take({uint32_t(n), left == 0 ? Record::Kind::kPacketEnd : Record::Kind::kPacket, 0, kAll});
    }
    ASSERT_TRUE(packet.has_value());
    EXPECT_TRUE(*packet == Packet(kAll, 3));
    EXPECT_EQ(packet->capacity(), kAll);
}

TEST(Segment, WhoMayJoin) {
    const uint64_t name = fresh_name();
    std::shared_ptr<Segment> a = Segment::join(name, 0, 2).take();
    a->area(0).state = RankArea::kJoined;
    EXPECT_EQ(std::move(Segment::join(name, 1, 3)).status().code(), TA_E_MISMATCH);
    EXPECT_EQ(std::move(Segment::join(name, 0, 2)).status().code(), TA_E_INVALID);
    std::shared_ptr<Segment> b = Segment::join(name, 1, 2).take();
    EXPECT_TRUE(b->alive(0));
    a.reset();  // as a process that is killed
    EXPECT_FALSE(b->alive(0));
    EXPECT_EQ(std::move(Segment::join(name, 0, 2)).status().code(), TA_E_STALE);
}

}  // namespace
}  // namespace ta::share
