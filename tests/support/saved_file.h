// A file of a sequence or a pool taken apart, changed, and its hashes mended: what FORMAT.md, sections 8 and 9, says of it in
// the tests' own words. Needs xxhash.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace ta::testing {

struct SavedFile {
    struct Record {
        size_t entry;  // where the index speaks of it
        size_t at;     // its header; the slot is behind it
        size_t bytes;  // of both
        uint64_t index;
    };
    static constexpr size_t kEntryBytes = 32, kRecordHeader = 48;

    explicit SavedFile(std::vector<char> file) : bytes(std::move(file)) {
        is_pool = std::memcmp(bytes.data(), "TPOL", 4) == 0;
        header_bytes = is_pool ? 96 : 80;
        const uint64_t blocks = get(is_pool ? 48 : 24);
        index_bytes = size_t(is_pool ? get(72) : blocks * kEntryBytes + 4 * get(32));
        size_t at = header_bytes + index_bytes;
        for (uint64_t i = 0; i < blocks; ++i) {
            const size_t entry = header_bytes + size_t(i) * kEntryBytes;
            const auto kind = size_t(bytes[entry + 28]);
            const size_t n = kRecordHeader + size_t(get((is_pool ? 56 : 40) + 8 * kind));
            records.push_back({entry, at, n, get(entry + 16)});
            at += n;
        }
    }

    uint64_t get(size_t at) const {
        uint64_t value;
        std::memcpy(&value, bytes.data() + at, sizeof value);
        return value;
    }
    void put(size_t at, uint64_t value) { std::memcpy(bytes.data() + at, &value, sizeof value); }
    uint64_t hash(size_t at, size_t n) const { return XXH3_64bits(bytes.data() + at, n); }

    // Makes a record's trailer and hashes, and its hash in the index, fit the bytes of its slot.
    void mend_record(const Record& r, size_t payload, uint32_t layers) {
        const size_t slot = r.at + kRecordHeader, trailer = slot + payload, page = payload / layers;
        const bool is_full = bytes[trailer + 32] == 64;
        for (uint32_t layer = 0; is_full && layer < layers; ++layer) {  // pages of one size
            char identity[56] = {};
            std::memcpy(identity, bytes.data() + trailer + 8, 24);       // fingerprint, index, content
            std::memcpy(identity + 24, &layer, 4);                       //
            std::memcpy(identity + 28, bytes.data() + trailer + 32, 4);  // tokens
            std::memcpy(identity + 32, bytes.data() + trailer, 7);       // magic, version, kind
            const uint64_t of_page[] = {page, hash(slot + layer * page, page)};
            std::memcpy(identity + 40, of_page, sizeof of_page);
            put(trailer + 64 + 8 * layer, XXH3_64bits(identity, sizeof identity));
        }
        const uint64_t of_slot = hash(slot, r.bytes - kRecordHeader);
        put(r.at + 32, of_slot);
        put(r.at + 40, hash(r.at, 40));
        put(r.entry + 8, of_slot);
    }
    void mend_index() {
        const size_t at = is_pool ? 80 : 56;
        put(at, hash(header_bytes, index_bytes));
        put(header_bytes - 8, hash(0, header_bytes - 8));
    }

    std::vector<char> bytes;
    bool is_pool;
    size_t header_bytes, index_bytes;
    std::vector<Record> records;
};

}  // namespace ta::testing
