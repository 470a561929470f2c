// Stores that lie: whatever bytes a store gives, a block that is matched is the one that was published.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "abi/store_steps.h"

namespace ta::testing {
namespace {

// Every part of a value, in turn, and all that may be given in its place.
TEST_F(Store, NoWrongByteIsEverTaken) {
    fill();
    const auto good = store.values();
    const std::string first = [&] {  // the key of block 0
        std::string key;
        store.before([&](Function f, ta_store_item* items, uint64_t) {
            if (f == MemoryStore::kGet && key.empty()) key.assign(reinterpret_cast<const char*>(items[0].key), 32);
            return 0;
        });
        EXPECT_EQ(come(), kBlocks);
        store.well();
        return key;
    }();
    const auto refuses = [&](const char* what, const MemoryStore::Value& value) {
        SCOPED_TRACE(what);
        auto values = good;
        values[first] = value;
        store.set(values);
        ta_store_stats seen;
        EXPECT_EQ(come(TA_DEFAULT, &seen), 0u);
        EXPECT_EQ(seen.refused, 1u);
        EXPECT_GT(seen.failed_unix_ms, 0);
        EXPECT_STRNE(seen.failure, "");
        EXPECT_EQ(store.values().count(first), 0u) << "a bad value stays";
        EXPECT_EQ(store.values().size(), kBlocks - 1);
    };
    const MemoryStore::Value& value = good.at(first);
    Random random(3);
    for (int i = 0; i < 400; ++i) {
        MemoryStore::Value bad = value;
        const auto at = size_t(i < 128 ? i : random.below(int64_t(bad.size())));
        bad[at] ^= uint8_t(1 << random.below(8));
        refuses("a flipped bit", bad);
    }
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{129}, value.size() - 1}) {
        refuses("cut", {value.begin(), value.begin() + ptrdiff_t(bytes)});
    }
    MemoryStore::Value longer = value;
    longer.push_back(0);
    refuses("longer", longer);
    longer.resize(value.size() * 3);
    refuses("larger than the room", longer);
    refuses("zeros", MemoryStore::Value(value.size()));
    for (const auto& [key, other] : good) {
        if (key != first) refuses("another key's", other);
    }
    // A value of a pool of another shape, and of another namespace, under this key.
    for (const bool shape : {false, true}) {
        MemoryStore elsewhere;
        fill(elsewhere, make_publisher(options(shape ? 2 : 4), 1, kText, shape ? 1 : 9));
        refuses(shape ? "of another shape" : "of another namespace", elsewhere.values().begin()->second);
    }
    store.set(good);
    EXPECT_EQ(come(), kBlocks);
}

// Whoever can write to the store can make any hash, and no seal.
TEST_F(Store, AForgedSealIsRefused) {
    fill();
    auto values = store.values();
    for (auto& [key, value] : values) {
        constexpr size_t kSeal = 80, kHash = 120;  // docs/FORMAT.md, section 10
        value[kSeal] ^= 1;
        const uint64_t hash = XXH3_64bits(value.data(), kHash);
        std::memcpy(value.data() + kHash, &hash, sizeof hash);
    }
    store.set(values);
    ta_store_stats seen;
    EXPECT_EQ(come(TA_DEFAULT, &seen), 0u);
    EXPECT_EQ(seen.refused, 1u);
    EXPECT_NE(std::string(seen.failure).find("seal"), std::string::npos) << seen.failure;
    store.set(values);
    EXPECT_EQ(come(TA_OFF), kBlocks) << "all else is right";
}

// Refused in the middle: what comes before stays.
TEST_F(Store, ABadBlockInTheMiddleEndsALoad) {
    fill();
    auto values = store.values();
    const auto good = values;
    uint64_t sum = 0;
    for (const auto& [key, value] : good) {
        values = good;
        values[key][value.size() / 2] ^= 1;
        store.set(values);
        ta_store_stats seen;
        const uint64_t n = come(TA_DEFAULT, &seen);
        EXPECT_EQ(seen.refused, 1u);
        EXPECT_EQ(seen.hits, n);
        sum += n;
    }
    EXPECT_EQ(sum, 0u + 1 + 2 + 3 + 4);
}

TEST_F(Store, ValuesWithoutASealAreRefusedWhereSealsAreAskedFor) {
    fill(TA_OFF);
    const auto good = store.values();
    EXPECT_EQ(come(TA_OFF), kBlocks);
    ta_store_stats seen;
    EXPECT_EQ(come(TA_DEFAULT, &seen), 0u);
    EXPECT_EQ(seen.refused, 1u);
    // Damage is found all the same.
    Random random(5);
    for (int i = 0; i < 60; ++i) {
        auto bad = good;
        for (auto& [key, value] : bad) value[size_t(random.below(int64_t(value.size())))] ^= uint8_t(1 << random.below(8));
        store.set(bad);
        EXPECT_EQ(come(TA_OFF, &seen), 0u);
        EXPECT_EQ(seen.refused, 1u);
    }
    // So is the first block of another text.
    MemoryStore elsewhere;
    fill(elsewhere, make_publisher(options(), 1, 8), TA_OFF);
    auto bad = good;
    for (auto& [key, value] : bad) value = elsewhere.values().begin()->second;
    store.set(bad);
    EXPECT_EQ(come(TA_OFF, &seen), 0u);
    EXPECT_EQ(seen.refused, 1u);
}

}  // namespace
}  // namespace ta::testing
