package turboattention

// #include <stdint.h>
// #include <stddef.h>
import "C"

import (
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

// What a call with a Progress has of it.
type progress struct {
	report Progress
	err    error
	panic  any
}

// with makes the call with a handle of p, and says what became of it.
func (p Progress) with(call func(handle C.uintptr_t) error) error {
	if p == nil {
		return call(0)
	}
	state := &progress{report: p}
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

//export tagoReport
func tagoReport(handle C.uintptr_t, done, total C.uint64_t) (stop C.int32_t) {
	state := cgo.Handle(handle).Value().(*progress)
	defer func() {
		if r := recover(); r != nil {
			state.panic, stop = r, 1
		}
	}()
	if state.err = state.report(uint64(done), uint64(total)); state.err != nil {
		return 1
	}
	return 0
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
