// Tickets that have finished and that nobody has taken yet, with a file descriptor that can be read while there are some.
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
    static constexpr size_t kMost = 4096;  // the last ones are kept

    FinishedTickets() = default;
    ~FinishedTickets();
    FinishedTickets(const FinishedTickets&) = delete;
    FinishedTickets& operator=(const FinishedTickets&) = delete;

    // Makes the descriptor, if there is none: from then on tickets are kept. False: the system gives none.
    bool open();
    // -1: there is none.
    int descriptor() const;
    // The descriptor can be read, though there may be no ticket.
    void signal();
    // Takes the memory for so many tickets that are not finished yet. Throws std::bad_alloc.
    void expect(size_t tickets);
    void add(uint64_t ticket) noexcept;
    // Takes the oldest ones; how many. With the last one the descriptor cannot be read any more.
    size_t take(std::span<uint64_t> out);

  private:
    mutable std::mutex mutex_;
    int descriptor_ = -1;
    std::vector<uint64_t> tickets_;  // oldest first
};

}  // namespace ta
