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
	Data []byte // Put: the value, which is only read. Get: room for it. Valid until the call returns
	// Get sets Size: the size of the value that it wrote to Data; larger than len(Data): it wrote nothing.
	Size   uint64
	Result StoreResult // StoreAbsent at first
}

// BlockStore keeps published blocks outside of the process. Each method gets a batch, sets the items' results, and should return
// within timeLeft; what it returns later is ignored. An error, a panic and a runtime.Goexit fail the batch as a whole. One batch of a
// namespace at a time.
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

// AttachStore attaches a store: from now on published blocks are put to it, too, and Load brings blocks from it.
//
// Errors: [ErrInvalid] (an option outside its range), [ErrStale], [ErrState] (the namespace has a store), [ErrLimit] (threads).
func (n *Namespace) AttachStore(store BlockStore, options StoreOptions) error {
	p := n.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	if store == nil {
		return refuse(ErrInvalid, "store is nil")
	}
	o := options.c()
	e := newError()
	return result(C.tago_attach_store(p.c, n.id, C.uintptr_t(cgo.NewHandle(store)), &o, e), e)
}

// AttachStoreAt is AttachStore with a C ta_block_store, for example one that ta_valkey_store_open of turboattention_valkey.h
// has filled in. The set is copied. The library calls its release once it does not need the set any more, also if AttachStoreAt
// fails.
//
// Errors: as [Namespace.AttachStore]; [ErrInvalid] (a function is missing), [ErrStruct].
func (n *Namespace) AttachStoreAt(set unsafe.Pointer, options StoreOptions) error {
	if set == nil {
		return refuse(ErrInvalid, "set is nil")
	}
	p := n.pool
	if !p.enter() {
		C.tago_release_store((*C.ta_block_store)(set))
		return errClosedPool
	}
	defer p.leave()
	o := options.c()
	e := newError()
	return result(C.ta_namespace_attach_store(p.c, n.id, (*C.ta_block_store)(set), &o, e), e)
}

func (o *StoreOptions) c() C.ta_store_options {
	return C.ta_store_options{struct_size: C.sizeof_ta_store_options, timeout_ms: millis(o.Timeout),
		write_through: C.ta_switch(o.WriteThrough), authenticate: C.ta_switch(o.Authenticate),
		batch_bytes: C.uint64_t(o.BatchBytes)}
}

// DetachStore detaches the store. It waits for a running method, at most until the method's time is over.
//
// Errors: [ErrStale], [ErrState] (there is no store).
func (n *Namespace) DetachStore() error {
	p := n.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_namespace_detach_store(p.c, n.id, e), e)
}

// Load brings blocks from the store: of the first keys, those that are not published, up to the first that the store lacks.
// Match finds them when the move is done.
//
// Errors: [ErrStale], [ErrState] (there is no store), [ErrLimit] (4096 loads wait).
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

// FlushStore puts the published blocks that the store lacks, and waits for that, up to limit; below 0: as long as the store
// takes. It returns how many blocks are not known to be in the store then. It keeps a thread of the system while it waits.
//
// Errors: [ErrStale], [ErrState] (there is no store, or it is only read), [ErrCancelled] (it was detached meanwhile).
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
//
// Errors: [ErrStale], [ErrState] (there is no store).
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
	var err error
	panicked, exited := apart(func() { err = methods[method](list, time.Duration(left)) })
	if err != nil || panicked != nil || exited {
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
