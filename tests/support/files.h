// Files of tests: a folder of one's own, whole files read and written.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace ta::testing {

// Removed with what is in it. In memory where possible, so that sweeps of thousands of runs do not wait for a disk.
class Folder {
  public:
    explicit Folder(bool in_memory = true) {
        const char* given = std::getenv("TMPDIR");
        std::string base = in_memory && access("/dev/shm", W_OK) == 0 ? "/dev/shm" : given ? given : "/tmp";
        base += "/ta-test-XXXXXX";
        if (!mkdtemp(base.data())) throw std::runtime_error(base + ": cannot be created");
        path_ = base;
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    const std::string& path() const { return path_; }
    std::string file(const char* name) const { return path_ + "/" + name; }
    size_t entries() const {
        size_t n = 0;
        for ([[maybe_unused]] const auto& e : std::filesystem::directory_iterator(path_)) ++n;
        return n;
    }

  private:
    std::string path_;
};

inline std::vector<char> read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
inline void write_file(const std::string& path, const std::vector<char>& bytes) {
    std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

}  // namespace ta::testing
