// State of a transfer at both ends, and the layout of its messages. Only for src/kv/share/transfers*.cpp.
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
    uint64_t pool;         // serial of the source's pool
    uint64_t tag;
    int64_t length;  // tokens
    uint64_t blocks;
    uint64_t space;  // namespace of the sequence
    uint64_t slot_bytes[kPageKinds];
};  // then a StoredBlock for each block, without slot_hash

// An offer without blocks.
OfferHeader offer_of(const Pool& pool);

struct ReadyHeader {
    uint64_t window;  // in it the blocks lie one after another, without gaps
    uint64_t on_gpu;  // 0: no
    uint64_t blocks;
};  // then their positions in the offer

struct SentHeader {
    uint64_t window;
    uint64_t blocks;
};  // then the XXH3 of each slot. For a window on a GPU: 0, or kElsewhere for a block that was not sent, as it is not in the
    // GPU's memory

struct AskLeaseHeader {
    uint64_t blocks;
};  // then their positions in the offer

struct LeasedHeader {
    MemoryName memory;  // shared until the transfer ends
    uint64_t bytes;     // size of the memory
    uint64_t blocks;
};  // then each block's offset in that memory, or kElsewhere

inline constexpr uint64_t kElsewhere = ~uint64_t{0};  // not in memory that another GPU can read
inline constexpr size_t kWindows = 2;                 // of one transfer, at a time

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
    Sequences::Snapshot snapshot;
    std::vector<StoredBlock> list;
    std::vector<Sequence*> locked;  // if the sequence is moved, not copied
    bool offered = false;           // guarded by mutex_; once true, the list is final
    bool sent_open = false;         // guarded by mutex_: the block that is not full has been sent
    // Of a fetch: the blocks that another rank wants. The lane looks for them and empties this.
    Tenant space = 0;
    std::vector<WantedBlock> wanted;
    // A window that the source has to write, and the list positions of its blocks. In here from kReady to kSent.
    struct Asked {
        uint64_t window;
        bool on_gpu;
        std::vector<uint64_t> positions;
    };
    std::deque<Asked> asked;  // guarded by mutex_
    // Blocks that the destination reads itself. They keep their places until the transfer ends.
    bool leased = false;  // guarded by mutex_; so is leased_positions until the lane has it
    std::vector<uint64_t> leased_positions;
    std::optional<ReadingBlocks> reading;
    Transport::Shared memory;
};

// State of a fetch: blocks of a prefix that come from several ranks in turn. Used by the lane.
struct Transfers::Fetch {
    Tenant space = 0;
    SpaceName name{};
    std::vector<BlockKey> keys;                // hashed
    std::vector<uint64_t> indices;             // 0, 1, ...
    std::vector<SharedSpaces::Lacked> lacked;  // [ranks]
    // Of the present leg.
    std::vector<BlockPtr> chain;   // [keys.size()]: blocks that are published here, or have come; nullptr: missing
    std::vector<uint64_t> wanted;  // indices
    size_t first_missing = 0;
    bool begun = false, landed = false;
};

struct Transfers::Incoming {
    // `holder`: the lane, which releases all holds of its transfers.
    Incoming(Pool& pool, Residency::Holder holder)
        : hold(pool.residency(), holder),
          spaces(pool.prefixes()),
          others_see(pool.residency(), mine),
          staging{Buffer(pool.context().allocator()), Buffer(pool.context().allocator())} {
        mine.holder = holder;
    }
    Residency::BlockHold hold;
    std::vector<uint8_t> offer_bytes;
    OfferHeader offer{};
    std::vector<StoredBlock> list;
    PrefixStore::Named spaces;
    Tenant tenant = 0;
    std::vector<BlockPtr> blocks;  // [list.size()]: the blocks that are there; nullptr: still to come
    Residency::Loading mine;
    Residency::LoadHold others_see;
    // The next windows are asked for while earlier ones fill: first on the GPU, then in host memory for the rest.
    bool by_gpu = false;
    size_t next = 0;  // position in the list: earlier blocks are there, in a window, or elsewhere
    struct Window {
        uint64_t number;
        bool on_gpu;
        std::vector<uint64_t> positions;  // in the list
        uint8_t* memory = nullptr;        // of a window in host memory
        std::vector<BlockPtr> blocks;     // of a window on the GPU
        // Guarded by mutex_: true after kSent, with the values that came with it.
        bool filled = false;
        std::vector<uint64_t> said;
    };
    std::deque<Window> windows;  // open windows, oldest first; used by the lane, which adds and removes them under mutex_
    Buffer staging[kWindows];
    size_t uses_of_staging = 0;
    std::vector<uint64_t> positions;  // list positions of the leased blocks
    std::vector<BlockPtr> room;       // [positions.size()], or empty: blocks for these, taken while the source answers
    // Guarded by mutex_.
    bool asked_lease = false;
    LeasedHeader leased{};
    std::vector<uint64_t> offsets;  // for each of `positions`
    std::unique_ptr<Fetch> fetch;   // nullptr: the transfer is of a sequence
};

// Some blocks on their way from another GPU.
struct Transfers::Pull {
    std::vector<uint64_t> positions;  // in the list
    std::vector<BlockPtr> blocks;
    std::vector<PlacedBlock> placed;
    uint64_t bytes = 0;
    std::unique_ptr<DeviceTransfer> transfer;  // nullptr: the bytes have arrived
    std::unique_ptr<ArrivalCheck> check;       // destroyed before what it checks
};

struct Transfers::Transfer {
    uint64_t ticket = 0;
    uint64_t channel = 0;
    bool outgoing = false;
    std::shared_ptr<Pool> pool;
    std::atomic<Phase> phase{Phase::kWaiting};
    Time deadline{};    // guarded by mutex_, like the fields below
    Time told{};        // when the peer was last told that this rank goes on
    size_t queued = 0;  // tasks in the lane that have not begun
    bool runs = false;  // a task runs; it may report nothing for long, while it makes room or reads a slow tier
    TransferProgress progress;
    Status ending;  // the reason of a cancel
    bool cancelled_here = false;
    bool served = false;            // serves another rank's fetch: no caller has the ticket
    Lane::Tasks end;                // the last task in its lane
    std::unique_ptr<Outgoing> out;  // used by the lane, unless said otherwise
    std::unique_ptr<Incoming> in;
};

}  // namespace ta::share
