#include "tiering/share/message.h"

#include <cstddef>
#include <cstdio>
#include <cstring>

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
    e.rank = e.origin = -1;
    e.block = -1;
    if (const ta_error* detail = status.detail()) {
        e.rank = detail->rank;
        e.block = detail->block;
        std::snprintf(e.text, sizeof e.text, "%.*s", int(sizeof e.text - 1), detail->message);
    }
    return e;
}

bool Ending::is_valid(uint32_t ranks) const {
    const auto is_rank = [ranks](int32_t r) { return r >= -1 && r < int64_t(ranks); };
    const bool is_failure = status != TA_OK && std::strcmp(ta_status_name(status), ta_status_name(-1)) != 0;
    return is_failure && is_rank(rank) && is_rank(origin) && block >= -1 && reserved == 0 && text[sizeof text - 1] == 0;
}

Status Ending::to_status(uint32_t from) const {
    char what[sizeof text];
    std::memcpy(what, text, sizeof what);
    make_plain(what);
    Status s = fail(status, "rank %d: %s", origin_of(from), what);
    return std::move(s).block(block).rank(rank >= 0 ? rank : origin_of(from));
}

Ending Ending::relayed(uint32_t from) const {
    Ending e = *this;
    e.origin = origin_of(from);
    return e;
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
    const std::span payload(packet.data() + sizeof h, packet.size() - sizeof h);
    if (h.magic != kMessageMagic || h.payload_bytes != payload.size() || h.hash != hash_of(h, payload))
        return fail(TA_E_CORRUPT, "a message from rank %u was damaged", from);
    if (h.version != kMessageVersion) return other_version(from, h.version);
    if (h.generation != generation || h.from != from || h.to != to)
        return fail(TA_E_CORRUPT, "a message from rank %u is of another group or for another rank", from);
    m.payload.assign(payload.begin(), payload.end());
    return m;
}

Status other_version(uint32_t from, uint64_t version) {
    return fail(TA_E_MISMATCH, "rank %u speaks version %llu of the group's protocol, this library version %u", from,
                (unsigned long long)version, unsigned(kMessageVersion))
        .rank(int32_t(from));
}

Status no_message(uint32_t from) {
    return fail(TA_E_PEER_LOST, "rank %u sent what is no message of the protocol", from).rank(int32_t(from));
}

}  // namespace ta::share
