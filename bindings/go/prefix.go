package turboattention

// #include <turboattention.h>
import "C"

import (
	"context"
	"time"
	"unsafe"
)

// Key stands for all tokens up to the end of a block, and for the model: a cryptographic hash of the caller.
type Key [32]byte

// Namespace keeps what a tenant publishes apart from others.
type Namespace struct {
	pool *Pool
	id   C.ta_namespace
}

// NamespaceStats are figures of a namespace.
type NamespaceStats struct {
	Entries     uint64 // published blocks
	Bytes       uint64
	BytesQuota  uint64 // 0: no limit
	BytesShared uint64 // of entries that sequences have, too
	Hits        uint64 // keys, since creation, as the next ones
	Misses      uint64
	Published   uint64
	Evicted     uint64
}

// NewNamespace creates a namespace of a pool. salt: secret random bytes; the same bytes find published blocks again in a later
// process or another rank. quotaBytes of published blocks; 0: no limit.
//
// Errors: [ErrInvalid] (a salt of zeros, or one that the pool has a namespace with), [ErrLimit] (65536 namespaces).
func (p *Pool) NewNamespace(salt [32]byte, quotaBytes uint64) (*Namespace, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	o := C.ta_namespace_options{quota_bytes: C.uint64_t(quotaBytes)}
	o.struct_size = C.uint32_t(unsafe.Sizeof(o))
	for i, b := range salt {
		o.salt[i] = C.uint8_t(b)
	}
	n := &Namespace{pool: p}
	e := newError()
	if err := result(C.ta_namespace_create(p.c, &o, &n.id, e), e); err != nil {
		return nil, err
	}
	return n, nil
}

// Destroy drops the published blocks, also from a disk tier that lasts; sequences keep their blocks. A namespace that is not
// destroyed ends with its pool, and leaves such a disk tier as it is.
//
// Errors: [ErrStale].
func (n *Namespace) Destroy() error {
	p := n.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_namespace_destroy(p.c, n.id, e), e)
}

// Stats are the namespace's figures now.
//
// Errors: [ErrStale].
func (n *Namespace) Stats() (*NamespaceStats, error) {
	p := n.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var s C.ta_namespace_stats
	s.struct_size = C.uint32_t(unsafe.Sizeof(s))
	e := newError()
	if err := result(C.ta_namespace_get_stats(p.c, n.id, &s, e), e); err != nil {
		return nil, err
	}
	return &NamespaceStats{uint64(s.entries), uint64(s.bytes), uint64(s.bytes_quota), uint64(s.bytes_shared), uint64(s.hits),
		uint64(s.misses), uint64(s.published), uint64(s.evicted)}, nil
}

// Flush writes published blocks to the disk tier that lasts, and waits until they survive a power failure.
//
// Errors: [ErrStale], [ErrUnsupported] (no disk tier that lasts), [ErrTierFull], [ErrIO], [ErrCorrupt].
func (n *Namespace) Flush() error {
	p := n.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_namespace_flush(p.c, n.id, e), e)
}

// HashKeys makes the keys of which events speak.
//
// Errors: [ErrStale].
func (n *Namespace) HashKeys(keys []Key) ([]Key, error) {
	p := n.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	hashed := make([]Key, len(keys))
	e := newError()
	err := result(C.ta_namespace_hash_keys(p.c, n.id, keyBytes(keys), C.uint64_t(len(keys)), keyBytes(hashed), e), e)
	if err != nil {
		return nil, err
	}
	return hashed, nil
}

func keyBytes(keys []Key) *C.uint8_t { return first[C.uint8_t](keys) }

// Event says what became of a published block.
type Event struct {
	Key    Key    // hashed
	Number uint64 // of the namespace's events, from 1; those that a gap before EventReset lacks were lost
	Index  uint64 // of the block in its sequence
	Kind   EventKind
	Tier   Tier // where it is; EventDropped: was
}

// TakeEvents takes up to most events, each once, the oldest first. The first is an EventReset.
//
// Errors: [ErrStale].
func (n *Namespace) TakeEvents(most int) ([]Event, error) {
	p := n.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	list, err := take(most, func(piece []C.ta_prefix_event, count *C.uint64_t) error {
		e := newError()
		return result(C.ta_namespace_take_events(p.c, n.id, first[C.ta_prefix_event](piece), C.uint64_t(len(piece)), count, e), e)
	})
	if err != nil {
		return nil, err
	}
	events := make([]Event, len(list))
	for i := range events {
		c := &list[i]
		events[i] = Event{*(*Key)(unsafe.Pointer(&c.key)), uint64(c.number), uint64(c.index), EventKind(c.kind), Tier(c.tier)}
	}
	return events, nil
}

