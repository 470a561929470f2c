package turboattention

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
	"sync"
	"time"
	"unsafe"
)

// GroupID names a group. One rank makes it and gives it to the others by means of its own.
type GroupID [128]byte

// NewGroupID makes an id.
//
// Errors: [ErrInvalid] (kind), [ErrUnsupported] (no NCCL).
func NewGroupID(kind GroupKind) (id GroupID, err error) {
	var c C.ta_group_id
	e := newError()
	err = result(C.ta_group_make_id(C.ta_group_kind(kind), &c, e), e)
	return *(*GroupID)(unsafe.Pointer(&c)), err
}

// GroupOptions of [Context.JoinGroup]; a zero field is the default.
type GroupOptions struct {
	Kind         GroupKind
	ID           GroupID // the same at all ranks
	Rank, Ranks  int
	Connect      time.Duration  // until all ranks have joined; default 30 s. These three: up to a day, rounded up to milliseconds
	Operation    time.Duration  // a transfer without progress for so long ends; default 30 s
	Silence      time.Duration  // a rank that was not heard of for so long is lost; default 10 s
	StagingBytes uint64         // host memory that each arriving transfer may take
	NCCLComm     unsafe.Pointer // of GroupNCCL: an ncclComm_t of the same ranks; nil: the group makes one
	HostsApart   bool           // of GroupNCCL: takes ranks of one host for ranks of several
}

// Group is this rank of a group of contexts.
type Group struct {
	use
	c *C.ta_group
}

var errClosedGroup = refuse(ErrClosed, "the group was closed")

// JoinGroup joins a group and returns; WaitReady waits for the other ranks.
//
// Errors: [ErrInvalid] (a value outside its range, an id of another kind, a rank that joined already), [ErrMismatch] (another
// rank, or the communicator, says another number of ranks), [ErrStale] (the group of this id has ended), [ErrLimit] (threads),
// [ErrUnsupported] (of processes: /dev/shm cannot be used, or more than 63 ranks; of NCCL: no library, or a rank without a
// GPU), [ErrMemory] (/dev/shm is full).
func (c *Context) JoinGroup(options GroupOptions) (*Group, error) {
	if !c.enter() {
		return nil, errClosedContext
	}
	defer c.leave()
	o := C.ta_group_options{rank: uint32Of(options.Rank), ranks: uint32Of(options.Ranks), kind: C.ta_group_kind(options.Kind),
		connect_ms: millis(options.Connect), operation_ms: millis(options.Operation), silence_ms: millis(options.Silence),
		staging_bytes: C.uint64_t(options.StagingBytes), nccl_comm: options.NCCLComm}
	if options.HostsApart {
		o.hosts_apart = 1
	}
	g := &Group{}
	e := newError()
	id := options.ID
	if err := result(C.tago_group_create(c.c, &o, (*C.ta_group_id)(unsafe.Pointer(&id)), &g.c, e), e); err != nil {
		return nil, err
	}
	g.open()
	closeLater(g, (*Group).Close)
	return g, nil
}

// Close leaves the group, which ends with that at all ranks.
func (g *Group) Close() error {
	if first, destroy := g.close(); first {
		runtime.SetFinalizer(g, nil)
		if destroy {
			C.ta_group_destroy(g.c)
		}
	}
	return nil
}

func (g *Group) leave() {
	if g.use.leave() {
		C.ta_group_destroy(g.c)
	}
}

// A call on the group and, where not nil, a pool.
func (g *Group) with(p *Pool, call func(*C.ta_error) C.ta_status) error {
	if !g.enter() {
		return errClosedGroup
	}
	defer g.leave()
	if p != nil {
		if !p.enter() {
			return errClosedPool
		}
		defer p.leave()
	}
	e := newError()
	return result(call(e), e)
}

// State says whether the group can be used.
//
// Errors: those of every call.
func (g *Group) State() (GroupState, error) {
	var state C.ta_group_state
	err := g.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_group_poll(g.c, 0, &state, e) })
	return GroupState(state), err
}

// WaitReady waits until all ranks have joined. If the group ends first, it returns the reason; if ctx ends first, it returns
// ctx's error.
func (g *Group) WaitReady(ctx context.Context) error {
	err := wait(ctx, func(time.Duration) (bool, error) {
		state, err := g.State()
		return state != GroupConnecting, err
	})
	if err != nil {
		return err
	}
	return g.Health()
}

// Health is nil while the group connects or is ready, else why it has ended; Error.Rank is the rank at fault.
//
// Errors: [ErrPeerLost], [ErrTimeout] (a rank did not join), [ErrMismatch], [ErrCancelled] (it was aborted).
func (g *Group) Health() error {
	return g.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_group_health(g.c, e) })
}

// Abort ends the group at all ranks.
//
// Errors: those of every call.
func (g *Group) Abort() error {
	return g.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_group_abort(g.c, e) })
}

// GroupInfo says what a group is.
type GroupInfo struct {
	State       GroupState
	Rank, Ranks int
	Kind        GroupKind
	NCCLVersion int    // 22809: 2.28.9; 0: not of GroupNCCL
	Generation  uint64 // differs from group to group; the same at all ranks
	Reason      string // why the group has ended; else empty
}

