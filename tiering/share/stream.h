// Shared by transports that carry records from one process to another: packets and the bytes for windows leave for each peer
// in the order of the calls, cut into records, and are put together again where they come.
#pragma once

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
        kBytes,       // for a window
        kGpuBytes,    // for one on a GPU: they come another way
    };
    uint32_t bytes;  // that follow
    Kind kind;
    uint64_t window, at;  // of bytes: where they go in that window
};
static_assert(sizeof(Record) == 24);

class StreamTransport : public Transport {
  public:
    explicit StreamTransport(uint32_t ranks) : peers_(ranks) {}

    void send(uint32_t to, Packet packet, bool heartbeat) override;
    void end_writes() override;
    void open_window(uint64_t window, uint32_t peer, WindowMemory memory) override;
    void close_window(uint64_t window) override;
    Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu) override;

  protected:
    // Something has been added for the peer; under its mutex.
    virtual void leaves(uint32_t to) = 0;

    // The next record that leaves for a peer; under its mutex. False: nothing.
    bool next_record(uint32_t to, size_t most, Record& record, const uint8_t*& body);
    void record_has_left(uint32_t to, const Record& record);
    std::mutex& mutex_of(uint32_t to) { return peers_[to].mutex; }
    std::vector<Packet> take_packets(uint32_t to);  // that have not begun to leave; under its mutex
    // The same of what a GPU has for a GPU, once no record is before it. The write is over when gpu_pieces_have_left() is called
    // after its last piece was taken.
    bool next_gpu_piece(uint32_t to, size_t most, Record& record, const uint8_t*& from);
    void gpu_pieces_have_left(uint32_t to);
    size_t gpu_pieces_left(uint32_t to) const;  // of that write, at least
    // The group has ended: until nothing reads pieces that next_gpu_piece() gave.
    virtual void wait_for_pieces(uint32_t) {}
    // The window that such a piece is for, if it may go there. It is not closed before the user is gone.
    using WindowUser = std::shared_ptr<const WindowMemory>;
    WindowUser use_window(uint32_t from, const Record& record);
    // Lets users go: who closes their windows waits for that.
    void drop_users(std::vector<WindowUser>& users);
    virtual void wait_for_users(std::unique_lock<std::mutex>& lock) { users_changed_.wait(lock); }
    std::mutex users_mutex_;
    std::condition_variable users_changed_;

    // Takes the next incoming record; one thread. `read(to)` copies the body of the record. Gives the packet that is whole with it.
    template <class Read>
    std::optional<Packet> take_record(uint32_t from, const Record& record, Read&& read) {
        if (record.kind == Record::Kind::kBytes) {
            const std::lock_guard lock(windows_mutex_);
            if (uint8_t* const to = place_of(from, record)) read(to);
            return {};
        }
        if (record.kind == Record::Kind::kGpuBytes) return {};
        Packet& coming = peers_[from].coming;
        const size_t before = coming.size();
        coming.resize(before + record.bytes);
        read(coming.data() + before);
        if (record.kind != Record::Kind::kPacketEnd) return {};
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
        size_t copy = 0, at = 0;  // what goes next
    };
    struct Peer {
        std::mutex mutex;  // of what leaves
        std::deque<Outbound> leaving;
        Packet coming;  // the parts that are there
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

    std::mutex writing_;  // below a peer's
    std::condition_variable written_;
    bool ended_ = false;
};

}  // namespace ta::share
