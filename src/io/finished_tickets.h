// A list of finished tickets that nobody has taken yet, with a descriptor that is readable while the list is not empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace ta {

// Thread-safe.
class FinishedTickets {
  public:
    static constexpr size_t kMost = 4096;  // beyond that, the oldest are dropped

    FinishedTickets() = default;
    ~FinishedTickets();
    FinishedTickets(const FinishedTickets&) = delete;
    FinishedTickets& operator=(const FinishedTickets&) = delete;

    // Makes the descriptor, unless there is one: from then on tickets are kept. False: the system gave no descriptor.
    bool open();
    // -1: there is none.
    int descriptor() const;
    // Makes the descriptor readable even if there is no ticket.
    void signal();
    // Reserves memory for this many tickets that are not finished yet. Throws std::bad_alloc.
    void expect(size_t tickets);
    void add(uint64_t ticket) noexcept;
    // Takes the oldest tickets and returns how many. When the last one is taken, the descriptor stops being readable.
    size_t take(std::span<uint64_t> out);

  private:
    mutable std::mutex mutex_;
    int descriptor_ = -1;
    std::vector<uint64_t> tickets_;  // oldest first
};

}  // namespace ta
