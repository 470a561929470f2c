#include "src/core/device.h"

#include <cstring>

namespace ta {
namespace {

class FinishedTransfer final : public DeviceTransfer {
  public:
    Status wait() override { return {}; }
    MoveRoute route() const override { return MoveRoute::kCopyEngine; }
};

}  // namespace

Result<std::unique_ptr<DeviceTransfer>> Device::start_copy(std::span<const DeviceCopy> copies, const CopyOptions& options) {
    auto transfer = std::make_unique<FinishedTransfer>();
    TA_RETURN_IF_ERROR(copy(copies, options.to_host));
    return std::unique_ptr<DeviceTransfer>(std::move(transfer));
}

Result<bool> Device::reach(std::span<const int>) {
    return false;
}

Result<ExportedMemory> Device::export_memory(const uint8_t*) {
    return fail(TA_E_UNSUPPORTED, "%s does not share its memory with other processes", name());
}

Result<ImportedMemory> Device::import_memory(const ExportedMemory&) {
    return fail(TA_E_UNSUPPORTED, "%s does not map memory of other processes", name());
}

Status Device::zero(std::span<const DeviceRange> ranges) {
    TA_RETURN_IF_ERROR(wait_for_steps());
    for (const DeviceRange& r : ranges) std::memset(r.memory, 0, r.bytes);
    return {};
}

}  // namespace ta
