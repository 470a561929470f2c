// Package turboattention is attention over very long, compressed KV caches: keys and values are kept as INT8, INT4 or INT2 pages,
// and attention runs on the integer codes. It wraps the C library of the same name, which cgo finds with pkg-config.
//
// A [Context] is a device, a [Pool] the cache, a [Sequence] one conversation in it, and a [Plan] makes steps over a batch of
// sequences:
//
//	err := plan.Step([]*turboattention.Sequence{seq}, []int{tokens}, func(step *turboattention.Step) error {
//		for layer := 0; layer < layers; layer++ {
//			if err := step.Append(layer, k, v); err != nil {
//				return err
//			}
//			if err := step.Attend(layer, q, out, nil); err != nil {
//				return err
//			}
//		}
//		return nil
//	})
//
// # Life of objects
//
// Close ends an object; calls on it fail with [ErrClosed] or [ErrStale] from then on. Objects may be closed in any order,
// twice, and beside running calls: memory is freed when the last of these calls is done. There is one exception: while a call
// on a plan or a calibrator runs, its Close does nothing and returns [ErrBusy]. An object that is not closed is freed some time
// after it became unreachable, which is late for gigabytes of cache: close what you can.
//
// # Errors
//
// Each function lists the codes that it may fail with, besides those of every call: [ErrInvalid] (an argument that cannot be),
// [ErrClosed], [ErrForked], [ErrMemory], [ErrInternal], [ErrStruct] (the library is too old for an option that is set); of
// calls on a plan or a calibrator also [ErrBusy], and of calls that need the GPU [ErrDevice] and [ErrDeviceLost]. A call that
// fails has changed nothing.
//
// # Goroutines
//
// Contexts, pools, sequences, namespaces and groups may be used by many goroutines at once. A plan, its step, and a calibrator
// take one call at a time; another one gets [ErrBusy]. A sequence is in at most one open step.
//
// # Callbacks
//
// A callback that panics does not unwind the library:
//   - a log or an [Allocator] counts as having done nothing, so an allocation fails;
//   - a [Progress], or the writer of [Sequence.Export], stops the work and panics again where the call was made;
//   - of a [BlockStore] the batch counts as failed, as if the method had returned an error.
package turboattention

// #cgo pkg-config: turboattention
// #cgo CFLAGS: -std=c99
// #include <turboattention.h>
import "C"

// Version is that of the library that is loaded: major * 10000 + minor * 100 + patch.
func Version() int { return int(C.ta_version()) }

// ABIVersion is the version of the binary interface of the library that is loaded.
func ABIVersion() int { return int(C.ta_abi_version()) }

// BuildInfo is one line on the library that is loaded: version, compiler, what was built in.
func BuildInfo() string { return C.GoString(C.ta_build_info()) }
