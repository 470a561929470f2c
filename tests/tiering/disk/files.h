// The file of a persistent disk tier, and what tests do to it.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tiering/disk/model.h"

namespace ta::testing {

inline constexpr size_t kSlot = 5000, kRecord = 3 * 4096, kFirst = 2 * 4096;

class DiskFiles : public ::testing::Test {
  protected:
    DiskTierOptions options() {
        DiskTierOptions o;
        o.persistent = true;
        o.path = path;
        o.budget = 200000;
        o.slot_bytes[1] = kSlot;
        o.fingerprint = 5;
        o.threads = 1;
        o.use_uring = use_uring;
        return o;
    }
    std::unique_ptr<DiskTier> open(const DiskTierOptions& o, std::shared_ptr<FileSystem> files = system_files()) {
        Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(std::move(files), o);
        if (tier.ok()) {
            if (keep) tier.value()->keep_file();
            return tier.take();
        }
        why = std::move(tier).status();
        return nullptr;
    }
    std::unique_ptr<DiskTier> open() { return open(options()); }
    // A file with n blocks.
    void make(size_t n) {
        auto tier = open();
        ASSERT_TRUE(tier) << is_ok(why).message();
        const std::vector<uint8_t> wanted(n, 1);
        Result<std::vector<Slot>> slots = tier->acquire(wanted);
        ASSERT_TRUE(slots.ok());
        for (size_t i = 0; i < n; ++i) ASSERT_TRUE(write_block(*tier, slots.value()[i], make_identity(i, 100 + i)));
    }
    std::vector<uint8_t> bytes() const {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    void store(const std::vector<uint8_t>& all) const {
        std::ofstream out(path, std::ios::binary | std::ios::in);
        out.write(reinterpret_cast<const char*>(all.data()), std::streamsize(all.size()));
    }
    void change(size_t at, const std::function<uint8_t(uint8_t)>& f) const {
        const int fd = ::open(path.c_str(), O_RDWR);
        uint8_t b = 0;
        ASSERT_EQ(pread(fd, &b, 1, off_t(at)), 1);
        b = f(b);
        ASSERT_EQ(pwrite(fd, &b, 1, off_t(at)), 1);
        close(fd);
    }
    void flip(size_t at, int bit) const {
        change(at, [bit](uint8_t b) { return uint8_t(b ^ 1 << bit); });
    }

    // In a file as small as these a region holds one record.
    static size_t record_at(Slot s) { return kFirst + s.index / SlotMap::kIndicesPerRegion * kRecord; }

    Folder folder;
    const std::string path = folder.file("tier");
    bool use_uring = false, keep = true;
    Status why;
};

}  // namespace ta::testing
