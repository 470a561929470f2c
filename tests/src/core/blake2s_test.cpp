// BLAKE2s against values of another implementation (Python's hashlib) and RFC 7693, appendix B.
#include "src/core/blake2s.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace ta {
namespace {

std::string hex(const Blake2sDigest& digest) {
    std::string s;
    for (uint8_t x : digest) {
        s += "0123456789abcdef"[x >> 4];
        s += "0123456789abcdef"[x & 15];
    }
    return s;
}

TEST(Blake2s, KnownValues) {
    std::vector<uint8_t> counted(200);
    std::iota(counted.begin(), counted.end(), uint8_t{0});
    EXPECT_EQ(hex(blake2s(nullptr, 0, "abc", 3)), "508c5e8c327c14e2e1a72ba34eeb452f37458b209ed63a294d999b4c86675982");
    EXPECT_EQ(hex(blake2s(counted.data(), 32, counted.data(), 200)),
              "13c88480a5d00d6c8c7ad2110d76a82d9b70f4fa6696d4e5dd42a066dcaf9920");
    EXPECT_EQ(hex(blake2s(counted.data(), 32, counted.data(), 64)),
              "8975b0577fd35566d750b362b0897a26c399136df07bababbde6203ff2954ed4");
    EXPECT_EQ(hex(blake2s(counted.data(), 32, nullptr, 0)), "48a8997da407876b3d79c0d92325ad3b89cbb754d86ab71aee047ad345fd2c49");
}

}  // namespace
}  // namespace ta