// Info says what the group is.
//
// Errors: those of every call.
func (g *Group) Info() (*GroupInfo, error) {
	var i C.ta_group_info
	i.struct_size = C.uint32_t(unsafe.Sizeof(i))
	err := g.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_group_get_info(g.c, &i, e) })
	if err != nil {
		return nil, err
	}
	return &GroupInfo{GroupState(i.state), int(i.rank), int(i.ranks), GroupKind(i.kind), int(i.nccl_version),
		uint64(i.generation), C.GoString(&i.reason[0])}, nil
}

// GroupPeer says what lies between this rank and another.
type GroupPeer struct {
	Rank           int
	Route          Route
	BytesPerSecond uint64 // at which its GPU's memory was read when the group was made; 0: not measured
	Why            string // why no faster route is taken; else empty
}

// Peer says how this rank and another are connected. The group must be ready.
//
// Errors: [ErrInvalid] (no such rank), [ErrState] (the group is not ready), and what [Group.Health] says.
func (g *Group) Peer(rank int) (*GroupPeer, error) {
	var p C.ta_group_peer
	p.struct_size = C.uint32_t(unsafe.Sizeof(p))
	err := g.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_group_get_peer(g.c, uint32Of(rank), &p, e) })
	if err != nil {
		return nil, err
	}
	return &GroupPeer{int(p.rank), Route(p.route), uint64(p.bytes_per_s), C.GoString(&p.why[0])}, nil
}

// Descriptor can be read (poll, epoll) while TakeFinished has tickets, or since the state changed. It belongs to the group.
//
// Errors: [ErrUnsupported] (the system gave none).
func (g *Group) Descriptor() (int, error) {
	var fd C.int32_t
	err := g.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_group_descriptor(g.c, &fd, e) })
	return int(fd), err
}

// TakeFinished takes up to most tickets that are finished, each once, the oldest first: see [Transfer.Ticket].
//
// Errors: those of every call.
func (g *Group) TakeFinished(most int) ([]uint64, error) {
	return take(most, func(piece []uint64, n *C.uint64_t) error {
		return g.with(nil, func(e *C.ta_error) C.ta_status {
			return C.ta_group_take_finished(g.c, first[C.ta_ticket](piece), C.uint64_t(len(piece)), n, e)
		})
	})
}

// Transfer is a send, a receive or a fetch that goes on in the background.
type Transfer struct {
	group  *Group
	pool   *Pool // of a receive
	ticket C.ta_ticket

	mutex sync.Mutex
	seq   *Sequence // of a receive that is done
}

