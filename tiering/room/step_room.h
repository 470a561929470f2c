// Room for a step: promotes its blocks to tiers that the device reads, then takes its new blocks. Waits for others who move or
// read blocks, and makes room, as far as the pool's settings allow. Decides whether there can be room before published blocks
// or tokens are lost for it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "tiering/room/residency.h"

namespace ta {

// Finds room for a step of `sequences`. `reserve` takes its new blocks, `wanted`, all or none. `reading` is set when the blocks
// are in place: the caller ends that reading. After a failure it is not set.
Status find_room_for_step(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted,
                          Patience patience, const std::function<Status()>& reserve, std::optional<uint64_t>& reading);

}  // namespace ta
