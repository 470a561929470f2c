package turboattention

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"sync"
	"unsafe"
)

// Code says why a call failed. Each one is an error itself, for errors.Is:
//
//	if errors.Is(err, turboattention.ErrTierFull) { ... }
type Code int32

const (
	ErrInvalid     Code = C.TA_E_INVALID
	ErrStruct      Code = C.TA_E_STRUCT
	ErrShape       Code = C.TA_E_SHAPE
	ErrDType       Code = C.TA_E_DTYPE
	ErrAlignment   Code = C.TA_E_ALIGNMENT
	ErrUnsupported Code = C.TA_E_UNSUPPORTED
	ErrState       Code = C.TA_E_STATE
	ErrBusy        Code = C.TA_E_BUSY
	ErrStale       Code = C.TA_E_STALE
	ErrClosed      Code = C.TA_E_CLOSED
	ErrForked      Code = C.TA_E_FORKED
	ErrCancelled   Code = C.TA_E_CANCELLED
	ErrMemory      Code = C.TA_E_MEMORY
	ErrTierFull    Code = C.TA_E_TIER_FULL
	ErrLimit       Code = C.TA_E_LIMIT
	ErrNonFinite   Code = C.TA_E_NONFINITE
	ErrCorrupt     Code = C.TA_E_CORRUPT
	ErrDevice      Code = C.TA_E_DEVICE
	ErrDeviceLost  Code = C.TA_E_DEVICE_LOST
	ErrIO          Code = C.TA_E_IO
	ErrPeerLost    Code = C.TA_E_PEER_LOST
	ErrTimeout     Code = C.TA_E_TIMEOUT
	ErrMismatch    Code = C.TA_E_MISMATCH
	ErrInternal    Code = C.TA_E_INTERNAL
)

// String is the name of the code in C, such as "TA_E_INVALID".
func (c Code) String() string { return C.GoString(C.ta_status_name(C.ta_status(c))) }

func (c Code) Error() string { return c.String() }

// Error says where and why a call failed. Places that do not apply are -1. docs/errors.md says what to do about each code.
type Error struct {
	Code     Code
	Layer    int   // model layer
	Head     int   // kv head, or query head when the text says so
	Argument int   // position of the wrong argument in the C call
	Tier     Tier  // which one is full, or has the block or file that the call failed at
	Rank     int   // of a group: whose fault it is
	Sequence int   // index into the call's list of sequences
	Block    int64 // index of the 64-token block within the sequence
	Token    int64 // row of the tensor that has a bad value
	Bytes    int64 // how many are lacking, or were refused
	Message  string
}

func (e *Error) Error() string { return "turboattention: " + e.Message + " (" + e.Code.String() + ")" }

// Is says whether target is the code of this error.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// An error that this package finds before the library is asked.
func refuse(code Code, message string) error {
	return &Error{code, -1, -1, -1, -1, -1, -1, -1, -1, -1, message}
}

func errorOf(status C.ta_status, e *C.ta_error) error {
	if e.code != status { // it was not filled in
		return refuse(Code(status), "no memory for what the call says")
	}
	return &Error{
		Code: Code(status), Layer: int(e.layer), Head: int(e.head), Argument: int(e.argument), Tier: Tier(e.tier),
		Rank: int(e.rank), Sequence: int(e.sequence), Block: int64(e.block), Token: int64(e.token), Bytes: int64(e.bytes),
		Message: C.GoString(&e.message[0]),
	}
}

// ta_error structs in C memory that no call uses: as many as calls have run at the same time.
var spareErrors struct {
	sync.Mutex
	list []*C.ta_error
}

// Takes a ta_error for one call; give it to result.
func newError() *C.ta_error {
	spareErrors.Lock()
	defer spareErrors.Unlock()
	if n := len(spareErrors.list); n > 0 {
		e := spareErrors.list[n-1]
		spareErrors.list = spareErrors.list[:n-1]
		return e
	}
	return (*C.ta_error)(C.malloc(C.size_t(unsafe.Sizeof(C.ta_error{})))) // never nil: Go ends the process before that
}

// What a call returned, as an error. Takes the ta_error back.
func result(status C.ta_status, e *C.ta_error) (err error) {
	if status != C.TA_OK {
		err = errorOf(status, e)
	}
	spareErrors.Lock()
	spareErrors.list = append(spareErrors.list, e)
	spareErrors.Unlock()
	return err
}
