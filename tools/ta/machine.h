// The device that a command works on: its memory for tensors, and when its work is done. Uses the CUDA runtime if the build has
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "turboattention.h"
#include "turboattention_experimental.h"

namespace ta::tools {

// Ends the command with this text.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The caller's input is wrong: a file that cannot be read or is not one of the library's, or an unknown name.
struct WrongInput : Failure {
    using Failure::Failure;
};

extern thread_local ta_error error;
inline void check(ta_status status, const char* call) {
    if (status == TA_OK) return;
    const std::string text = call;
    throw Failure(text.substr(0, text.find('(')) + ": " + ta_status_name(status) + ": " + error.message);
}
#define TA_CHECK(call) ::ta::tools::check((call), #call)

// A struct of the ABI with its size set and everything else zero.
template <class T>
T sized() {
    T x{};
    x.struct_size = sizeof(T);
    return x;
}

class Machine {
  public:
    virtual ~Machine() = default;
    virtual ta_device_kind kind() const = 0;
    virtual std::string name() const = 0;
    virtual int ordinal() const { return 0; }
    // The nearest NUMA node; -1: unknown.
    virtual int numa_node() const { return -1; }
    // Memory for tensors.
    virtual void* allocate(size_t bytes) = 0;
    virtual void release(void* p) = 0;
    virtual void write(void* to, const void* from, size_t bytes) = 0;
    virtual void read(void* to, const void* from, size_t bytes) = 0;
    // The stream that plans enqueue their work on. wait() returns when all of it is complete.
    virtual ta_stream stream() const = 0;
    virtual void wait() = 0;
    // Seconds that the device needs for what `calls` enqueues on stream(), without the delay before it begins.
    virtual double time(const std::function<void()>& calls) = 0;
    // Captures what `calls` enqueues on stream(), and returns a function that enqueues it again by one call. On a CPU it
    // returns `calls`.
    virtual std::function<void()> capture(const std::function<void()>& calls) = 0;
    // Bytes/s of large copies to the memory of another machine of the same kind. `both`: the sum with copies back at the same
    // time.
    virtual double peer_bytes_per_s(Machine& other, bool both) = 0;
    // Bytes/s of NCCL messages of 256 MiB to the other machine; 0: no NCCL.
    virtual double nccl_bytes_per_s(Machine&) { return 0; }
    // Bytes/s of large copies between the device tier and host memory: the upper limit of moves. `both`: the sum of both
    // directions at once; else `to_host` picks the direction.
    virtual double copy_bytes_per_s(bool to_host, bool both) = 0;
};

// Of the NUMA nodes with memory, the one farthest from `node`; -1: there is no other one, or nothing is known.
int farthest_node(int node);

std::unique_ptr<Machine> make_cpu_machine();
// Throws Failure if the build has no CUDA or there is no GPU.
std::unique_ptr<Machine> make_gpu_machine(int ordinal);

// F32 [tokens, heads, head_dim] with pseudo-random values that depend on the seed only.
class Rows {
  public:
    Rows(Machine& machine, int64_t tokens, int64_t heads, int64_t head_dim, uint64_t seed = 1);
    ~Rows() { machine_.release(view_.data); }
    Rows(const Rows&) = delete;
    Rows& operator=(const Rows&) = delete;
    ta_tensor all() const { return view_; }
    // The first n tokens.
    ta_tensor first(int64_t n) const {
        ta_tensor t = view_;
        t.tokens = n;
        return t;
    }

  private:
    Machine& machine_;
    ta_tensor view_;
};

}  // namespace ta::tools
