// Loads the vectors: cases with expected results that an independent implementation computed. The small ones are in
// tests/data/vectors, where manifest.json says what each file has; folders() lists where a case is looked for.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ta::vectors {

inline float half_to_float(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float magnitude = e == 31  ? (m ? NAN : HUGE_VALF)
                            : e == 0 ? std::ldexp(float(m), -24)
                                     : std::ldexp(float(m + 1024), e - 25);
    return h >> 15 ? -magnitude : magnitude;
}

// One array of a case: row-major, widened to T (f16 to float; integers to any integer type).
template <class T>
struct Array {
    std::vector<int64_t> shape;
    std::vector<T> data;
    const T& operator[](size_t i) const { return data[i]; }
    size_t size() const { return data.size(); }
};

class Case {
  public:
    Case(std::string name, nlohmann::json description, const std::filesystem::path& file)
        : name_(std::move(name)), description_(std::move(description)) {
        std::ifstream in(file, std::ios::binary);
        bytes_.assign(std::istreambuf_iterator<char>(in), {});
        if (bytes_.size() != description_.at("bytes").get<size_t>()) {
            throw std::runtime_error(file.string() + " is missing or has the wrong size");
        }
    }
    const std::string& name() const { return name_; }
    const nlohmann::json& json() const { return description_; }
    template <class T>
    T get(const char* key) const {
        return description_.at(key).get<T>();
    }
    bool has(const std::string& array) const { return find(array) != nullptr; }

    template <class T>
    Array<T> array(const std::string& name) const {
        const nlohmann::json* entry = find(name);
        if (!entry) throw std::runtime_error(name_ + " has no array " + name);
        Array<T> out;
        out.shape = entry->at("shape").get<std::vector<int64_t>>();
        size_t n = 1;
        for (int64_t extent : out.shape) n *= size_t(extent);
        const std::string type = entry->at("dtype").get<std::string>();
        const size_t width = type == "f32" || type == "i32" ? 4 : type == "f16" ? 2 : 1;
        const auto offset = entry->at("offset").get<size_t>();
        if (offset + n * width > bytes_.size()) throw std::runtime_error(name_ + "." + name + " lies beyond its file");
        const char* p = bytes_.data() + offset;
        out.data.resize(n);
        for (size_t i = 0; i < n; ++i, p += width) {
            if (type == "f32") {
                out.data[i] = T(load<float>(p));
            } else if (type == "f16") {
                out.data[i] = T(half_to_float(load<uint16_t>(p)));
            } else if (type == "i32") {
                out.data[i] = T(load<int32_t>(p));
            } else if (type == "i8") {
                out.data[i] = T(load<int8_t>(p));
            } else if (type == "u8") {
                out.data[i] = T(load<uint8_t>(p));
            } else {
                throw std::runtime_error("unknown dtype " + type);
            }
        }
        return out;
    }
    // The encodings of an f16 array.
    std::vector<uint16_t> halves(const std::string& name) const {
        const nlohmann::json* entry = find(name);
        if (!entry || entry->at("dtype") != "f16") throw std::runtime_error(name_ + " has no f16 array " + name);
        size_t n = 1;
        for (int64_t extent : entry->at("shape").get<std::vector<int64_t>>()) n *= size_t(extent);
        const auto offset = entry->at("offset").get<size_t>();
        if (offset + n * 2 > bytes_.size()) throw std::runtime_error(name_ + "." + name + " lies beyond its file");
        std::vector<uint16_t> out(n);
        std::memcpy(out.data(), bytes_.data() + offset, n * 2);
        return out;
    }

  private:
    template <class T>
    static T load(const char* p) {
        T v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    const nlohmann::json* find(const std::string& name) const {
        for (const nlohmann::json& entry : description_.at("arrays")) {
            if (entry.at("name") == name) return &entry;
        }
        return nullptr;
    }
    std::string name_;
    nlohmann::json description_;
    std::vector<char> bytes_;
};

// The folders that hold vectors, first match first.
inline std::vector<std::filesystem::path> folders() {
    std::vector<std::filesystem::path> all{std::filesystem::path(TA_TEST_DIR) / "data" / "vectors"};
    if (const char* more = std::getenv("TA_VECTORS"); more && *more) all.emplace_back(more);
    return all;
}

// The case, or nothing where no folder has it.
inline std::optional<Case> find_case(const std::string& name) {
    for (const std::filesystem::path& folder : folders()) {
        std::ifstream in(folder / "manifest.json");
        if (!in) continue;
        const nlohmann::json manifest = nlohmann::json::parse(in);
        if (manifest.contains(name)) return Case(name, manifest.at(name), folder / (name + ".bin"));
    }
    return std::nullopt;
}

inline std::string missing(const std::string& name) {
    std::ostringstream text;
    text << "NOT CHECKED: vector case '" << name << "' is in none of";
    for (const std::filesystem::path& folder : folders()) text << " " << folder.lexically_normal().string();
    return text.str();
}

}  // namespace ta::vectors

// Defines `variable` or skips the test, saying so.
#define TA_LOAD_CASE(variable, name)                                                        \
    const std::optional<ta::vectors::Case> variable##_found = ta::vectors::find_case(name); \
    if (!variable##_found) GTEST_SKIP() << ta::vectors::missing(name);                      \
    const ta::vectors::Case& variable = *variable##_found
