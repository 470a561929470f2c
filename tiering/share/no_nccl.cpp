// Replaces nccl.cpp in a build without CUDA.
#include "tiering/share/nccl.h"

namespace ta::share {
namespace {

Status no_cuda() {
    return fail(TA_E_UNSUPPORTED, "this build has no CUDA, which a group over NCCL needs");
}

}  // namespace

Result<GroupId> make_nccl_id() {
    return no_cuda();
}

int nccl_version() {
    return 0;
}

Result<std::unique_ptr<Transport>> join_nccl_group(const GroupId&, uint32_t, uint32_t, std::shared_ptr<Device>,
                                                   const NcclOptions&) {
    return no_cuda();
}

}  // namespace ta::share
