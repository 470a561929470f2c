// Checks of blocks that have arrived, for verifiers that cannot start one and go on.
#include <memory>
#include <span>
#include <vector>

#include "src/core/device.h"
#include "tiering/store/blocks.h"

namespace ta {
namespace {

class CheckWhenWaited final : public ArrivalCheck {
  public:
    CheckWhenWaited(BlockVerifier& verifier, std::span<const PlacedBlock> blocks)
        : verifier_(verifier), blocks_(blocks.begin(), blocks.end()) {}
    Status wait(std::span<Status> statuses) override { return verifier_.verify(blocks_, statuses); }

  private:
    BlockVerifier& verifier_;
    const std::vector<PlacedBlock> blocks_;
};

}  // namespace

Result<std::unique_ptr<ArrivalCheck>> BlockVerifier::start(std::span<const PlacedBlock> blocks, const DeviceTransfer&) {
    return std::unique_ptr<ArrivalCheck>(std::make_unique<CheckWhenWaited>(*this, blocks));
}

}  // namespace ta
