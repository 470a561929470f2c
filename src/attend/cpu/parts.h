// How parts of partitioned steps travel on a CPU.
#pragma once

#include "src/attend/partition.h"
#include "src/core/context.h"

namespace ta {

class CpuParts final : public PartPath {
  public:
    explicit CpuParts(Context& context) : context_(context), own_(context.allocator()) {}

    Status begin(const PartitionedCalls& step, uint64_t arguments) override;
    Status reserve(AttendCall& own) override;
    Status exchange(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) override;
    Status settle(const PartitionedCalls&) override { return {}; }
    void end(bool) noexcept override { own_.trim(); }

  private:
    Context& context_;
    Buffer own_;  // O and LSE
};

}  // namespace ta
