// State of a transfer at either end, and the layout of its messages. Of src/kv/share/transfers*.cpp alone.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "src/kv/share/transfers.h"

namespace ta::share {

struct OfferHeader {
    uint64_t fingerprint;  // of the source's pool
    uint64_t pool;         // its serial
    uint64_t tag;
    int64_t length;  // tokens
    uint64_t blocks;
    uint64_t space;  // that the sequence belongs to
    uint64_t slot_bytes[kPageKinds];
};  // then a StoredBlock for each block, without slot_hash

// Of no blocks yet.
OfferHeader offer_of(const Pool& pool);

struct ReadyHeader {
    uint64_t window;  // in which the blocks follow each other without gaps
    uint64_t on_gpu;  // 0: no
    uint64_t blocks;
};  // then their positions in the offer

struct SentHeader {
    uint64_t window;
    uint64_t blocks;
};  // then the XXH3 of each slot; of a window on a GPU 0, or kElsewhere for a block that is not in the GPU's memory and was not sent

struct AskLeaseHeader {
    uint64_t blocks;
};  // then their positions in the offer

struct LeasedHeader {
    MemoryName memory;  // shared for as long as the lease lasts
    uint64_t bytes;     // of it
    uint64_t blocks;
};  // then the offset of each in that memory, or kElsewhere

inline constexpr uint64_t kElsewhere = ~uint64_t{0};  // where no other GPU reads it
inline constexpr size_t kWindows = 2;                 // of a transfer at once

struct FetchHeader {
    SpaceName space;
    uint64_t blocks;
};  // then a WantedBlock for each

struct WantedBlock {
    BlockKey key;    // hashed
    uint64_t index;  // ascending
};

struct Transfers::Outgoing {
    Outgoing(Residency& residency) : hold(residency) {}
    Residency::BlockHold hold;
    ta_seq seq = 0;
    Pool::Snapshot snapshot;
    std::vector<StoredBlock> list;
    std::vector<Sequence*> locked;  // of a move
    bool offered = false;           // guarded by mutex_: from then on the list stays as it is
    // The blocks that another rank wants to fetch, until the lane has looked for them.
    Tenant space = 0;
    std::vector<WantedBlock> wanted;
    // A window that is to be written, and the positions of its blocks in the list: from kReady to kSent.
    struct Asked {
        uint64_t window;
        bool on_gpu;
        std::vector<uint64_t> positions;
    };
    std::deque<Asked> asked;  // guarded by mutex_
    // Blocks that the destination reads itself. Until the transfer ends they stay where they lie.
    bool leased = false;  // guarded by mutex_, as its positions until the lane has them
    std::vector<uint64_t> leased_positions;
    std::optional<ReadingBlocks> reading;
    Transport::Shared memory;
};

// Blocks of a prefix that come, from one rank after the other. The lane's.
struct Transfers::Fetch {
    Tenant space = 0;
    SpaceName name{};
    std::vector<BlockKey> keys;     // hashed
    std::vector<uint64_t> indices;  // 0, 1, ...
    std::vector<bool> in_vain;      // [ranks] that had nothing
    // Of the leg that goes on.
    std::vector<BlockPtr> chain;   // [keys.size()] that are published here, or have come
    std::vector<uint64_t> wanted;  // indices
    size_t first_missing = 0;
    bool begun = false, landed = false;
};

struct Transfers::Incoming {
    Incoming(Pool& pool)
        : hold(pool.residency()),
          spaces(pool.prefixes()),
          others_see(pool.residency(), mine),
          staging{Buffer(pool.context().allocator()), Buffer(pool.context().allocator())} {}
    Residency::BlockHold hold;
    std::vector<uint8_t> offer_bytes;
    OfferHeader offer{};
    std::vector<StoredBlock> list;
    PrefixStore::Named spaces;
    Tenant tenant = 0;
    std::vector<BlockPtr> blocks;  // [list.size()], those that are there
    Residency::Loading mine;
    Residency::LoadHold others_see;
    // Windows are asked for while those before fill, first on the GPU, then for the rest in the host's memory.
    bool by_gpu = false;
    size_t next = 0;  // in the list: those before are there or in a window, or elsewhere
    struct Window {
        uint64_t number;
        bool on_gpu;
        std::vector<uint64_t> positions;  // in the list
        uint8_t* memory = nullptr;        // of the host
        std::vector<BlockPtr> blocks;     // on the GPU
        // Guarded by mutex_: kSent, and what it said.
        bool filled = false;
        std::vector<uint64_t> said;
    };
    std::deque<Window> windows;  // that are open, oldest first; the lane's, which changes their number under mutex_
    Buffer staging[kWindows];
    size_t uses_of_staging = 0;
    std::vector<uint64_t> positions;  // of what is leased
    // Guarded by mutex_.
    bool asked_lease = false;
    LeasedHeader leased{};
    std::vector<uint64_t> offsets;  // of `positions`
    std::unique_ptr<Fetch> fetch;   // nullptr: a sequence comes
};

// Blocks that come from another GPU.
struct Transfers::Pull {
    std::vector<uint64_t> positions;  // in the list
    std::vector<BlockPtr> blocks;
    std::vector<PlacedBlock> placed;
    uint64_t bytes = 0;
    std::unique_ptr<DeviceTransfer> transfer;  // nullptr: they are here
    std::unique_ptr<ArrivalCheck> check;       // goes before what it checks
};

struct Transfers::Transfer {
    uint64_t ticket = 0;
    uint64_t channel = 0;
    bool outgoing = false;
    std::shared_ptr<Pool> pool;
    std::atomic<Phase> phase{Phase::kWaiting};
    Time deadline{};
    TransferProgress progress;  // guarded by mutex_, as the next ones
    Status ending;              // of a transfer that is being cancelled
    bool cancelled_here = false;
    bool served = false;            // another rank's fetch: no caller has the ticket
    Lane::Tasks end;                // what its lane does last
    std::unique_ptr<Outgoing> out;  // the lane's, where nothing else is said
    std::unique_ptr<Incoming> in;
};

}  // namespace ta::share
