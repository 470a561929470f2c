// Tells which process made an object, without a system call.
#pragma once

#include <atomic>
#include <cstdint>

namespace ta {

// A child process has another mark, however it was made, unless it shares its parent's memory (vfork, CLONE_VM).
class ProcessMark {
  public:
    // The mark of this process.
    static ProcessMark here();

    bool is_here() const { return place_ ? place_->load(std::memory_order_relaxed) == value_ : is_pid(); }

  private:
    ProcessMark(const std::atomic<uint64_t>* place, uint64_t value) : place_(place), value_(value) {}
    bool is_pid() const;

    const std::atomic<uint64_t>* place_;  // reads differently in a child; nullptr: value_ is a process id
    uint64_t value_;
};

}  // namespace ta
