// One step on a GPU: step.cpp begins and ends it, step_append.cpp appends, step_attend.cpp attends.
#pragma once

#include <vector>

#include "kernels/cuda/any/append/append.h"
#include "src/attend/backend.h"
#include "src/attend/cuda/append_plans.h"
#include "src/attend/cuda/attend.h"
#include "src/attend/cuda/constants.h"
#include "src/attend/cuda/drafts.h"
#include "src/attend/cuda/expansion.h"
#include "src/attend/cuda/mass.h"
#include "src/attend/cuda/parts.h"
#include "src/attend/cuda/ranges.h"
#include "src/attend/cuda/schedules.h"
#include "src/attend/cuda/staging.h"
#include "src/attend/cuda/tables.h"
#include "src/attend/cuda/turned.h"
#include "src/device/cuda/capture.h"
#include "tiering/verify/cuda_hasher.h"

namespace ta {

using cuda::AppendArgs;
using cuda::AppendLayer;
using cuda::AttendArgs;

class CudaStep final : public StepBackend {
  public:
    CudaStep(Pool& pool, CudaDevice& device)
        : pool_(pool),
          device_(device),
          constants_(pool, device),
          tables_(pool, device),
          mass_(pool, device),
          staging_(pool, device),
          schedules_(device),
          ranges_(device),
          turned_(pool, device),
          decode_workspace_(device, "this shape of a batch"),
          prefill_parts_(device, "prompts"),
          expansion_(device),
          kept_(device),
          drafts_(pool, device),
          wide_{DeviceBuffer(device, "this many query rows"), DeviceBuffer(device, "this many new tokens"),
                DeviceBuffer(device, "this many new tokens"), DeviceBuffer(device, "this many query rows")},
          parts_(pool, device, stream_),
          hasher_(pool.pages(), device),
          redone_layers_(pool.geometry().layers) {}
    ~CudaStep() override;

    Status set_stream(ta_stream stream) override;
    Status begin(Step& step) override;
    Status copy_tokens(const Block& from, int tokens, Block& to) override;
    Result<TensorView> wide_tensor(Wide use, const TensorView& x, int64_t channels) override;
    Status copy_channels(Wide use, const TensorView& from, const TensorView& to) override;
    Result<TensorView> turn(uint32_t layer, const TensorView& q) override;
    Status hold_turned(const AttendCall& call, TensorView& out, float*& lse) override;
    Status join_turned(const TensorView& out, const float* lse, const AttendCall& call) override;
    Status append(uint32_t layer, const TensorView& k, const TensorView& v) override;
    Status attend(uint32_t layer, AttendCall& call) override;
    bool replays() const override { return schedules_.left_to_graph(); }
    Status may_end() const override;
    Status may_commit() const override;
    Status redo() override;
    Status seal() override;
    void finish() override;
    PartPath& parts() override { return parts_; }

  private:
    // The launches of a call, in this order; those of observed_ follow.
    struct Launches {
        AttendWork decode, prefill, lacking, trees;  // lacking: prompts that a prefill kernel cannot take together with the
                                                     // others
        bool any_decode = false, any_prefill = false, any_lacking = false, any_trees = false;
    };

    Status prepare();
    const cuda::AppendPlan& append_plan(uint32_t layer) const { return append_plans_.of(pool_.geometry().shape(layer)); }
    Status keep_anew(const Step& step);
    AppendLayer append_layer(uint32_t layer) const;
    AppendArgs append_args(uint32_t layer) const;
    const TreeRow* trees() const;
    Status check_tensors(const AttendCall& call) const;
    Status check_capture(const CaptureScope& capture) const;
    Status attend_in_ranges(uint32_t layer, const AttendCall& call);
    AttendArgs attend_args(uint32_t layer, const AttendCall& call) const;
    Status prepare_launches(const AttendArgs& args, const AttendCall& call, bool observed, Launches& launches);
    Status prepare_decode(AttendArgs args, const AttendCall& call, int max_rows, bool observed, AttendWork& work);
    void set_kind_of_pages(AttendArgs& a) const;
    Status prepare_prompts(const AttendArgs& args, const AttendCall& call, Launches& launches);
    Status prepare_without_channels(AttendArgs a, const AttendCall& call, ManyRowsKey::Blocks blocks, AttendWork& work,
                                    bool* replaced);
    Status prepare_prefill(AttendArgs args, const AttendCall& call, ManyRowsKey::Blocks blocks, AttendWork& work);
    Status prepare_trees(AttendArgs args, ta_p p, AttendWork& work);
    bool has_prompts(int group, ManyRowsKey::Only only, ManyRowsKey::Blocks blocks = ManyRowsKey::Blocks::kAll) const;
    bool lacks_pages(ManyRowsKey::Blocks blocks) const {
        return tables_.lacks_blocks() && blocks != ManyRowsKey::Blocks::kWhole && blocks != ManyRowsKey::Blocks::kPacked;
    }
    Status prepare_observed(const AttendArgs& args, ta_p p);
    static Status check_group(int group, const char* what);
    Status add_schedule(const AttendArgs& args, const ManyRowsKey& key, AttendWork& work);
    Status reserve_workspace(const AttendWork& work);
    Status stage(uint32_t layer, const AttendArgs& args, Launches& launches, bool* staged);
    Status launch(const Launches& launches);
    void see_call();
    KindOfStep kind_of_step() const;
    template <class Data>
    Status check_memory(const Data& data, const char* name) const {
        return check_device_memory(device_, data, name);
    }

    Pool& pool_;
    CudaDevice& device_;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t fence_ = nullptr;
    bool ran_ = false;              // something ran on stream_ since the fence was recorded last
    bool tables_are_last_ = false;  // the last kernel of the plan on the stream was the one that writes the tables
    Step* step_ = nullptr;

    CudaConstants constants_;
    CudaTables tables_;
    CudaMass mass_;
    CudaStaging staging_;
    CudaSchedules schedules_;
    CudaRanges ranges_;
    CudaTurned turned_;
    DeviceBuffer decode_workspace_;
    DeviceBuffer prefill_parts_;
    CudaExpansion expansion_;
    std::vector<const StepBlock*> anew_;  // blocks whose tokens the step changes, until seal()
    DeviceBuffer kept_;                   // the old tokens of all of anew_
    uint32_t redone_to_ = 0;              // layers below this one are appended again with the kept drafts
    CudaDrafts drafts_;
    DeviceBuffer wide_[4];  // by Wide
    CudaParts parts_;
    CudaHasher hasher_;
    std::vector<PlacedBlock> full_blocks_;
    std::vector<AttendWork> observed_;  // of the present call; see prepare_observed()
    AppendPlans append_plans_;
    std::vector<AppendLayer> redone_layers_;  // [layers], at the end of a step with drafts
};

}  // namespace ta
