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
    kHello = 1,  // the first to every peer: GroupShape
    kWelcome,    // answers it
    kAlive,      // heartbeat; repeats the number of the last numbered message
    kLeave,      // the sender destroys its group
    kEnded,      // the sender's group has ended: Ending
    // Transfers of sequences. The channel is the transfer's.
    kOffer,      // source -> destination: what the sequence has
    kReady,      // destination -> source: where blocks are to be written
    kSent,       // source -> destination: they are written, with their hashes
    kAskLease,   // destination -> source: which blocks it would read itself
    kLeased,     // source -> destination: where they lie, and stay until the transfer ends
    kArrived,    // destination -> source: the sequence exists there
    kCancel,     // either: Ending; the peer stops and answers
    kCancelled,  // the answer: the sender touches nothing of the transfer any more
    // Steps over partitioned sequences. The channel is the step's.
    kStep,         // the sender begins one
    kStepRefused,  // the answer of a rank that is in a step with other arguments
    kStepOver,     // the sender gave its step up, or has no such sequence any more
    kPart,         // the sender's part of a result
    // Published blocks: a transfer that its destination begins. kOffer answers; an empty one: nothing of it is there.
    kFetch,  // destination -> source: which blocks of a namespace it would have
    // Namespaces that ranks share.
    kSpaceJoin,    // the sender shares one, and proves that it knows the salt; or answers one
    kSpaceAbsent,  // the answer of who does not share it
    kSpaceLeave,   // the sender shares it no longer
    kHints,        // what the sender has published in it, or dropped
    // Attention whose heads a root gives to the others in rounds.
    kRoundsBegin,  // the sender begins such a call
    kRoundsOver,   // it has given its call up: Ending
    kRoundsCall,   // root -> other: what the call is
    kRoundsNote,   // either: how far it is
};

struct MessageHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint64_t generation;  // of the group
    uint32_t from, to;
    uint64_t number;  // from 1, of each pair of ranks and direction
    uint64_t channel;
    uint64_t payload_bytes;
    uint64_t hash;  // XXH3 of the fields above and the payload
};
static_assert(sizeof(MessageHeader) == 56);

inline constexpr uint32_t kMessageMagic = 0x50474154;  // "TAGP" in little endian
inline constexpr uint16_t kMessageVersion = 1;

struct Message {
    MessageHeader header;
    std::vector<uint8_t> payload;
};

// How something ended, as one rank tells another.
struct Ending {
    int32_t status;
    int32_t rank;  // whose fault it is, -1: nobody's
    int64_t block;
    char text[192];

    static Ending of(const Status& status);
    // `from`: who says so.
    Status to_status(uint32_t from) const;
};
static_assert(sizeof(Ending) == 208);

// Sets magic, version, payload_bytes and hash.
Packet pack(MessageHeader header, std::span<const uint8_t> payload);
// TA_E_CORRUPT: cut or damaged; TA_E_UNSUPPORTED: another version. A message that `from` sends to `to` in this generation.
Result<Message> unpack(const Packet& packet, uint64_t generation, uint32_t from, uint32_t to);

// Why the group ends when a message of that rank is none of the protocol.
Status no_message(uint32_t from);

// Puts plain structs one behind the other into a payload.
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

// Takes them out again. Each call fails where the payload is too short.
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
    // The rest, which has to be n values.
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
