// Ids of groups that need no other library: what kind they are of, and random bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ta::share {

inline constexpr size_t kGroupIdBytes = 128;
using GroupId = std::array<uint8_t, kGroupIdBytes>;

enum class GroupKind : int32_t { kLocal = 1, kHost, kNccl };

// One that no other call gives out; not of kNccl, whose ids are NCCL's.
GroupId make_id(GroupKind kind);
// Any may be of kNccl.
bool is_of(const GroupId& id, GroupKind kind);

}  // namespace ta::share