// Send offers a sequence to another rank, where Receive with the same tag takes it. With [SendMove] the sequence is as in an
// open step until the end; then it is the other rank's, and calls on it fail with [ErrStale].
//
// Errors: [ErrInvalid] (no such rank), [ErrStale], [ErrBusy] (it is in an open step), [ErrState] (the group is not ready; a
// block was dropped; the sequence is partitioned; the pool is of another context), of a move on a GPU [ErrNonFinite], and what
// [Group.Health] says.
func (g *Group) Send(seq *Sequence, to int, tag uint64, mode SendMode) (*Transfer, error) {
	defer runtime.KeepAlive(seq)
	t := &Transfer{group: g}
	err := g.with(seq.pool, func(e *C.ta_error) C.ta_status {
		return C.ta_seq_send(g.c, seq.pool.c, seq.c(), uint32Of(to), C.uint64_t(tag), C.ta_send_mode(mode), &t.ticket, e)
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Receive takes a sequence that rank from sends with this tag into a pool of the same shape and settings: TransferInfo.Sequence
// of Wait. If nobody waits for it, it is released some time after the transfer became unreachable.
//
// Errors: [ErrInvalid] (no such rank), [ErrState] (the group is not ready; the pool is of another context), and what
// [Group.Health] says.
func (g *Group) Receive(pool *Pool, from int, tag uint64) (*Transfer, error) {
	t := &Transfer{group: g, pool: pool}
	err := g.with(pool, func(e *C.ta_error) C.ta_status {
		return C.ta_seq_receive(g.c, pool.c, uint32Of(from), C.uint64_t(tag), &t.ticket, e)
	})
	if err != nil {
		return nil, err
	}
	runtime.SetFinalizer(t, func(t *Transfer) { go t.forget() })
	return t, nil
}

// Nobody wants what is received.
func (t *Transfer) forget() {
	_ = t.Cancel()
	if info, err := t.Wait(context.Background()); err == nil && info.Sequence != nil {
		_ = info.Sequence.Close()
	}
}

// TransferInfo says how far a transfer is.
type TransferInfo struct {
	State        MoveState // MoveQueued: no other rank has answered yet
	Peer         int       // rank
	Tag          uint64
	Status       Code   // of a transfer that failed or was cancelled
	Blocks       uint64 // of the sequence; of a fetch: keys
	BlocksMoved  uint64
	BlocksShared uint64 // at the destination: were there already
	BytesMoved   uint64
	Sequence     *Sequence // of a receive that is done
	Length       int       // its tokens; of a fetch: that are published under the first keys
	Block        int64     // at which it failed, -1: none
	Rank         int       // whose fault it was, -1: nobody's
	Reason       string
}

// Ticket is the transfer's number in its group.
func (t *Transfer) Ticket() uint64 { return uint64(t.ticket) }

func (t *Transfer) look(patience time.Duration, info *C.ta_transfer_info) error {
	info.struct_size = C.uint32_t(unsafe.Sizeof(*info))
	return t.group.with(nil, func(e *C.ta_error) C.ta_status {
		if patience > 0 {
			return C.ta_transfer_wait(t.group.c, t.ticket, C.int64_t(patience.Nanoseconds()), info, e)
		}
		return C.ta_transfer_query(t.group.c, t.ticket, info, e)
	})
}

func (t *Transfer) info(i *C.ta_transfer_info) *TransferInfo {
	info := &TransferInfo{MoveState(i.state), int(i.peer), uint64(i.tag), Code(i.status), uint64(i.blocks),
		uint64(i.blocks_moved), uint64(i.blocks_shared), uint64(i.bytes_moved), nil, int(i.length), int64(i.block), int(i.rank),
		C.GoString(&i.reason[0])}
	if t.pool != nil && i.seq != 0 {
		t.mutex.Lock()
		defer t.mutex.Unlock()
		if t.seq == nil {
			runtime.SetFinalizer(t, nil)
			t.seq = t.pool.sequence(i.seq)
		}
		info.Sequence = t.seq
	}
	return info
}

// Info says how far the transfer is.
//
// Errors: [ErrStale] (it finished more than 4096 transfers ago).
func (t *Transfer) Info() (*TransferInfo, error) {
	var i C.ta_transfer_info
	if err := t.look(0, &i); err != nil {
		return nil, err
	}
	return t.info(&i), nil
}

// Wait waits for the end of the transfer, or of ctx. If the transfer failed or was cancelled, it returns an error beside the
// info.
//
// Errors: [ErrStale] (it finished more than 4096 transfers ago), and why it ended: [ErrCancelled], [ErrMismatch] (the pools
// cannot exchange blocks), [ErrTierFull] and the others of [Pool.LoadSequence] (at the destination), [ErrCorrupt], [ErrIO] (a
// block at the source), [ErrBusy] (under falling precision: a block lost bits meanwhile), [ErrClosed] (a pool), [ErrTimeout],
// [ErrPeerLost].
func (t *Transfer) Wait(ctx context.Context) (*TransferInfo, error) {
	var i C.ta_transfer_info
	err := wait(ctx, func(patience time.Duration) (bool, error) {
		err := t.look(patience, &i)
		return MoveState(i.state) >= MoveDone, err
	})
	if err != nil {
		return nil, err
	}
	info := t.info(&i)
	if info.State == MoveDone {
		return info, nil
	}
	code := info.Status
	if code == 0 {
		code = ErrCancelled
	}
	failed := refuse(code, info.Reason).(*Error)
	failed.Block, failed.Rank = info.Block, info.Rank
	return info, failed
}

// Cancel asks for the end of the transfer and returns.
//
// Errors: [ErrStale] (it finished more than 4096 transfers ago).
func (t *Transfer) Cancel() error {
	return t.group.with(nil, func(e *C.ta_error) C.ta_status { return C.ta_transfer_cancel(t.group.c, t.ticket, e) })
}

// PartitionOptions of [Sequence.Partition]; a zero field is the default.
type PartitionOptions struct {
	Output     Output
	FirstRank  int    // has block 0; block i is at rank (FirstRank + i) mod ranks
	OutputRank int    // of OutputOne
	Tag        uint64 // of the sequence in the group; no other partitioned sequence of this rank has it
}

// Partition spreads the sequence over the ranks of a group. All ranks make this call on a sequence of the same length with the
// same options, and the same calls on it from then on. docs/sharing.md says which of these wait for other ranks.
//
// Errors: [ErrInvalid] (an option outside its range, the tag of another sequence), [ErrStale], [ErrBusy] (it is in an open
// step), [ErrState] (the group is not ready; the sequence is partitioned already; its universal scales are not known: end a
// step with new tokens first), [ErrUnsupported] (more than 64 ranks, a sequence that was shifted, a pool that is batch
// invariant), and what [Group.Health] says.
func (s *Sequence) Partition(group *Group, options PartitionOptions) error {
	o := C.ta_partition_options{output: C.ta_partition_output(options.Output), first_rank: uint32Of(options.FirstRank),
		output_rank: uint32Of(options.OutputRank), tag: C.uint64_t(options.Tag)}
	o.struct_size = C.uint32_t(unsafe.Sizeof(o))
	defer runtime.KeepAlive(s)
	return group.with(s.pool, func(e *C.ta_error) C.ta_status {
		return C.ta_seq_partition(group.c, s.pool.c, s.c(), &o, e)
	})
}
