// ta_attend_dense: quantizes K and V tensors to INT8 token pages in a workspace and attends to them. A GPU's version:
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
    int group_size = 0;  // of TA_DENSE_DISTR
    bool saturate = false;
    AttendSettings settings;
    ta_stream stream = nullptr;  // of a GPU

    int levels() const { return variant == TA_DENSE_INT8_PAGE ? kStage1Levels : kIntFlashLevels; }
    ta_granularity v_scale() const {
        if (v_granularity != TA_GRANULARITY_DEFAULT) return v_granularity;
        return variant == TA_DENSE_INT8_PAGE ? TA_GRANULARITY_PAGE : TA_GRANULARITY_TENSOR;
    }
};

// Inputs are checked already, but for what check_dense() checks.
Status attend_dense(Context& context, const DenseCall& call);
// Looks at the memory and the stream. Reports values that are not finite on a CPU, memory that a GPU does not reach, a stream that
// is captured; on a GPU also values that earlier calls replaced and that no call has reported.
Status check_dense(Context& context, const DenseCall& call);
// Enqueues it on its stream.
Status attend_dense_on_gpu(CudaDevice& device, const DenseCall& call);
Status check_dense_on_gpu(CudaDevice& device, const DenseCall& call);

}  // namespace ta
