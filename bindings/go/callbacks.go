package turboattention

// #include <stdint.h>
// #include <stddef.h>
import "C"

import (
	"io"
	"runtime/cgo"
	"unsafe"
)

// Allocator provides host memory, which must not be Go's. Its calls come from any thread, also while a lock of the library is held:
// they must not call this package.
type Allocator interface {
	// Allocate returns nil when there is no memory. alignment is a power of two, at most 4096.
	Allocate(bytes, alignment uintptr) unsafe.Pointer
	// Deallocate takes back what Allocate gave, zeroed.
	Deallocate(data unsafe.Pointer, bytes, alignment uintptr)
}

// Progress is called from time to time, by the goroutine that made the call, with the bytes done and the total. An error stops the
// work; the call returns it. It may use this package, but not the same pool.
type Progress func(done, total uint64) error

// What a call has of its callback, and what became of that.
type callback[F any] struct {
	f     F
	err   error
	panic any
}

// Makes a call with a handle of f. An error of f that stopped the call is what it returns; a panic of f goes on.
func with[F any](f F, call func(handle C.uintptr_t) error) error {
	state := &callback[F]{f: f}
	handle := cgo.NewHandle(state)
	defer handle.Delete()
	err := call(C.uintptr_t(handle))
	if state.panic != nil {
		panic(state.panic)
	}
	if err != nil && state.err != nil {
		return state.err
	}
	return err
}

// Runs the callback; what C is told is not 0 where the work stops.
func (c *callback[F]) run(f func(F) error) (stop C.int32_t) {
	defer func() {
		if r := recover(); r != nil {
			c.panic, stop = r, 1
		}
	}()
	if c.err = f(c.f); c.err != nil {
		return 1
	}
	return 0
}

func (p Progress) with(call func(handle C.uintptr_t) error) error {
	if p == nil {
		return call(0)
	}
	return with(p, call)
}

//export tagoReport
func tagoReport(handle C.uintptr_t, done, total C.uint64_t) C.int32_t {
	state := cgo.Handle(handle).Value().(*callback[Progress])
	return state.run(func(report Progress) error { return report(uint64(done), uint64(total)) })
}

//export tagoWrite
func tagoWrite(handle C.uintptr_t, offset C.uint64_t, data unsafe.Pointer, bytes C.uint64_t) C.int32_t {
	state := cgo.Handle(handle).Value().(*callback[io.WriterAt])
	return state.run(func(to io.WriterAt) error {
		n, err := to.WriteAt(unsafe.Slice((*byte)(data), bytes), int64(offset))
		if err == nil && uint64(n) < uint64(bytes) {
			return io.ErrShortWrite
		}
		return err
	})
}

//export tagoLog
func tagoLog(handle C.uintptr_t, level C.int32_t, message *C.char) {
	defer func() { _ = recover() }()
	cgo.Handle(handle).Value().(func(LogLevel, string))(LogLevel(level), C.GoString(message))
}

//export tagoAllocate
func tagoAllocate(handle C.uintptr_t, bytes, alignment C.size_t) (data unsafe.Pointer) {
	defer func() {
		if recover() != nil {
			data = nil
		}
	}()
	return cgo.Handle(handle).Value().(Allocator).Allocate(uintptr(bytes), uintptr(alignment))
}

//export tagoDeallocate
func tagoDeallocate(handle C.uintptr_t, data unsafe.Pointer, bytes, alignment C.size_t) {
	defer func() { _ = recover() }()
	cgo.Handle(handle).Value().(Allocator).Deallocate(data, uintptr(bytes), uintptr(alignment))
}

//export tagoRelease
func tagoRelease(handle C.uintptr_t) { cgo.Handle(handle).Delete() }
