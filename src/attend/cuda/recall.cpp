#include "src/attend/cuda/recall.h"

#include "kernels/cuda/any/append/append.h"

namespace ta {

Status recall_scales(const Step& step, const Pool& pool, const CudaDevice& device, const CudaConstants& constants,
                     const CudaTables& tables, cudaStream_t stream) {
    const Geometry& g = pool.geometry();
    cuda::RecallArgs args{};
    const auto send = [&]() -> Status {
        args.head_dim = int32_t(g.common.head_dim);  // the same in all layers, under universal scales
        args.kv_heads = int32_t(g.common.kv_heads);
        args.layers = int32_t(g.layers);
        args.table = tables.entries();
        if (g.has_channel_blocks()) {
            args.channel_layer_offset = constants.layer_offsets(PageKind::kChannel);
            args.channel_heads = constants.heads(PageKind::kChannel, 0);
        }
        if (g.falls) {
            args.low_layer_offset = constants.layer_offsets(PageKind::kLow);
            args.low_heads = constants.heads(PageKind::kLow, 0);
        }
        args.token_own_scales = g.own_scales_offset(0, 0);
        args.k_turning = pool.numerics().encode.k_turning;
        args.token_page_bytes = g.page_bytes(PageKind::kToken, 0);
        args.largest_scales = pool.sequences().records().largest_scales();
        return device.check(cudaError_t(cuda::launch_recall(args, stream)), "finding universal scales");
    };
    for (const StepMember& m : step.members) {
        if (!m.recalls) continue;
        args.of[args.sequences++] = {int32_t(tables.first_entry(*m.sequence)), int32_t(Step::untouched_blocks(m)),
                                     m.touched.front().have, int32_t(m.sequence->slot)};
        if (args.sequences < cuda::RecallArgs::kMostSequences) continue;
        TA_RETURN_IF_ERROR(send());
        args.sequences = 0;
    }
    return args.sequences > 0 ? send() : Status();
}

}  // namespace ta
