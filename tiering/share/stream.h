// Shared by transports that carry records between processes. Packets and bytes for windows leave for each peer in the order of
// the calls. They are cut into records, and put together again on arrival.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tiering/share/transport.h"

namespace ta::share {

struct Record {
    enum class Kind : uint32_t {
        kPacket = 1,  // a part of a packet
        kPacketEnd,   // its last part
        kBytes,       // bytes for a window
        kGpuBytes,    // announces bytes for a window on a GPU, which come another way
    };
    uint32_t bytes;  // that follow
    Kind kind;
    // Of bytes: the window, and the offset in it. Of a packet: `at` is the length of the whole packet.
    uint64_t window, at;
};
static_assert(sizeof(Record) == 24);

// The longest packet. Parts of a long prompt's step are the longest: 4 (head_dim + 1) bytes for each query token and head.
inline constexpr uint64_t kMostPacketBytes = uint64_t{16} << 30;
inline constexpr uint64_t kFirstPacketBytes = uint64_t{1} << 20;  // of memory for a packet whose first part has come, at most

class StreamTransport : public Transport {
  public:
    explicit StreamTransport(uint32_t ranks) : peers_(ranks) {}

    void send(uint32_t to, Packet packet, bool heartbeat) override;
    void end_writes() override;
    void open_window(uint64_t window, uint32_t peer, WindowMemory memory) override;
    void close_window(uint64_t window) override;
    Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu) override;

  protected:
    // Called when something was added for the peer; under its mutex.
    virtual void leaves(uint32_t to) = 0;

    // The next record for a peer; under its mutex. False: there is none.
    bool next_record(uint32_t to, size_t most, Record& record, const uint8_t*& body);
    void record_has_left(uint32_t to, const Record& record);
    std::mutex& mutex_of(uint32_t to) { return peers_[to].mutex; }
    bool has_packets(uint32_t to) const {
        return !peers_[to].leaving.empty();
    }                                               // true if some have not left yet; under the
                                                    // peer's mutex
    std::vector<Packet> take_packets(uint32_t to);  // those that have not begun to leave; under the peer's mutex
    // The same for pieces from GPU to GPU, if they are first in the queue. When all pieces of the write have been taken, and
    // sent, gpu_pieces_have_left() finishes the write.
    bool next_gpu_piece(uint32_t to, size_t most, Record& record, const uint8_t*& from);
    void gpu_pieces_have_left(uint32_t to);
    size_t gpu_pieces_left(uint32_t to) const;  // pieces left in that write, at least
    // Called when the group has ended: waits until nothing reads pieces from next_gpu_piece() any more.
    virtual void wait_for_pieces(uint32_t) {}
    // The window for such a piece; nullptr: the piece may not go there. close_window() waits until all users are dropped.
    using WindowUser = std::shared_ptr<const WindowMemory>;
    WindowUser use_window(uint32_t from, const Record& record);
    // Drops users, for which close_window() may be waiting.
    void drop_users(std::vector<WindowUser>& users);
    virtual void wait_for_users(std::unique_lock<std::mutex>& lock) { users_changed_.wait(lock); }
    std::mutex users_mutex_;
    std::condition_variable users_changed_;

    // Takes the next incoming record; called by one thread. `read(to)` copies the record's body. Returns a packet if the record
    // completes one. Returns an empty packet, which is no message, if the record does not fit those before it.
    template <class Read>
    std::optional<Packet> take_record(uint32_t from, const Record& record, Read&& read) {
        if (record.kind == Record::Kind::kBytes) {
            const std::lock_guard lock(windows_mutex_);
            if (uint8_t* const to = place_of(from, record)) read(to);
            return {};
        }
        if (record.kind == Record::Kind::kGpuBytes) return {};
        Packet& coming = peers_[from].coming;
        const size_t before = coming.size(), after = before + record.bytes;
        const bool is_last = record.kind == Record::Kind::kPacketEnd;
        if (record.at > kMostPacketBytes || (is_last ? after != record.at : after >= record.at)) return Packet();
        // The length is only what the peer says, so memory grows with what has come.
        if (after > coming.capacity())
            coming.reserve(size_t(std::min(record.at, std::max<uint64_t>({after, 2 * coming.capacity(), kFirstPacketBytes}))));
        coming.resize(after);
        read(coming.data() + before);
        if (!is_last) return {};
        return std::exchange(coming, {});
    }

  private:
    struct Write {
        uint64_t window;
        std::span<const RemoteCopy> copies;
        bool on_gpu;
        bool done = false;
    };
    struct Outbound {
        Packet packet;
        Write* write = nullptr;
        size_t copy = 0, at = 0;  // the next piece to send: index, and offset in it
    };
    struct Peer {
        std::mutex mutex;  // guards `leaving`
        std::deque<Outbound> leaving;
        Packet coming;  // the parts that have arrived
    };
    struct Window {
        uint32_t peer;
        WindowUser memory;
    };
    const Window* find_window(uint32_t from, uint64_t window) const;
    uint8_t* place_of(uint32_t from, const Record& record) const;
    static bool skip_to_next(Outbound& out);
    void finish(Outbound& out);

    std::vector<Peer> peers_;

    std::mutex windows_mutex_;
    std::unordered_map<uint64_t, Window> windows_;

    std::mutex writing_;  // acquired after a peer's mutex
    std::condition_variable written_;
    bool ended_ = false;
};

}  // namespace ta::share
