// Device memory and streams for the CUDA tests. Any error ends the program.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace ta::cuda::testing {

inline void check(int e, const char* what) {
    if (e == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(cudaError_t(e)));
    std::exit(2);
}
#define CHECK(x) ::ta::cuda::testing::check(int(x), #x)

// Device memory of its own, so that compute-sanitizer sees accesses beyond it. Poisoned. Writes are there for all
// streams: cudaMemset and, from pageable memory, cudaMemcpy return earlier.
template <class T>
class Device {
  public:
    Device() = default;
    explicit Device(size_t n) : n_(n) {
        CHECK(cudaMalloc(&p_, bytes()));
        poison();
    }
    explicit Device(const std::vector<T>& v) : Device(v.size()) { set(v); }
    Device(Device&& o) noexcept : p_(std::exchange(o.p_, nullptr)), n_(o.n_) {}
    Device& operator=(Device&& o) noexcept {
        std::swap(p_, o.p_);
        std::swap(n_, o.n_);
        return *this;
    }
    ~Device() { cudaFree(p_); }
    T* get() const { return p_; }
    void poison() {
        CHECK(cudaMemset(p_, 0xFF, bytes()));
        CHECK(cudaStreamSynchronize(nullptr));
    }
    void set(const std::vector<T>& v) {
        CHECK(cudaMemcpy(p_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
        CHECK(cudaStreamSynchronize(nullptr));
    }
    std::vector<T> copy() const {
        std::vector<T> v(n_);
        CHECK(cudaMemcpy(v.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }

  private:
    size_t bytes() const { return std::max<size_t>(1, n_) * sizeof(T); }

    T* p_ = nullptr;
    size_t n_ = 0;
};

class Stream {
  public:
    Stream() { CHECK(cudaStreamCreateWithFlags(&s_, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(s_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    cudaStream_t get() const { return s_; }

  private:
    cudaStream_t s_ = nullptr;
};

}  // namespace ta::cuda::testing
