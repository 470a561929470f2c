// Ids of groups, without the help of other libraries: a kind and random bits. Remembers the ids of groups that have ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "src/core/status.h"

namespace ta::share {

inline constexpr size_t kGroupIdBytes = 128;
using GroupId = std::array<uint8_t, kGroupIdBytes>;

enum class GroupKind : int32_t { kLocal = 1, kHost, kNccl };

// Makes an id that no other call makes. Not for kNccl, whose ids NCCL makes.
GroupId make_id(GroupKind kind);
// kNccl: true for any id.
bool is_of(const GroupId& id, GroupKind kind);

uint64_t name_of(const GroupId& id);

// The names of the last groups that ranks of this process have left. Other ranks do not join these: the first would never come.
class EndedGroups {
  public:
    static EndedGroups& of_this_process();
    static constexpr size_t kMost = 4096;
    void add(uint64_t name);
    bool has(uint64_t name) const;

  private:
    mutable std::mutex mutex_;
    std::array<uint64_t, kMost> names_{};  // allocated up front
    size_t n_ = 0;
};
// The error for joining an ended group.
Status ended_group();

}  // namespace ta::share
