// Files that are none: SinkFile passes what is written to a callback, MemoryFile reads from memory. Each is one file, under any
// name.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "src/io/file_system.h"

namespace ta {

// Operations that neither of the two supports.
class NoFiles : public FileSystem {
  public:
    int open(const char*, int, mode_t) override { return kFile; }
    int close(int) override { return 0; }
    int64_t pread(int, void*, size_t, uint64_t) override { return -ENOSYS; }
    int64_t pwrite(int, const void*, size_t, uint64_t) override { return -ENOSYS; }
    int fallocate(int, uint64_t, uint64_t) override { return -ENOSYS; }
    int ftruncate(int, uint64_t) override { return -ENOSYS; }
    int fsync(int) override { return 0; }
    int fstat(int, FileInfo&) override { return -ENOSYS; }
    int lstat(const char*, FileInfo&) override { return -ENOENT; }
    int rename(const char*, const char*) override { return -ENOSYS; }
    int link(int, const char*) override { return -ENOSYS; }
    bool can_link(int) override { return false; }
    int unlink(const char*) override { return -ENOSYS; }
    int list(const char*, const std::function<void(const char*)>&) override { return -ENOSYS; }
    int lock(int) override { return -ENOSYS; }
    int unlock(int) override { return -ENOSYS; }
    int clear_direct(int) override { return -ENOSYS; }
    std::unique_ptr<IoQueue> make_queue(unsigned, std::string&) override { return nullptr; }

  private:
    static constexpr int kFile = 1000;  // a descriptor that nobody looks at
};

// `write` returns false to stop.
class SinkFile final : public NoFiles {
  public:
    using Write = std::function<bool(uint64_t offset, const void* data, uint64_t bytes)>;
    explicit SinkFile(Write write) : write_(std::move(write)) {}

    int64_t pwrite(int, const void* data, size_t bytes, uint64_t offset) override {
        bytes_ = std::max<uint64_t>(bytes_, offset + bytes);
        stopped_ = stopped_ || !write_(offset, data, bytes);
        return stopped_ ? -ECANCELED : int64_t(bytes);
    }
    bool stopped() const { return stopped_; }
    uint64_t bytes() const { return bytes_; }

  private:
    const Write write_;
    bool stopped_ = false;
    uint64_t bytes_ = 0;
};

class MemoryFile final : public NoFiles {
  public:
    explicit MemoryFile(std::span<const uint8_t> bytes) : bytes_(bytes) {}

    int64_t pread(int, void* data, size_t bytes, uint64_t offset) override {
        const size_t n = offset < bytes_.size() ? std::min<size_t>(bytes, bytes_.size() - offset) : 0;
        if (n > 0) std::memcpy(data, bytes_.data() + offset, n);
        return int64_t(n);
    }
    int fstat(int, FileInfo& info) override {
        info.bytes = bytes_.size();
        info.regular = true;
        return 0;
    }

  private:
    const std::span<const uint8_t> bytes_;
};

}  // namespace ta
