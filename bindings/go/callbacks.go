package turboattention

// #include <stdint.h>
// #include <stddef.h>
import "C"

import (
	"io"
	"runtime"
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

// Progress is called from time to time with the bytes done and the total, on a goroutine of its own, for which the call waits. An error
// stops the work; the call returns it. It may use this package, but not the same pool.
type Progress func(done, total uint64) error

// What a call has of its callback, and what became of that.
type callback[F any] struct {
	f     F
	err   error
	panic any
	exit  bool
}

// Runs a function of the caller's on a goroutine of its own, and says how it ended. runtime.Goexit, for example of
// testing.T.FailNow, then ends only that goroutine. On the goroutine that is in C it would skip the frames of C, and what they
// hold would never be released.
func apart(f func()) (panicked any, exited bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		returned := false
		defer func() {
			panicked = recover()
			exited = !returned && panicked == nil
		}()
		f()
		returned = true
	}()
	<-done
	return panicked, exited
}

// Makes a call with a handle of f. If an error of f stopped the call, it returns this error; a panic of f, and a Goexit,
// continue here.
func with[F any](f F, call func(handle C.uintptr_t) error) error {
	state := &callback[F]{f: f}
	handle := cgo.NewHandle(state)
	defer handle.Delete()
	err := call(C.uintptr_t(handle))
	if state.panic != nil {
		panic(state.panic)
	}
	if state.exit {
		runtime.Goexit()
	}
	if err != nil && state.err != nil {
		return state.err
	}
	return err
}

// Runs the callback; what C is told is not 0 where the work stops.
func (c *callback[F]) run(f func(F) error) (stop C.int32_t) {
	c.panic, c.exit = apart(func() { c.err = f(c.f) })
	if c.err != nil || c.panic != nil || c.exit {
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
	log, text := cgo.Handle(handle).Value().(func(LogLevel, string)), C.GoString(message)
	_, _ = apart(func() { log(LogLevel(level), text) })
}

//export tagoAllocate
func tagoAllocate(handle C.uintptr_t, bytes, alignment C.size_t) (data unsafe.Pointer) {
	allocator := cgo.Handle(handle).Value().(Allocator)
	_, _ = apart(func() { data = allocator.Allocate(uintptr(bytes), uintptr(alignment)) })
	return data
}

//export tagoDeallocate
func tagoDeallocate(handle C.uintptr_t, data unsafe.Pointer, bytes, alignment C.size_t) {
	allocator := cgo.Handle(handle).Value().(Allocator)
	_, _ = apart(func() { allocator.Deallocate(data, uintptr(bytes), uintptr(alignment)) })
}

//export tagoRelease
func tagoRelease(handle C.uintptr_t) { cgo.Handle(handle).Delete() }
