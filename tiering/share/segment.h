// Memory that processes of one host share for the ranks of one group: a ring of records for each pair of ranks and direction, a
// bell for each rank, and a table of the GPU memory that a rank shares. It is a file in /dev/shm that only this user may open;
// its name is removed once all ranks have joined. A rank holds a lock of the file for as long as its process lives.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tiering/share/stream.h"

namespace ta::share {

inline constexpr uint32_t kMostHostRanks = 63;  // a bit for each in SharedSlot::mapped
inline constexpr size_t kSharedSlots = 256;     // that a rank may share at once

// Records from one writing process to one reading process. Either may die at any instruction: an incomplete record is never
// seen.
class Ring {
  public:
    struct Header {
        alignas(64) std::atomic<uint64_t> head;  // bytes ever written
        alignas(64) std::atomic<uint64_t> tail;  // bytes ever read
        std::atomic<uint32_t> starved;           // the writer waits for room
    };
    Ring(Header* header, uint8_t* data, uint64_t size) : header_(header), data_(data), size_(size) {}

    uint64_t most() const { return size_ / 4; }  // the longest body of a record
    // False: no room.
    bool put(const Record& record, const uint8_t* body);
    // Looks at the oldest record; kDamaged: the ring's content is no record.
    enum class Next { kNone, kRecord, kDamaged };
    Next next(Record& record) const;
    void read(const Record& record, uint8_t* body) const;
    void drop(const Record& record);
    // Asks the reader to signal room. True: there is already room for so many bytes.
    bool starve(size_t bytes);
    // Called by the reader after it made room. True: the writer waits for it.
    bool was_starved() { return header_->starved.exchange(0, std::memory_order_seq_cst) != 0; }

  private:
    void copy_out(uint64_t at, uint8_t* to, size_t bytes) const;
    void copy_in(uint64_t at, const uint8_t* from, size_t bytes);
    uint64_t room() const;

    Header* header_;
    uint8_t* data_;
    uint64_t size_;
};

struct SharedSlot {
    static constexpr uint64_t kOpen = uint64_t{1} << 63;  // bit of `mapped`: peers may still find the memory
    std::atomic<uint64_t> number;                         // 0: free
    std::atomic<uint64_t> mapped;                         // bit r: rank r has it mapped
};

struct RankArea {
    enum : uint32_t { kAbsent, kJoined, kWarm, kLeft };
    alignas(64) std::atomic<uint32_t> state;
    std::atomic<uint32_t> sleeping;
    alignas(64) std::atomic<uint32_t> bell;
    // Written before the rank joins.
    uint64_t process;  // differs from process to process
    uint32_t has_gpu;
    int32_t ordinal;   // of the rank's GPU, in its process
    char gpu[32];      // PCI address of the rank's GPU
    MemoryName probe;  // memory of this GPU, with which peers test whether they reach it
    // Written before the rank is warm.
    uint64_t reaches;                      // bit r: this rank's GPU reads memory of rank r's GPU
    uint64_t bytes_per_s[kMostHostRanks];  // as measured
    SharedSlot slots[kSharedSlots];
};

class Segment {
  public:
    // Joins the segment of that name, or makes it. The rank counts as joined only when its area says so. TA_E_UNSUPPORTED: no
    // shared memory here. TA_E_MEMORY: /dev/shm is full. TA_E_INVALID: the rank has joined already. TA_E_MISMATCH: another
    // number of ranks. TA_E_STALE: the group has ended.
    static Result<std::shared_ptr<Segment>> join(uint64_t name, uint32_t rank, uint32_t ranks);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    uint32_t rank() const { return rank_; }
    uint32_t ranks() const { return ranks_; }
    RankArea& area(uint32_t rank) const;
    Ring ring(uint32_t from, uint32_t to) const;
    // True if the process of a joined rank lives.
    bool alive(uint32_t rank) const;
    void ring_bell(uint32_t rank) const;
    // Waits until this rank's bell has rung more than `heard` times.
    void wait_for_bell(uint32_t heard, Time until) const;
    // After this nobody can join.
    void remove_name();

  private:
    Segment(int file, std::string path, uint8_t* memory, size_t bytes, uint32_t rank, uint32_t ranks);
    struct Header;
    Header& header() const;

    int file_;
    std::string path_;
    uint8_t* memory_;
    size_t bytes_;
    uint32_t rank_, ranks_;
};

}  // namespace ta::share
