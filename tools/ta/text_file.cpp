#include "tools/ta/text_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tools/ta/machine.h"

namespace ta::tools {

std::string read_text(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::error_code unknown;
    if (!in || std::filesystem::is_directory(path, unknown)) throw WrongInput(path + ": cannot be read");
    return {std::istreambuf_iterator<char>(in), {}};
}

void write_text(const std::string& path, const std::string& text) {
    std::error_code unknown;
    // A pipe or a device cannot be replaced by another file.
    const auto type = std::filesystem::status(path, unknown).type();
    if (type == std::filesystem::file_type::fifo || type == std::filesystem::file_type::character) {
        std::ofstream out(path, std::ios::binary);
        out << text;
        out.close();
        if (!out) throw WrongInput(path + ": cannot be written");
        return;
    }
    const std::string whole = path + ".new";
    std::ofstream out(whole, std::ios::binary);
    out << text;
    out.close();
    std::error_code failed;
    if (out) std::filesystem::rename(whole, path, failed);
    if (out && !failed) return;
    std::filesystem::remove(whole, failed);
    throw WrongInput(path + ": cannot be written");
}

}  // namespace ta::tools
