// Our declarations of NCCL beside NCCL's, where its header is installed.
#include <gtest/gtest.h>

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

#include <cstring>
#include <type_traits>

#include "tiering/share/nccl_library.h"

namespace ta::share::nccl {
namespace {

static_assert(kSuccess == ncclSuccess && kInProgress == ncclInProgress && kBytes == ncclUint8);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking) &&
              offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs) &&
              offsetof(Config, net_name) == offsetof(ncclConfig_t, netName) &&
              offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare) && sizeof(Config) <= sizeof(ncclConfig_t));

TEST(NcclHeader, OurConfigIsTheBeginningOfTheirs) {
    const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
    Config ours;
    EXPECT_EQ(ours.magic, theirs.magic);
    EXPECT_LE(ours.version, theirs.version);
    EXPECT_EQ(Config::kUnset, NCCL_CONFIG_UNDEF_INT);
    EXPECT_EQ(std::memcmp(&ours.blocking, &theirs.blocking, offsetof(Config, split_share) - offsetof(Config, blocking)), 0);
}

}  // namespace
}  // namespace ta::share::nccl
#else
TEST(NcclHeader, OurConfigIsTheBeginningOfTheirs) {
    GTEST_SKIP() << "nccl.h is not installed";
}
#endif
