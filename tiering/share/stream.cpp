#include "tiering/share/stream.h"

#include <algorithm>

namespace ta::share {

void StreamTransport::send(uint32_t to, Packet packet, bool) {
    Peer& peer = peers_[to];
    const std::lock_guard lock(peer.mutex);
    peer.leaving.emplace_back().packet = std::move(packet);
    leaves(to);
}

// The bytes take the same way as packets: packets that are sent later arrive later.
Status StreamTransport::write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu) {
    Write write{window, copies, on_gpu};
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
    {
        const std::lock_guard leaving(peer.mutex);  // from now on nobody reads `copies`
        std::erase_if(peer.leaving, [&](const Outbound& o) { return o.write == &write; });
    }
    if (on_gpu) wait_for_pieces(to);
    return fail(TA_E_PEER_LOST, "the group ended before rank %u had the blocks", to).rank(int32_t(to));
}

void StreamTransport::end_writes() {
    const std::lock_guard lock(writing_);
    ended_ = true;
    written_.notify_all();
}

void StreamTransport::open_window(uint64_t window, uint32_t peer, WindowMemory memory) {
    const std::lock_guard lock(windows_mutex_);
    windows_.emplace(window, Window{peer, std::make_shared<const WindowMemory>(std::move(memory))});
}

void StreamTransport::close_window(uint64_t window) {
    std::weak_ptr<const WindowMemory> used;
    {
        const std::lock_guard lock(windows_mutex_);
        const auto found = windows_.find(window);
        if (found == windows_.end()) return;
        used = found->second.memory;
        windows_.erase(found);
    }
    std::unique_lock lock(users_mutex_);
    while (!used.expired()) wait_for_users(lock);
}

void StreamTransport::drop_users(std::vector<WindowUser>& users) {
    const std::lock_guard lock(users_mutex_);
    if (users.empty()) return;
    users.clear();
    users_changed_.notify_all();
}

const StreamTransport::Window* StreamTransport::find_window(uint32_t from, uint64_t window) const {
    const auto found = windows_.find(window);
    return found == windows_.end() || found->second.peer != from ? nullptr : &found->second;
}

StreamTransport::WindowUser StreamTransport::use_window(uint32_t from, const Record& record) {
    const std::lock_guard lock(windows_mutex_);
    const Window* const window = find_window(from, record.window);
    return window && window->memory->on_gpu ? window->memory : nullptr;
}

// Skips to the next piece of a write. False: all pieces have been taken.
bool StreamTransport::skip_to_next(Outbound& out) {
    const std::span<const RemoteCopy> copies = out.write->copies;
    while (out.copy < copies.size() && out.at == copies[out.copy].bytes) ++out.copy, out.at = 0;
    return out.copy < copies.size();
}

bool StreamTransport::next_gpu_piece(uint32_t to, size_t most, Record& record, const uint8_t*& from) {
    std::deque<Outbound>& leaving = peers_[to].leaving;
    if (leaving.empty() || !leaving.front().write || !leaving.front().write->on_gpu) return false;
    Outbound& out = leaving.front();
    if (!skip_to_next(out)) return false;
    const RemoteCopy& c = out.write->copies[out.copy];
    record = {uint32_t(std::min(c.bytes - out.at, most)), Record::Kind::kGpuBytes, out.write->window, c.to + out.at};
    from = c.from + out.at;
    return true;
}

size_t StreamTransport::gpu_pieces_left(uint32_t to) const {
    const Outbound& out = peers_[to].leaving.front();
    return out.write->copies.size() - out.copy;
}

void StreamTransport::gpu_pieces_have_left(uint32_t to) {
    std::deque<Outbound>& leaving = peers_[to].leaving;
    if (leaving.empty() || !leaving.front().write || !leaving.front().write->on_gpu || skip_to_next(leaving.front())) return;
    finish(leaving.front());
    leaving.pop_front();
}

bool StreamTransport::next_record(uint32_t to, size_t most, Record& record, const uint8_t*& body) {
    std::deque<Outbound>& leaving = peers_[to].leaving;
    for (; !leaving.empty(); leaving.pop_front()) {
        Outbound& out = leaving.front();
        if (!out.write) {
            const size_t left = out.packet.size() - out.at, part = std::min(left, most);
            record = {uint32_t(part), part == left ? Record::Kind::kPacketEnd : Record::Kind::kPacket, 0, out.packet.size()};
            body = out.packet.data() + out.at;
            return true;
        }
        if (out.write->on_gpu) return false;
        if (!skip_to_next(out)) {
            finish(out);
            continue;
        }
        const RemoteCopy& c = out.write->copies[out.copy];
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

// The address of a record's bytes in its window. nullptr: the window is closed, or belongs to another peer.
uint8_t* StreamTransport::place_of(uint32_t from, const Record& record) const {
    const Window* const window = find_window(from, record.window);
    if (!window || window->memory->on_gpu) return nullptr;
    uint8_t* place = nullptr;
    window->memory->visit(record.at, record.bytes, [&](uint8_t* memory, uint64_t, uint64_t n) {
        place = n == record.bytes ? memory : nullptr;  // a window in host memory has one part
    });
    return place;
}

}  // namespace ta::share
