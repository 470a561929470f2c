#include "tiering/verify/block_check.h"

#include <memory>

#include "tiering/store/blocks.h"

namespace ta {

BlockCheck make_block_check(const Geometry& geometry, uint64_t fingerprint) {
    // A shared_ptr, since std::function copies its callable.
    return [g = std::make_shared<const Geometry>(geometry), fingerprint](const BlockIdentity& id, uint8_t slot_class,
                                                                         const uint8_t* slot) {
        return verify_slot(*g, PageKind(slot_class), slot, fingerprint, id.block_index, id.content_id, id.tokens);
    };
}

BlockCheck make_value_check(const Geometry& geometry, bool k_turning) {
    return [g = std::make_shared<const Geometry>(geometry), k_turning](const BlockIdentity& id, uint8_t slot_class,
                                                                       const uint8_t* slot) {
        return check_values(*g, k_turning, PageKind(slot_class), slot, id.block_index);
    };
}

}  // namespace ta
