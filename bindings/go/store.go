package turboattention

// #include "shim.h"
import "C"

import (
	"runtime/cgo"
	"time"
	"unsafe"
)

// StoreItem is a key of a store and its value.
type StoreItem struct {
	Key  Key
	Data []byte // Put: the value. Get: room for it, which is valid until the call returns
	// Size is for Get to set: of the value that it wrote to Data; larger than len(Data): nothing was written.
	Size   uint64
	Result StoreResult // StoreAbsent at first
}

// BlockStore keeps published blocks outside of the process. Each method gets a batch, sets the items' results, and should return
// within timeLeft; what it returns later is ignored. An error, and a panic, fail the batch as a whole. One thread of the library calls
// it for each namespace that has it.
type BlockStore interface {
	Exists(items []StoreItem, timeLeft time.Duration) error
	Get(items []StoreItem, timeLeft time.Duration) error
	Put(items []StoreItem, timeLeft time.Duration) error
	Remove(items []StoreItem, timeLeft time.Duration) error
}

// StoreOptions says how a store is used; the zero value has all defaults.
type StoreOptions struct {
	Timeout      time.Duration // how long a method may take: up to a day, rounded up to milliseconds; default 2 s
	WriteThrough Switch        // what is published is put. Default on
	Authenticate Switch        // values bear a keyed hash that takes the salt to make. Default on
	BatchBytes   uint64        // host memory for the values of a call; default 32 MiB
}

// StoreStats are figures of a namespace's store since it was attached.
type StoreStats struct {
	Pausing     bool   // it failed, and is asked again after a pause
	Puts        uint64 // blocks that were put
	PutsPresent uint64 // that were there already
	PutFailures uint64
	Hits        uint64 // blocks that loads brought
	Misses      uint64
	Refused     uint64 // values that were not what they should be
	BytesPut    uint64
	BytesGot    uint64
	Calls       uint64
	CallsFailed uint64
	Timeouts    uint64
	Waiting     uint64    // published blocks that are still to be put
	Failed      time.Time // when something last failed or was refused; zero: never
	Failure     string    // what that was
}

// AttachStore keeps what is published in a store, too, from now on; Load brings blocks from it.
func (n *Namespace) AttachStore(store BlockStore, options StoreOptions) error {
	p := n.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	if store == nil {
		return refuse(ErrInvalid, "store is nil")
	}
	o := C.ta_store_options{timeout_ms: millis(options.Timeout), write_through: C.ta_switch(options.WriteThrough),
		authenticate: C.ta_switch(options.Authenticate), batch_bytes: C.uint64_t(options.BatchBytes)}
	o.struct_size = C.uint32_t(unsafe.Sizeof(o))
	e := newError()
	return result(C.tago_attach_store(p.c, n.id, C.uintptr_t(cgo.NewHandle(store)), &o, e), e)
}

// DetachStore lets go of the store. It waits for a method that runs, for as long as its time lasts.
func (n *Namespace) DetachStore() error {
	p := n.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_namespace_detach_store(p.c, n.id, e), e)
}

// Load brings the blocks of the first keys that are not published from the store, up to the first that it lacks. Match finds them
// when the move is done.
func (n *Namespace) Load(keys []Key) (*Move, error) {
	p := n.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	m := &Move{pool: p}
	e := newError()
	if err := result(C.ta_namespace_load(p.c, n.id, keyBytes(keys), C.uint64_t(len(keys)), &m.ticket, e), e); err != nil {
		return nil, err
	}
	return m, nil
}

// FlushStore puts what the store lacks of all that is published now, and waits for that, up to limit; below 0: as long as the store
// takes. It returns how many blocks are not known to be in the store then.
func (n *Namespace) FlushStore(limit time.Duration) (uint64, error) {
	p := n.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer p.leave()
	var missing C.uint64_t
	e := newError()
	err := result(C.ta_namespace_flush_store(p.c, n.id, C.int64_t(limit.Nanoseconds()), &missing, e), e)
	return uint64(missing), err
}

// StoreStats are the store's figures now.
func (n *Namespace) StoreStats() (*StoreStats, error) {
	p := n.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var s C.ta_store_stats
	s.struct_size = C.uint32_t(unsafe.Sizeof(s))
	e := newError()
	if err := result(C.ta_namespace_get_store_stats(p.c, n.id, &s, e), e); err != nil {
		return nil, err
	}
	stats := &StoreStats{s.pausing != 0, uint64(s.puts), uint64(s.puts_present), uint64(s.put_failures), uint64(s.hits),
		uint64(s.misses), uint64(s.refused), uint64(s.bytes_put), uint64(s.bytes_got), uint64(s.calls), uint64(s.calls_failed),
		uint64(s.timeouts), uint64(s.waiting), time.Time{}, C.GoString(&s.failure[0])}
	if s.failed_unix_ms > 0 {
		stats.Failed = time.UnixMilli(int64(s.failed_unix_ms))
	}
	return stats, nil
}

//export tagoStore
func tagoStore(handle C.uintptr_t, method C.int32_t, items *C.ta_store_item, n C.uint64_t, left C.int64_t) (status C.int32_t) {
	defer func() {
		if recover() != nil {
			status = -1
		}
	}()
	store := cgo.Handle(handle).Value().(BlockStore)
	given := unsafe.Slice(items, n)
	list := make([]StoreItem, n)
	for i := range list {
		list[i].Key = *(*Key)(unsafe.Pointer(given[i].key))
		if given[i].data != nil {
			list[i].Data = unsafe.Slice((*byte)(given[i].data), given[i].bytes)
		}
	}
	methods := []func([]StoreItem, time.Duration) error{store.Exists, store.Get, store.Put, store.Remove}
	if methods[method](list, time.Duration(left)) != nil {
		return -1
	}
	for i := range list {
		given[i].result = C.ta_store_result(list[i].Result)
		if method == 1 {
			given[i].bytes = C.uint64_t(list[i].Size)
		}
	}
	return 0
}
