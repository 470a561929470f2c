// Reads the tensors of a Hugging Face model folder: model.safetensors, or the shards that model.safetensors.index.json
// lists. The files are treated as hostile: every length, offset, type and shape is checked before a byte is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tinylm {

// A read-only mapping of a whole file, which must not shrink while it is mapped.
class MappedFile {
  public:
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

  private:
    void* data_ = nullptr;
    std::size_t size_ = 0;
};

struct TensorView {
    std::string dtype;  // "F32", "F16", "BF16"; others are listed but cannot be read
    std::vector<uint64_t> shape;
    std::span<const std::byte> data;  // inside its file; its size is checked against dtype and shape by read()
};

class TensorFolder {
  public:
    explicit TensorFolder(const std::filesystem::path& folder);

    const std::map<std::string, TensorView>& tensors() const { return tensors_; }

    // The tensor widened to fp32, row-major. Throws if it is absent or has another shape.
    std::vector<float> read(const std::string& name, const std::vector<uint64_t>& shape) const;

  private:
    void add_file(const std::filesystem::path& path);

    std::vector<std::unique_ptr<MappedFile>> files_;
    std::map<std::string, TensorView> tensors_;
};

// The whole of a small file (configuration, text). Throws if it cannot be read or has more than max_bytes.
std::string read_file(const std::filesystem::path& path, std::size_t max_bytes);

}  // namespace tinylm
