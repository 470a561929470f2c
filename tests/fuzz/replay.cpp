// The main program of a fuzz target where there is no fuzzer: runs it on files.
//
//   fuzz_TARGET FILE-OR-FOLDER...     on each file, in the order of names
//   fuzz_TARGET --write FOLDER        writes the seeds of the target there, for a corpus
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/input.h"

namespace fs = std::filesystem;

int main(int argc, char** argv) {
    if (argc == 3 && std::strcmp(argv[1], "--write") == 0) {
        for (const auto& [name, bytes] : ta::fuzz::seeds()) {
            std::ofstream file(fs::path(argv[2]) / name, std::ios::binary);
            file.write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
            if (!file.flush()) return std::fprintf(stderr, "cannot write %s/%s\n", argv[2], name.c_str()), 1;
        }
        return 0;
    }
    std::vector<fs::path> paths;
    for (int i = 1; i < argc; ++i) {
        if (!fs::is_directory(argv[i]))
            paths.emplace_back(argv[i]);
        else
            paths.insert(paths.end(), fs::directory_iterator(argv[i]), fs::directory_iterator());
    }
    std::sort(paths.begin(), paths.end());
    for (const fs::path& path : paths) {
        std::ifstream file(path, std::ios::binary);
        const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
        std::fprintf(stderr, "%s: %zu bytes\n", path.c_str(), bytes.size());
        LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    }
    // Seeds that are not in the corpus must hold, too.
    for (const auto& [name, bytes] : ta::fuzz::seeds()) LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    std::printf("%zu files and %zu seeds\n", paths.size(), ta::fuzz::seeds().size());
    return paths.empty() ? 1 : 0;
}
