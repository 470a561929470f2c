// Messages between ranks of a group: fixed layout, little-endian, numbered, hashed. docs/internals/sharing.md has the
// protocol.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "src/core/status.h"

namespace ta::share {

using Packet = std::vector<uint8_t>;

enum class MessageType : uint16_t {
    kHello = 1,  // the first message to every peer: GroupShape
    kWelcome,    // the answer to kHello
    kAlive,      // heartbeat; repeats the number of the last numbered message
    kLeave,      // the sender destroys its group
    kEnded,      // the sender's group has ended: Ending, which receivers pass on unchanged
    // Transfers of sequences. The channel is the transfer's.
    kOffer,      // source -> destination: what there is of the sequence
    kReady,      // destination -> source: where to write the blocks
    kSent,       // source -> destination: the blocks are written; their hashes
    kAskLease,   // destination -> source: the blocks that it wants to read itself
    kLeased,     // source -> destination: their places; they stay there until the transfer ends
    kArrived,    // destination -> source: the sequence exists there
    kCancel,     // either side: Ending; the peer stops and answers
    kCancelled,  // the answer: the sender no longer touches anything of the transfer
    // Steps over partitioned sequences. The channel is the step's.
    kStep,         // the sender begins a step
    kStepRefused,  // the answer of a rank that is in a step with other arguments
    kStepOver,     // the sender gave up its step, or no longer has such a sequence
    kPart,         // the sender's part of a result
    // Published blocks: the destination begins the transfer. The answer is a kOffer; an empty one: the source has none of them.
    kFetch,  // destination -> source: the blocks of a namespace that it wants
    // Namespaces that ranks share.
    kSpaceJoin,    // the sender shares a namespace, and proves that it knows the salt; also the answer to that
    kSpaceAbsent,  // the answer of a rank that does not share the namespace
    kSpaceLeave,   // the sender stops sharing it
    kHints,        // blocks that the sender has published in it, or dropped
    // Attention for which a root gives heads to other ranks, in rounds.
    kRoundsBegin,  // the sender begins such a call
    kRoundsOver,   // the sender gave up its call: Ending
    kRoundsCall,   // root -> other: the call's arguments
    kRoundsNote,   // either side: its progress
    kGoesOn,       // of transfers, either side: the sender is still working on it
    kStepIdle,     // of partitioned sequences: the sender began a step without queries
};

// The header is the same in all versions.
struct MessageHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint64_t generation;  // of the group
    uint32_t from, to;
    uint64_t number;  // counts from 1, for each pair of ranks and direction
    uint64_t channel;
    uint64_t payload_bytes;
    uint64_t hash;  // XXH3 of the fields above and the payload
};
static_assert(sizeof(MessageHeader) == 56);

inline constexpr uint32_t kMessageMagic = 0x50474154;  // "TAGP" in little endian
inline constexpr uint16_t kMessageVersion = 2;         // of messages, of records and of frames

struct Message {
    MessageHeader header;
    std::vector<uint8_t> payload;
};

// How something ended, as ranks tell each other.
struct Ending {
    int32_t status;
    int32_t rank;  // the rank at fault; -1: none
    int64_t block;
    int32_t origin;  // the rank that first said so; -1: the sender
    int32_t reserved;
    char text[192];

    static Ending of(const Status& status);
    // False: no rank of a group of that size sends this.
    bool is_valid(uint32_t ranks) const;
    // `from`: the sender.
    Status to_status(uint32_t from) const;
    // What this rank passes on to others. `from`: the sender.
    Ending relayed(uint32_t from) const;

  private:
    int32_t origin_of(uint32_t from) const { return origin >= 0 ? origin : int32_t(from); }
};
static_assert(sizeof(Ending) == 216);

// Sets magic, version, payload_bytes and hash.
Packet pack(MessageHeader header, std::span<const uint8_t> payload);
// Unpacks a message that `from` sent to `to` in this generation. TA_E_CORRUPT: cut or damaged. TA_E_MISMATCH: another version.
Result<Message> unpack(const Packet& packet, uint64_t generation, uint32_t from, uint32_t to);

// The error if a rank speaks another version of the protocol: the group ends.
Status other_version(uint32_t from, uint64_t version);
// The error if a rank sends something that is no message of the protocol: the group ends.
Status no_message(uint32_t from);

// Appends plain structs to a payload.
class PayloadWriter {
  public:
    template <class T>
    PayloadWriter& put(const T& value) {
        return put_all(std::span<const T>(&value, 1));
    }
    template <class T>
    PayloadWriter& put_all(std::span<const T> values) {
        const auto* p = reinterpret_cast<const uint8_t*>(values.data());
        bytes_.insert(bytes_.end(), p, p + values.size_bytes());
        return *this;
    }
    const std::vector<uint8_t>& bytes() const { return bytes_; }

  private:
    std::vector<uint8_t> bytes_;
};

// Takes them out again. A call fails if the payload is too short.
class PayloadReader {
  public:
    explicit PayloadReader(std::span<const uint8_t> bytes) : left_(bytes) {}
    template <class T>
    bool get(T& value) {
        if (left_.size() < sizeof(T)) return false;
        std::memcpy(&value, left_.data(), sizeof(T));
        left_ = left_.subspan(sizeof(T));
        return true;
    }
    // Takes n values. If there are fewer, takes no memory.
    template <class T>
    bool get_all(uint64_t n, std::vector<T>& values) {
        if (left_.size() / sizeof(T) < n) return false;
        values.resize(size_t(n));
        if (n > 0) std::memcpy(values.data(), left_.data(), size_t(n) * sizeof(T));
        left_ = left_.subspan(size_t(n) * sizeof(T));
        return true;
    }
    // Takes the rest, which must be exactly n values.
    template <class T>
    bool get_rest(uint64_t n, std::vector<T>& values) {
        if (left_.size() / sizeof(T) != n || left_.size() % sizeof(T) != 0) return false;
        values.resize(size_t(n));
        if (n > 0) std::memcpy(values.data(), left_.data(), left_.size());
        left_ = {};
        return true;
    }
    bool at_end() const { return left_.empty(); }

  private:
    std::span<const uint8_t> left_;
};

}  // namespace ta::share
