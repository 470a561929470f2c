#include "tiering/share/stream.h"

#include <algorithm>

namespace ta::share {

void StreamTransport::send(uint32_t to, Packet packet, bool) {
    Peer& peer = peers_[to];
    const std::lock_guard lock(peer.mutex);
    peer.leaving.emplace_back().packet = std::move(packet);
    leaves(to);
}

// The bytes go the way of packets: those sent behind them come behind them.
Status StreamTransport::write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies) {
    Write write{window, copies};
    Peer& peer = peers_[to];
    {
        const std::lock_guard lock(peer.mutex);
        peer.leaving.emplace_back().write = &write;
        leaves(to);
    }
    std::unique_lock lock(writing_);
    written_.wait(lock, [&] { return write.done || ended_; });
    if (write.done) return {};
    lock.unlock();
    const std::lock_guard leaving(peer.mutex);  // nobody looks at `copies` any more
    std::erase_if(peer.leaving, [&](const Outbound& o) { return o.write == &write; });
    return fail(TA_E_PEER_LOST, "the group ended before rank %u had the blocks", to).rank(int32_t(to));
}

void StreamTransport::end_writes() {
    const std::lock_guard lock(writing_);
    ended_ = true;
    written_.notify_all();
}

void StreamTransport::open_window(uint64_t window, uint32_t peer, std::span<uint8_t> memory) {
    const std::lock_guard lock(windows_mutex_);
    windows_.emplace(window, Window{peer, memory});
}

void StreamTransport::close_window(uint64_t window) {
    const std::lock_guard lock(windows_mutex_);
    windows_.erase(window);
}

bool StreamTransport::next_record(uint32_t to, size_t most, Record& record, const uint8_t*& body) {
    std::deque<Outbound>& leaving = peers_[to].leaving;
    for (; !leaving.empty(); leaving.pop_front()) {
        Outbound& out = leaving.front();
        if (!out.write) {
            const size_t left = out.packet.size() - out.at, part = std::min(left, most);
            record = {uint32_t(part), part == left ? Record::Kind::kPacketEnd : Record::Kind::kPacket, 0, 0};
            body = out.packet.data() + out.at;
            return true;
        }
        const std::span<const RemoteCopy> copies = out.write->copies;
        while (out.copy < copies.size() && out.at == copies[out.copy].bytes) ++out.copy, out.at = 0;
        if (out.copy == copies.size()) {
            finish(out);
            continue;
        }
        const RemoteCopy& c = copies[out.copy];
        record = {uint32_t(std::min(c.bytes - out.at, most)), Record::Kind::kBytes, out.write->window, c.to + out.at};
        body = c.from + out.at;
        return true;
    }
    return false;
}

void StreamTransport::record_has_left(uint32_t to, const Record& record) {
    std::deque<Outbound>& leaving = peers_[to].leaving;
    leaving.front().at += record.bytes;
    if (record.kind == Record::Kind::kPacketEnd) leaving.pop_front();
}

std::vector<Packet> StreamTransport::take_packets(uint32_t to) {
    std::vector<Packet> packets;
    for (Outbound& out : peers_[to].leaving) packets.push_back(std::move(out.packet));
    peers_[to].leaving.clear();
    return packets;
}

void StreamTransport::finish(Outbound& out) {
    const std::lock_guard lock(writing_);
    out.write->done = true;
    written_.notify_all();
}

// Where a record for a window goes; nullptr: the window is closed, or not that peer's.
uint8_t* StreamTransport::place_of(uint32_t from, const Record& record) const {
    const auto found = windows_.find(record.window);
    if (found == windows_.end() || found->second.peer != from) return nullptr;
    const std::span<uint8_t> memory = found->second.memory;
    const uint64_t at = record.address - reinterpret_cast<uintptr_t>(memory.data());
    return at <= memory.size() && record.bytes <= memory.size() - at ? memory.data() + at : nullptr;
}

}  // namespace ta::share
