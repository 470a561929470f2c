#include "src/io/finished_tickets.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "src/io/file_system.h"

namespace ta {

FinishedTickets::~FinishedTickets() {
    if (descriptor_ >= 0) close(descriptor_);
}

bool FinishedTickets::open() {
    std::lock_guard lock(mutex_);
    if (descriptor_ >= 0) return true;
    const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd >= 0) descriptor_ = above_standard_streams(fd);
    return descriptor_ >= 0;
}

int FinishedTickets::descriptor() const {
    std::lock_guard lock(mutex_);
    return descriptor_;
}

void FinishedTickets::signal() {
    std::lock_guard lock(mutex_);
    const uint64_t one = 1;
    if (descriptor_ >= 0) (void)!write(descriptor_, &one, sizeof one);
}

void FinishedTickets::expect(size_t tickets) {
    std::lock_guard lock(mutex_);
    tickets_.reserve(std::min(tickets_.size() + tickets, kMost));
}

void FinishedTickets::add(uint64_t ticket) noexcept {
    std::lock_guard lock(mutex_);
    if (tickets_.size() == kMost || tickets_.size() == tickets_.capacity()) {
        if (tickets_.empty()) return;
        tickets_.erase(tickets_.begin());
    }
    tickets_.push_back(ticket);
    const uint64_t one = 1;
    if (descriptor_ >= 0) (void)!write(descriptor_, &one, sizeof one);
}

size_t FinishedTickets::take(std::span<uint64_t> out) {
    std::lock_guard lock(mutex_);
    const size_t n = std::min(out.size(), tickets_.size());
    std::copy_n(tickets_.begin(), n, out.begin());
    tickets_.erase(tickets_.begin(), tickets_.begin() + ptrdiff_t(n));
    uint64_t count;
    if (tickets_.empty() && descriptor_ >= 0) (void)!read(descriptor_, &count, sizeof count);
    return n;
}

}  // namespace ta
