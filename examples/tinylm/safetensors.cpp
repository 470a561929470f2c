#include "safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <system_error>

namespace tinylm {
namespace {

using json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr std::size_t kMaxIndexBytes = 100'000'000;

[[noreturn]] void fail(const std::string& what) {
    throw std::runtime_error(what);
}

std::size_t element_size(const std::string& dtype) {
    if (dtype == "F32") return 4;
    if (dtype == "F16" || dtype == "BF16") return 2;
    return 0;
}

float from_bf16(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

float from_f16(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1f;
    const uint32_t mantissa = bits & 0x3ff;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -subnormal : subnormal;
}

std::vector<float> widen(const TensorView& tensor, uint64_t count) {
    std::vector<float> out(count);
    const std::byte* data = tensor.data.data();  // not aligned: the header before it has any length
    if (tensor.dtype == "F32") {
        std::memcpy(out.data(), data, count * sizeof(float));
        return out;
    }
    const bool bf16 = tensor.dtype == "BF16";
    for (uint64_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, data + 2 * i, sizeof bits);
        out[i] = bf16 ? from_bf16(bits) : from_f16(bits);
    }
    return out;
}

TensorView parse_tensor(const json& entry, std::span<const std::byte> payload) {
    TensorView tensor;
    tensor.dtype = entry.at("dtype").get_ref<const std::string&>();
    for (const json& dim : entry.at("shape")) {
        if (!dim.is_number_unsigned()) fail("a shape that is not made of whole numbers");
        tensor.shape.push_back(dim.get<uint64_t>());
    }
    const json& offsets = entry.at("data_offsets");
    if (offsets.size() != 2 || !offsets.at(0).is_number_unsigned() || !offsets.at(1).is_number_unsigned()) {
        fail("data_offsets that are not two whole numbers");
    }
    const auto begin = offsets.at(0).get<uint64_t>();
    const auto end = offsets.at(1).get<uint64_t>();
    if (begin > end || end > payload.size()) fail("data_offsets outside the file");
    tensor.data = payload.subspan(begin, end - begin);
    return tensor;
}

// The files that the index names. They must be in its own folder: a name with a slash could point anywhere.
std::set<std::string> shard_names(const std::filesystem::path& index_path) {
    const json index = json::parse(read_file(index_path, kMaxIndexBytes), nullptr, /*allow_exceptions=*/false);
    if (!index.is_object() || !index.contains("weight_map")) fail(index_path.string() + ": no weight_map");
    std::set<std::string> names;
    for (const auto& [tensor, file] : index["weight_map"].items()) {
        const std::string name = file.is_string() ? file.get<std::string>() : file.dump();
        if (name.find('/') != std::string::npos || !name.ends_with(".safetensors")) {
            fail(index_path.string() + ": '" + name + "' is not the name of a .safetensors file in this folder");
        }
        names.insert(name);
    }
    return names;
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), path.string());
    struct stat info {};
    const bool usable = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0;
    if (usable) {
        size_ = static_cast<std::size_t>(info.st_size);
        data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    const int map_errno = errno;
    ::close(fd);
    if (!usable) fail(path.string() + ": not a regular file, or empty");
    if (data_ == MAP_FAILED) throw std::system_error(map_errno, std::generic_category(), path.string());
}

MappedFile::~MappedFile() {
    ::munmap(data_, size_);
}

TensorFolder::TensorFolder(const std::filesystem::path& folder) {
    const std::filesystem::path index = folder / "model.safetensors.index.json";
    if (std::filesystem::exists(index)) {
        for (const std::string& name : shard_names(index)) add_file(folder / name);
    } else {
        add_file(folder / "model.safetensors");
    }
}

void TensorFolder::add_file(const std::filesystem::path& path) {
    files_.push_back(std::make_unique<MappedFile>(path));
    const std::span<const std::byte> bytes = files_.back()->bytes();

    uint64_t header_bytes = 0;
    if (bytes.size() < sizeof header_bytes) fail(path.string() + ": too short for a safetensors file");
    std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
    if (header_bytes > kMaxHeaderBytes || header_bytes > bytes.size() - sizeof header_bytes) {
        fail(path.string() + ": the header claims " + std::to_string(header_bytes) + " bytes, more than the file can hold");
    }
    const char* text = reinterpret_cast<const char*>(bytes.data()) + sizeof header_bytes;
    const json header = json::parse(text, text + header_bytes, nullptr, /*allow_exceptions=*/false);
    if (!header.is_object()) fail(path.string() + ": the header is not a JSON object");

    const std::span<const std::byte> payload = bytes.subspan(sizeof header_bytes + header_bytes);
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") continue;
        try {
            if (!tensors_.emplace(name, parse_tensor(entry, payload)).second) fail("listed twice");
        } catch (const std::exception& e) {
            fail(path.string() + ": tensor '" + name + "': " + e.what());
        }
    }
}

std::vector<float> TensorFolder::read(const std::string& name, const std::vector<uint64_t>& shape) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail("the model has no tensor '" + name + "'");
    const TensorView& tensor = found->second;
    if (tensor.shape != shape) {
        fail("tensor '" + name + "' has shape " + json(tensor.shape).dump() + ", config.json asks for " + json(shape).dump());
    }
    const std::size_t size = element_size(tensor.dtype);
    if (size == 0) fail("tensor '" + name + "' is " + tensor.dtype + "; F32, F16 and BF16 can be read");

    // Divides the actual size rather than multiply the claimed dimensions, whose product may overflow.
    uint64_t left = tensor.data.size() / size;
    uint64_t count = 1;
    for (const uint64_t dim : shape) {
        if (dim == 0 || dim > left) fail("tensor '" + name + "' holds fewer bytes than its shape needs");
        left /= dim;
        count *= dim;
    }
    if (count * size != tensor.data.size()) fail("tensor '" + name + "' holds more bytes than its shape needs");
    return widen(tensor, count);
}

std::string read_file(const std::filesystem::path& path, std::size_t max_bytes) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::system_error(errno, std::generic_category(), path.string());
    std::string text;
    char buffer[65536];
    while (in.read(buffer, sizeof buffer), in.gcount() > 0) {
        text.append(buffer, static_cast<std::size_t>(in.gcount()));
        if (text.size() > max_bytes) fail(path.string() + ": more than " + std::to_string(max_bytes) + " bytes");
    }
    if (in.bad()) fail(path.string() + ": cannot be read");
    return text;
}

}  // namespace tinylm
