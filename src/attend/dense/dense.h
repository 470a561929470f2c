// ta_attend_dense on a CPU: quantizes K and V to INT8 token pages in a workspace, and attends to them. For GPUs:
// src/attend/dense/cuda_dense.h.
#pragma once

#include <memory>
#include <span>

#include "kernels/format/codec.h"
#include "src/attend/call.h"

namespace ta {

class Context;
class CudaDevice;

struct DenseCall {
    TensorView q, k, v, out;
    float* lse = nullptr;
    std::span<const int64_t> q_offsets, k_offsets;  // [batch + 1]
    ta_dense_variant variant = TA_DENSE_INT8_PAGE;
    ta_granularity v_granularity = TA_GRANULARITY_DEFAULT;
    int group_size = 0;  // for TA_DENSE_DISTR
    bool saturate = false;
    AttendSettings settings;
    ta_stream stream = nullptr;  // of a GPU

    int levels() const { return variant == TA_DENSE_INT8_PAGE ? kStage1Levels : kIntFlashLevels; }
    ta_granularity v_scale() const {
        if (v_granularity != TA_GRANULARITY_DEFAULT) return v_granularity;
        return variant == TA_DENSE_INT8_PAGE ? TA_GRANULARITY_PAGE : TA_GRANULARITY_TENSOR;
    }
};

// The caller has checked all that check_dense() does not check.
Status attend_dense(Context& context, const DenseCall& call);
// Checks memory and stream. On a CPU: values that are not finite. On a GPU: memory that it cannot reach, and a stream that is
// captured; also reports values that earlier calls replaced and no call has reported.
Status check_dense(Context& context, const DenseCall& call);
// Enqueues the call on its stream.
Status attend_dense_on_gpu(CudaDevice& device, const DenseCall& call);
Status check_dense_on_gpu(CudaDevice& device, const DenseCall& call);

}  // namespace ta
