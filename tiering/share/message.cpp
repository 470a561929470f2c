#include "tiering/share/message.h"

#include <cstddef>
#include <cstdio>

#include "kernels/format/hash.h"
#include "src/core/text.h"

namespace ta::share {
namespace {

uint64_t hash_of(const MessageHeader& header, std::span<const uint8_t> payload) {
    PiecewiseHash hash;
    hash.add(&header, offsetof(MessageHeader, hash));
    hash.add(payload.data(), payload.size());
    return hash.value();
}

}  // namespace

Ending Ending::of(const Status& status) {
    Ending e{};
    e.status = status.code();
    e.rank = -1;
    e.block = -1;
    if (const ta_error* detail = status.detail()) {
        e.rank = detail->rank;
        e.block = detail->block;
        std::snprintf(e.text, sizeof e.text, "%.*s", int(sizeof e.text - 1), detail->message);
    }
    return e;
}

Status Ending::to_status(uint32_t from) const {
    char what[sizeof text];
    std::memcpy(what, text, sizeof what);
    what[sizeof what - 1] = 0;
    make_plain(what);
    Status s = fail(status == TA_OK ? ta_status(TA_E_CORRUPT) : status, "rank %u: %s", from, what);
    return std::move(s).block(block).rank(rank >= 0 ? rank : int32_t(from));
}

Packet pack(MessageHeader header, std::span<const uint8_t> payload) {
    header.magic = kMessageMagic;
    header.version = kMessageVersion;
    header.payload_bytes = payload.size();
    header.hash = hash_of(header, payload);
    Packet packet(sizeof header + payload.size());
    std::memcpy(packet.data(), &header, sizeof header);
    if (!payload.empty()) std::memcpy(packet.data() + sizeof header, payload.data(), payload.size());
    return packet;
}

Result<Message> unpack(const Packet& packet, uint64_t generation, uint32_t from, uint32_t to) {
    Message m{};
    MessageHeader& h = m.header;
    if (packet.size() < sizeof h) return fail(TA_E_CORRUPT, "a message from rank %u was cut", from);
    std::memcpy(&h, packet.data(), sizeof h);
    if (h.magic == kMessageMagic && h.version != kMessageVersion) {
        return fail(TA_E_UNSUPPORTED, "rank %u speaks version %u of the group's protocol, this library version %u", from,
                    unsigned(h.version), unsigned(kMessageVersion));
    }
    const std::span payload(packet.data() + sizeof h, packet.size() - sizeof h);
    if (h.magic != kMessageMagic || h.payload_bytes != payload.size() || h.hash != hash_of(h, payload))
        return fail(TA_E_CORRUPT, "a message from rank %u was damaged", from);
    if (h.generation != generation || h.from != from || h.to != to)
        return fail(TA_E_CORRUPT, "a message from rank %u is of another group or for another rank", from);
    m.payload.assign(payload.begin(), payload.end());
    return m;
}

Status no_message(uint32_t from) {
    return fail(TA_E_PEER_LOST, "rank %u sent what is no message of the protocol", from).rank(int32_t(from));
}

}  // namespace ta::share
