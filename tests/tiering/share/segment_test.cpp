// Memory that the processes of a host share: records of every size arrive in order, what is damaged is seen, and who may join.
#include "tiering/share/segment.h"

#include <gtest/gtest.h>

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
