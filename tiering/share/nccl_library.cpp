#include "tiering/share/nccl_library.h"

#include <dlfcn.h>

#include <mutex>

namespace ta::share::nccl {
namespace {

constexpr char kName[] = "libnccl.so.2";
constexpr int kOldest = 22700;

template <class Function>
bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

}  // namespace

Result<const Library*> Library::open() {
    static std::mutex mutex;
    static Library library{};
    const std::lock_guard lock(mutex);
    if (library.version != 0) return static_cast<const Library*>(&library);
    void* const found = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
    if (!found) return fail(TA_E_UNSUPPORTED, "a group over NCCL needs %s: %s", kName, dlerror());
    Library l{};
    const bool all = find(found, "ncclGetVersion", l.GetVersion) && find(found, "ncclGetUniqueId", l.GetUniqueId) &&
                     find(found, "ncclCommInitRankConfig", l.CommInitRankConfig) && find(found, "ncclCommAbort", l.CommAbort) &&
                     find(found, "ncclCommGetAsyncError", l.CommGetAsyncError) && find(found, "ncclCommCount", l.CommCount) &&
                     find(found, "ncclCommUserRank", l.CommUserRank) && find(found, "ncclAllGather", l.AllGather) &&
                     find(found, "ncclSend", l.Send) && find(found, "ncclRecv", l.Recv) &&
                     find(found, "ncclGroupStart", l.GroupStart) && find(found, "ncclGroupEnd", l.GroupEnd) &&
                     find(found, "ncclGetErrorString", l.GetErrorString);
    int version = 0;
    if (!all || l.GetVersion(&version) != kSuccess || version < kOldest) {
        dlclose(found);
        return fail(TA_E_UNSUPPORTED, "%s is of NCCL %d.%d; a group needs 2.27 or newer", kName, version / 10000,
                    version / 100 % 100);
    }
    l.version = version;
    library = l;
    return static_cast<const Library*>(&library);
}

}  // namespace ta::share::nccl
