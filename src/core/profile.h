// Ranges for profilers such as Nsight Systems (NVTX, domain "turboattention"). Without CUDA it does nothing.
#pragma once

#ifdef TA_HAVE_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace ta {

class ProfileRange {
  public:
#ifdef TA_HAVE_CUDA
    explicit ProfileRange(const char* name) {
        nvtxEventAttributes_t range{};
        range.version = NVTX_VERSION;
        range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        range.messageType = NVTX_MESSAGE_TYPE_ASCII;
        range.message.ascii = name;
        nvtxDomainRangePushEx(domain(), &range);
    }
    ~ProfileRange() {
        nvtxDomainRangePop(domain());
    }
#else
    explicit ProfileRange(const char*) {}
#endif
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;

#ifdef TA_HAVE_CUDA
  private:
    static nvtxDomainHandle_t domain() {
        static const nvtxDomainHandle_t handle = nvtxDomainCreateA("turboattention");
        return handle;
    }
#endif
};

}  // namespace ta