// Publish publishes the first len(keys) blocks of a sequence, which must be full; the published blocks outlive it.
//
// Errors: [ErrInvalid] (more keys than full blocks; the sequence or one of its blocks is of another namespace or pool),
// [ErrStale], [ErrBusy] (it is in an open step), [ErrLimit] (the quota, and sequences use what is published), [ErrState] (a
// block was dropped, or the sequence is partitioned), [ErrCorrupt], on a GPU [ErrNonFinite] (once, as a begin).
func (s *Sequence) Publish(space *Namespace, keys []Key) error {
	p := s.pool
	if space.pool != p {
		return errOtherPool
	}
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(C.ta_seq_publish(p.c, s.c(), space.id, keyBytes(keys), C.uint64_t(len(keys)), e), e)
}

// Match creates a sequence that begins with the blocks of the first keys, as many as are published without a gap, maybe none. It
// also returns the number of their tokens.
//
// Errors: [ErrStale], [ErrLimit] (the pool has as many sequences as it may).
func (n *Namespace) Match(keys []Key) (*Sequence, int, error) {
	p := n.pool
	if !p.enter() {
		return nil, 0, errClosedPool
	}
	defer p.leave()
	var id C.ta_seq
	var length C.int64_t
	e := newError()
	err := result(C.ta_seq_match_prefix(p.c, n.id, keyBytes(keys), C.uint64_t(len(keys)), &id, &length, e), e)
	if err != nil {
		return nil, 0, err
	}
	return p.sequence(id), int(length), nil
}

// Join shares the namespace with the ranks of a group that have one of the same salt, until Leave.
//
// Errors: [ErrInvalid] (one of this salt and fingerprint of this rank has joined already), [ErrStale], [ErrLimit] (threads),
// [ErrState] (the group is not ready, or the pool is of another context), and what [Group.Health] says.
func (n *Namespace) Join(group *Group) error {
	return n.with(group, func(e *C.ta_error) C.ta_status { return C.ta_namespace_join(group.c, n.pool.c, n.id, e) })
}

// Leave ends what Join began; blocks that were fetched stay.
//
// Errors: [ErrState] (it has not joined), [ErrStale], and what [Group.Health] says.
func (n *Namespace) Leave(group *Group) error {
	return n.with(group, func(e *C.ta_error) C.ta_status { return C.ta_namespace_leave(group.c, n.pool.c, n.id, e) })
}

// A call on the group and the namespace's pool.
func (n *Namespace) with(group *Group, call func(*C.ta_error) C.ta_status) error {
	return group.with(n.pool, call)
}

// Place says where a block is.
type Place struct {
	Answer Answer
	Rank   int // of AnswerYes: this one if it has the block, else where it is nearest
	Tier   Tier
}

// Lookup says which ranks have the blocks of keys, as far as ranks have announced: a hint. It does not wait.
//
// Errors: [ErrStale], [ErrState] (the namespace has not joined), and what [Group.Health] says.
func (n *Namespace) Lookup(group *Group, keys []Key) ([]Place, error) {
	list := make([]C.ta_prefix_place, len(keys)+1)
	err := n.with(group, func(e *C.ta_error) C.ta_status {
		return C.ta_namespace_lookup(group.c, n.pool.c, n.id, keyBytes(keys), C.uint64_t(len(keys)), 0, &list[0], e)
	})
	if err != nil {
		return nil, err
	}
	places := make([]Place, len(keys))
	for i := range places {
		places[i] = Place{Answer(list[i].answer), int(list[i].rank), Tier(list[i].tier)}
	}
	return places, nil
}

// LookupWait is a Lookup that waits for ranks that have not announced what they have. When ctx ends it returns what is known,
// and ctx's error.
//
// Errors: as [Namespace.Lookup].
func (n *Namespace) LookupWait(ctx context.Context, group *Group, keys []Key) (places []Place, err error) {
	waited := wait(ctx, func(time.Duration) (bool, error) {
		places, err = n.Lookup(group, keys)
		for _, place := range places {
			if place.Answer == AnswerUnknown {
				return false, err
			}
		}
		return true, err
	})
	return places, waited
}

// Fetch brings the blocks of the first keys that this rank lacks from other ranks, and publishes them here. The transfer's
// TransferInfo.Length says how many tokens Match finds then.
//
// Errors: as [Namespace.Lookup]; of the transfer also [ErrLimit] (the quota) and [ErrStale] (the namespace ended).
func (n *Namespace) Fetch(group *Group, keys []Key) (*Transfer, error) {
	t := &Transfer{group: group}
	err := n.with(group, func(e *C.ta_error) C.ta_status {
		return C.ta_namespace_fetch(group.c, n.pool.c, n.id, keyBytes(keys), C.uint64_t(len(keys)), &t.ticket, e)
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}
