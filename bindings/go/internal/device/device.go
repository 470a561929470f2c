// Package device has GPU memory by the driver's own calls, for tests and examples. It needs no CUDA toolkit.
package device

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef int (*cuda_call)();

// Calls a function of libcuda.so.1; -1: there is none.
#define CALL(name, types, ...) \
    cuda_call f = find(name); \
    return f ? ((int (*) types)f)(__VA_ARGS__) : -1

static cuda_call find(const char* name) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? (cuda_call)dlsym(library, name) : NULL;
}
static int device_init(void) { CALL("cuInit", (unsigned), 0); }
static int device_retain(void** context) { CALL("cuDevicePrimaryCtxRetain", (void**, int), context, 0); }
static int device_use(void* context) { CALL("cuCtxSetCurrent", (void*), context); }
static int device_stream(void** stream) { CALL("cuStreamCreate", (void**, unsigned), stream, 1); } // 1: does not wait for others
static int device_wait(void) { CALL("cuCtxSynchronize", (void)); }
static int device_allocate(uint64_t* at, size_t bytes) { CALL("cuMemAlloc_v2", (uint64_t*, size_t), at, bytes); }
static int device_free(uint64_t at) { CALL("cuMemFree_v2", (uint64_t), at); }
static int device_write(uint64_t at, const void* from, size_t bytes) {
    CALL("cuMemcpyHtoD_v2", (uint64_t, const void*, size_t), at, from, bytes);
}
static int device_read(void* to, uint64_t at, size_t bytes) {
    CALL("cuMemcpyDtoH_v2", (void*, uint64_t, size_t), to, at, bytes);
}
static void* device_pointer(uint64_t at) { return (void*)(uintptr_t)at; }
*/
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

func result(call string, code C.int) error {
	switch code {
	case 0:
		return nil
	case -1:
		return fmt.Errorf("%s: no NVIDIA driver here", call)
	}
	return fmt.Errorf("%s: error %d of CUDA", call, code)
}

// Open makes GPU 0's primary context, which the library uses, too, current on the calling thread, and locks the goroutine to
// that thread.
func Open() error {
	runtime.LockOSThread()
	if err := result("cuInit", C.device_init()); err != nil {
		return err
	}
	var context unsafe.Pointer
	if err := result("cuDevicePrimaryCtxRetain", C.device_retain(&context)); err != nil {
		return err
	}
	return result("cuCtxSetCurrent", C.device_use(context))
}

// Stream makes a CUstream, which is a cudaStream_t. It lives as long as the process.
func Stream() (stream unsafe.Pointer, err error) {
	return stream, result("cuStreamCreate", C.device_stream(&stream))
}

// Synchronize waits until the GPU has done all that it was told.
func Synchronize() error { return result("cuCtxSynchronize", C.device_wait()) }

// Buffer is floats in GPU memory.
type Buffer struct {
	at C.uint64_t
	n  int
}

// New copies floats to the GPU.
func New(data []float32) (*Buffer, error) {
	b := &Buffer{n: len(data)}
	if err := result("cuMemAlloc", C.device_allocate(&b.at, C.size_t(4*len(data)))); err != nil {
		return nil, err
	}
	return b, result("cuMemcpyHtoD", C.device_write(b.at, unsafe.Pointer(&data[0]), C.size_t(4*len(data))))
}

// Pointer is where they are.
func (b *Buffer) Pointer() unsafe.Pointer { return C.device_pointer(b.at) }

// Read waits for the GPU, and copies what it wrote.
func (b *Buffer) Read() ([]float32, error) {
	data := make([]float32, b.n)
	if err := Synchronize(); err != nil {
		return nil, err
	}
	return data, result("cuMemcpyDtoH", C.device_read(unsafe.Pointer(&data[0]), b.at, C.size_t(4*b.n)))
}

// Free waits for the work that uses the memory.
func (b *Buffer) Free() error { return result("cuMemFree", C.device_free(b.at)) }
