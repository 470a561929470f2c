// XXH3 of a page, bound to its identity. Host only; kernels that move pages compute the same value where the data is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/format/slot.h"

namespace ta {

// XXH3_64(identity || XXH3_64(payload)), both unseeded.
uint64_t page_hash(const PageIdentity& identity, const uint8_t* payload);

// XXH3_64 of any bytes.
uint64_t hash_bytes(const void* data, size_t bytes);

// The same of bytes that come in pieces.
class PiecewiseHash {
  public:
    PiecewiseHash();
    ~PiecewiseHash();
    void add(const void* data, size_t bytes);
    uint64_t value() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace ta
