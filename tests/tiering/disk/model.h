// A model of a persistent disk tier's promises, kept beside it while a script runs on it under faults: which contents of a block
// may be found later, and which one must.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "support/files.h"
#include "tiering/disk/client.h"
#include "tiering/disk/disk.h"
#include "tiering/faulty_files.h"

namespace ta::testing {

inline constexpr size_t kModelSlotBytes[2] = {12000, 5000};

struct ModelBlock {
    Slot slot;
    std::set<uint64_t> may;  // content ids; none of them need be there
    uint64_t must = 0;       // one that was acknowledged and not touched since; 0: none
};

class DiskModel {
  public:
    std::unique_ptr<DiskTier> tier;
    std::vector<ModelBlock> blocks;  // by block index

    // A tier on `files`; false when it does not open, which only a fault excuses.
    bool open(std::shared_ptr<FileSystem> files, DiskTierOptions options) {
        options.slot_bytes[0] = kModelSlotBytes[0];
        options.slot_bytes[1] = kModelSlotBytes[1];
        options.fingerprint = 99;
        Result<std::unique_ptr<DiskTier>> opened = DiskTier::open(std::move(files), options);
        if (opened.ok()) {
            tier = opened.take();
            tier->keep_file();
            return true;
        }
        why = std::move(opened).status();
        const ta_status c = why.code();
        EXPECT_TRUE(c == TA_E_IO || c == TA_E_TIER_FULL) << is_ok(why).message();
        return false;
    }
    Status why;

    // Acquires slots for n more blocks.
    void add(size_t n) {
        for (size_t i = 0; i < n; ++i) {
            const uint8_t slot_class = uint8_t((blocks.size() % 3) != 0);
            Result<std::vector<Slot>> slots = tier->acquire({&slot_class, 1});
            ModelBlock b;
            if (slots.ok()) b.slot = slots.value()[0];
            blocks.push_back(std::move(b));
        }
    }
    // One batch that writes new contents of these blocks.
    void write(const std::vector<size_t>& which) {
        std::vector<DiskRequest> requests;
        std::vector<std::vector<uint8_t>> bytes;
        std::vector<size_t> written;
        for (const size_t i : which) {
            if (blocks[i].slot.index == Slot::kNone) continue;
            written.push_back(i);
            const BlockIdentity id = make_identity(i, next_content_++);
            bytes.push_back(make_bytes(id, tier->slot_bytes(blocks[i].slot.slot_class)));
            requests.push_back(write_request(blocks[i].slot, id, bytes.back()));
        }
        const std::vector<DiskCompletion> done = run(*tier, requests, &why);
        for (size_t k = 0; k < done.size(); ++k) {
            ModelBlock& b = blocks[written[k]];
            const uint64_t content = requests[k].identity.content_id;
            b.may.insert(content);
            b.must = done[k].status.ok() ? content : 0;
        }
    }
    // Reads what was acknowledged, and allows errors, but no wrong byte.
    void read_all() {
        for (size_t i = 0; i < blocks.size(); ++i) {
            if (blocks[i].must == 0 || blocks[i].slot.index == Slot::kNone) continue;
            const Status s = read_status(*tier, blocks[i].slot, make_identity(i, blocks[i].must));
            EXPECT_NE(s.code(), TA_E_CORRUPT) << is_ok(s).message();
            EXPECT_NE(s.code(), TA_E_STATE) << is_ok(s).message();
        }
    }
    void release(const std::vector<size_t>& which) {
        for (const size_t i : which) {
            tier->release({&blocks[i].slot, 1});
            blocks[i].slot = Slot{};
            blocks[i].must = 0;
        }
    }
    // The slots of a tier that was opened anew.
    void adopt_recovered() {
        for (ModelBlock& b : blocks) b.slot = Slot{};
        for (const RecoveredBlock& r : tier->recovered()) {
            const uint64_t i = r.identity.block_index;
            ASSERT_LT(i, blocks.size());
            EXPECT_TRUE(blocks[i].may.contains(r.identity.content_id))
                << "block " << i << " came back with content " << r.identity.content_id << ", which it never had";
            if (blocks[i].must == r.identity.content_id) blocks[i].slot = r.slot;
        }
    }
    // On a tier without faults: what must be there is, what is there is whole.
    void judge() {
        std::set<std::pair<uint64_t, uint64_t>> found;
        for (const RecoveredBlock& r : tier->recovered()) {
            const uint64_t i = r.identity.block_index;
            ASSERT_LT(i, blocks.size());
            EXPECT_TRUE(blocks[i].may.contains(r.identity.content_id)) << "block " << i << " content " << r.identity.content_id;
            EXPECT_TRUE(r.identity == make_identity(i, r.identity.content_id));
            EXPECT_TRUE(found.emplace(i, r.identity.content_id).second) << "block " << i << " twice";
            EXPECT_TRUE(read_block(*tier, r.slot, make_identity(i, r.identity.content_id)));
        }
        for (size_t i = 0; i < blocks.size(); ++i) {
            EXPECT_TRUE(blocks[i].must == 0 || found.contains({i, blocks[i].must}))
                << "block " << i << " content " << blocks[i].must << " was acknowledged and is gone";
        }
    }

  private:
    uint64_t next_content_ = 1;
};

}  // namespace ta::testing
