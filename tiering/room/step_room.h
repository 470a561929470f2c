// Room for a step: its blocks come to where the device reads them, then its new ones are taken. Waits for others who move or
// read blocks, and makes room, as far as the pool's settings go. Decides whether there can be room before published blocks
// or tokens are lost for it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "tiering/room/residency.h"

namespace ta {

// For a step of `sequences`. `reserve` takes its new blocks, which are `wanted`, all of them or none. `reading` is set from
// when the blocks are where they are to be read, in a pool with tiers, for the caller to end; not after a failure.
Status find_room_for_step(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted,
                          Patience patience, const std::function<Status()>& reserve, std::optional<uint64_t>& reading);

}  // namespace ta
