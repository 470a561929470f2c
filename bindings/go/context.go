package turboattention

// #include "shim.h"
import "C"

import (
	"runtime"
	"runtime/cgo"
	"unsafe"
)

// ContextOptions of [NewContext]; a zero field is the default.
type ContextOptions struct {
	Device        Device // CUDA needs a library that was built with it
	DeviceOrdinal int    // which GPU, as cudaSetDevice numbers them
	Threads       int    // 1..1024, the calling one included; default: the CPUs that the process may run on
	ISA           ISA    // default: the best that this CPU has

	// Log gets the library's messages, from any thread, up to LogLevel (default LogWarning). It must not block for long. A context
	// whose Log refers to it is never collected: close it.
	Log      func(level LogLevel, message string)
	LogLevel LogLevel

	Allocator Allocator // default: the C library
}

// ContextInfo says what a context is and uses.
type ContextInfo struct {
	Device            Device
	DeviceOrdinal     int
	ComputeCapability int // 90: sm_90; 0 on a CPU
	DeviceName        string
	Degraded          string // what is missing here and why; empty when nothing is
	Threads           int
	ISA, ISABest      ISA
	BytesInUse        uint64
	BytesPeak         uint64
	DeviceBytesInUse  uint64 // GPU memory
	DeviceBytesPeak   uint64
}

// Context is a device with its kernels and worker threads.
type Context struct {
	use
	c      *C.ta_context
	device Device
}

// NewContext creates a context; options may be nil.
//
// Errors: [ErrInvalid] (a value outside its range, no such GPU), [ErrUnsupported] (no CUDA in the build, no driver, too old a
// GPU, instructions that this CPU lacks), [ErrLimit] (threads could not be started).
func NewContext(options *ContextOptions) (*Context, error) {
	var o ContextOptions
	if options != nil {
		o = *options
	}
	co := C.ta_context_options{device: C.ta_device_kind(o.Device), device_ordinal: int32Of(o.DeviceOrdinal),
		threads: int32Of(o.Threads), cpu_isa: C.ta_cpu_isa(o.ISA)}
	var log, allocator C.uintptr_t
	if o.Log != nil {
		log = C.uintptr_t(cgo.NewHandle(o.Log))
	}
	if o.Allocator != nil {
		allocator = C.uintptr_t(cgo.NewHandle(o.Allocator))
	}
	c := &Context{device: o.Device}
	e := newError()
	if err := result(C.tago_context_create(&co, log, C.ta_log_level(o.LogLevel), allocator, &c.c, e), e); err != nil {
		return nil, err
	}
	c.open()
	closeLater(c, (*Context).Close)
	return c, nil
}

// Close ends the context for the caller. Its pools, plans and groups go on.
func (c *Context) Close() error {
	if first, destroy := c.close(); first {
		runtime.SetFinalizer(c, nil)
		if destroy {
			C.ta_context_destroy(c.c)
		}
	}
	return nil
}

func (c *Context) leave() {
	if c.use.leave() {
		C.ta_context_destroy(c.c)
	}
}

var errClosedContext = refuse(ErrClosed, "the context was closed")

// Info says what the context is and uses.
//
// Errors: those of every call.
func (c *Context) Info() (*ContextInfo, error) {
	if !c.enter() {
		return nil, errClosedContext
	}
	defer c.leave()
	var i C.ta_context_info
	i.struct_size = C.uint32_t(unsafe.Sizeof(i))
	e := newError()
	if err := result(C.ta_context_get_info(c.c, &i, e), e); err != nil {
		return nil, err
	}
	return &ContextInfo{
		Device: Device(i.device), DeviceOrdinal: int(i.device_ordinal), ComputeCapability: int(i.compute_capability),
		DeviceName: C.GoString(&i.device_name[0]), Degraded: C.GoString(&i.degraded[0]), Threads: int(i.threads),
		ISA: ISA(i.cpu_isa), ISABest: ISA(i.cpu_isa_best), BytesInUse: uint64(i.bytes_in_use), BytesPeak: uint64(i.bytes_peak),
		DeviceBytesInUse: uint64(i.device_bytes_in_use), DeviceBytesPeak: uint64(i.device_bytes_peak),
	}, nil
}

// Health is nil, or [ErrDeviceLost] once the GPU was lost.
func (c *Context) Health() error {
	if !c.enter() {
		return errClosedContext
	}
	defer c.leave()
	e := newError()
	return result(C.ta_context_health(c.c, e), e)
}
