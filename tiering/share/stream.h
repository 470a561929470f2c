// What transports have in common that carry records from one process to another: packets and the bytes for windows leave for each peer
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
    };
    uint32_t bytes;  // that follow
    Kind kind;
    uint64_t window, address;  // of kBytes
};
static_assert(sizeof(Record) == 24);

class StreamTransport : public Transport {
  public:
    explicit StreamTransport(uint32_t ranks) : peers_(ranks) {}

    void send(uint32_t to, Packet packet, bool heartbeat) override;
    void end_writes() override;
    void open_window(uint64_t window, uint32_t peer, std::span<uint8_t> memory) override;
    void close_window(uint64_t window) override;
    Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies) override;

  protected:
    // Something has been added for the peer; under its mutex.
    virtual void leaves(uint32_t to) = 0;

    // What leaves for a peer, record by record; under its mutex. False: nothing.
    bool next_record(uint32_t to, size_t most, Record& record, const uint8_t*& body);
    void record_has_left(uint32_t to, const Record& record);
    std::mutex& mutex_of(uint32_t to) { return peers_[to].mutex; }
    std::vector<Packet> take_packets(uint32_t to);  // that have not begun to leave; under its mutex

    // What comes; one thread. `read(to)` copies the body of the record. The packet that is whole with it.
    template <class Read>
    std::optional<Packet> take_record(uint32_t from, const Record& record, Read&& read) {
        if (record.kind == Record::Kind::kBytes) {
            const std::lock_guard lock(windows_mutex_);
            if (uint8_t* const to = place_of(from, record)) read(to);
            return {};
        }
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
        std::span<uint8_t> memory;
    };
    uint8_t* place_of(uint32_t from, const Record& record) const;
    void finish(Outbound& out);

    std::vector<Peer> peers_;

    std::mutex windows_mutex_;
    std::unordered_map<uint64_t, Window> windows_;

    std::mutex writing_;  // below a peer's
    std::condition_variable written_;
    bool ended_ = false;
};

}  // namespace ta::share
