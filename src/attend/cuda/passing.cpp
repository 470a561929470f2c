#include "src/attend/cuda/passing.h"

#include "src/page/trailer.h"

namespace ta {

Status copy_passing(const Geometry& g, CudaDevice& device, Step& step, cudaEvent_t fence, cudaStream_t stream) {
    if (!step.any_passes()) return {};
    // Slots that came after begin may be from plans whose kernels still read there.
    TA_RETURN_IF_ERROR(device.wait_for_fences(stream, fence));
    const auto copy = [&](uint8_t* to, const uint8_t* from, size_t bytes) {
        return device.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying pages that stay");
    };
    for (StepMember& m : step.members) {
        for (const PassingBlock& p : m.passing) {
            const Block& whole = m.block(p.index);
            const LastingPages pages = lasting_pages(g, whole.kind());
            uint8_t* const to = p.to->slot();
            if (pages.payload > 0) TA_RETURN_IF_ERROR(copy(to, whole.slot(), pages.payload));
            TA_RETURN_IF_ERROR(copy(to + pages.payload, whole.slot() + pages.trailer_from, pages.trailer));
            if (pages.rest == 0) continue;
            TA_RETURN_IF_ERROR(
                device.check(cudaMemsetAsync(to + pages.payload + pages.trailer, 0, pages.rest, stream), "the end of a block"));
        }
    }
    return {};
}

}  // namespace ta
