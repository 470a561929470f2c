package turboattention

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"
)

func TestPeerTier(t *testing.T) {
	peer := must(NewContext(&ContextOptions{Threads: 1}))(t)
	p := newPool(t, func(o *PoolOptions) { o.Tiers = &TierOptions{Peer: peer, PeerBytes: 32 << 20} })
	if d := must(p.Describe())(t); d.Tiers.Peer != peer || d.Tiers.PeerBytes != 32<<20 {
		t.Errorf("%+v", d.Tiers)
	}
	check(t, peer.Close()) // the pool keeps it
	a := filled(t, p, 700)
	want := attend(t, p, a)
	must(must(a.Move(1, 8, TierPeer))(t).Wait(background))(t)
	if r := must(a.Residency())(t); r.PeerBlocks != 8 || r.DeviceBlocks != 3 || r.PeerBytes == 0 {
		t.Errorf("%+v", r)
	}
	same(t, want, attend(t, p, a))
	_, err := p.context.NewPool(PoolOptions{Layers: 1, KVHeads: 1, HeadDim: 64, BudgetBytes: 1 << 20, Tiers: &TierOptions{Peer: peer, PeerBytes: 1 << 20}})
	wants(t, err, ErrClosed)
	_, err = p.context.NewPool(PoolOptions{Layers: 1, KVHeads: 1, HeadDim: 64, BudgetBytes: 1 << 20, Tiers: &TierOptions{PeerBytes: 1 << 20}})
	wants(t, err, ErrInvalid)
}

func TestMoves(t *testing.T) {
	p := newPool(t, tiered)
	a := filled(t, p, 700)
	want := attend(t, p, a)
	move := must(a.Move(1, 8, TierHost))(t)
	info := must(move.Wait(background))(t)
	if info.State != MoveDone || info.Moved != 8 || info.Block != -1 {
		t.Errorf("%+v", info)
	}
	if again := must(move.Info())(t); *again != *info {
		t.Errorf("%+v", again)
	}
	if r := must(a.Residency())(t); r.HostBlocks != 8 || r.DeviceBlocks != 3 || r.HostBytes == 0 {
		t.Errorf("%+v", r)
	}
	same(t, want, attend(t, p, a))
	if s := must(p.TierStats(TierHost))(t); s.Blocks != 8 || s.State != TierOK || s.Hits == 0 {
		t.Errorf("%+v", s)
	}
	_, err := p.TierStats(TierDisk)
	wants(t, err, ErrUnsupported)
	if info := must(must(a.Prefetch(1, 8))(t).Wait(background))(t); info.Moved != 8 {
		t.Errorf("%+v", info)
	}
	check(t, a.Pin(2, 3))
	if r := must(a.Residency())(t); r.PinnedBlocks != 3 {
		t.Errorf("%+v", r)
	}
	if info := must(must(a.Move(1, 8, TierHost))(t).Wait(background))(t); info.Skipped != 3 {
		t.Errorf("%+v", info)
	}
	check(t, a.Unpin(2, 3))
	wants(t, a.Unpin(2, 3), ErrState)
	wants(t, a.Pin(-1, 3), ErrInvalid)
	_, err = a.Move(0, 100, TierHost)
	wants(t, err, ErrInvalid)
	check(t, move.Cancel()) // done already
	if s := must(p.MoveStats())(t); s.BytesAsked == 0 || s.BytesPrefetched == 0 || s.HostSteps == 0 {
		t.Errorf("%+v", s)
	}
	var object map[string]any
	check(t, json.Unmarshal([]byte(must(p.Metrics(JSON))(t)), &object))
	if text := must(p.Metrics(OpenMetrics))(t); !strings.HasSuffix(text, "# EOF\n") {
		t.Errorf("%q", text[len(text)-20:])
	}
	_, err = p.Metrics(7)
	wants(t, err, ErrInvalid)
}

func TestAdmission(t *testing.T) {
	p := newPool(t, tiered)
	a, b := must(p.NewSequence())(t), filled(t, p, 100)
	check(t, a.Reserve(100, 0))
	stats := must(p.Stats())(t)
	if stats.BytesPromised == 0 || stats.BytesReclaimable == 0 || stats.BytesFree+stats.BytesPromised+stats.BytesUsed != stats.BytesBudget {
		t.Errorf("%+v", stats)
	}
	err := a.Reserve(1<<30, -1)
	wants(t, err, ErrTierFull)
	if err.(*Error).Bytes <= 0 {
		t.Error(err)
	}
	wants(t, a.Reserve(1<<41, -1), ErrLimit)
	wants(t, a.Reserve(-1, -1), ErrInvalid)
	wants(t, a.Reserve(1, -2), ErrInvalid)
	if again := must(p.Stats())(t); again.BytesPromised != stats.BytesPromised {
		t.Error(again.BytesPromised)
	}
	if f := must(p.Fit([]*Sequence{a, b, nil}, []int{100, 1, 70}))(t); !f.Now || !f.AfterEviction || f.FirstLacking != -1 || f.BytesNew == 0 {
		t.Errorf("%+v", f)
	}
	if f := must(p.Fit([]*Sequence{a, nil}, []int{1, 1 << 30}))(t); f.AfterEviction || f.FirstLacking != 1 || f.BytesLacking == 0 {
		t.Errorf("%+v", f)
	}
	_, err = p.Fit([]*Sequence{a, a}, nil)
	wants(t, err, ErrInvalid)
	_, err = p.Fit([]*Sequence{a}, []int{1, 2})
	wants(t, err, ErrInvalid)
	_, err = p.Fit([]*Sequence{filled(t, newPool(t), 1)}, nil)
	wants(t, err, ErrInvalid)
	check(t, a.Close())
	_, err = p.Fit([]*Sequence{a}, nil)
	wants(t, err, ErrStale)
	if again := must(p.Stats())(t); again.BytesPromised != 0 {
		t.Error(again.BytesPromised)
	}
	want := attend(t, p, b)
	_, err = p.TakeFinishedMoves(9)
	wants(t, err, ErrState)
	must(p.Descriptor())(t)
	suspended := must(b.Suspend(TierHost))(t)
	if info := must(suspended.Wait(background))(t); info.Moved != 2 {
		t.Errorf("%+v", info)
	}
	var finished []uint64
	for len(finished) == 0 {
		finished = must(p.TakeFinishedMoves(9))(t)
	}
	if len(finished) != 1 || finished[0] != suspended.Ticket() {
		t.Error(finished, suspended.Ticket())
	}
	if r := must(b.Residency())(t); r.DeviceBytes != 0 {
		t.Errorf("%+v", r)
	}
	same(t, want, attend(t, p, b))
	_, err = b.Suspend(TierDevice)
	wants(t, err, ErrInvalid)
	_, err = b.Suspend(TierDisk)
	wants(t, err, ErrUnsupported)
}

func threads(t *testing.T) int {
	t.Helper()
	return len(must(os.ReadDir("/proc/self/task"))(t))
}

// The first to ask gets room first, and those behind it take no threads, however many.
func TestManyWaitForRoom(t *testing.T) {
	p := newPool(t, tiered, func(o *PoolOptions) { o.BudgetBytes = 4 << 20 })
	step := must(newPlan(t, p).Begin([]*Sequence{filled(t, p, 1)}, nil, []int{1}))(t) // calls that wait in the library wait for its end
	defer step.Abort()
	holder, half := must(p.NewSequence())(t), 0
	for holder.Reserve(2*(half+64), -1) == nil {
		half += 64
	}
	check(t, holder.Reserve(2*half, -1))
	wants(t, must(p.NewSequence())(t).ReserveContext(background, 1<<30), ErrTierFull) // never

	const many = 300
	ctx, cancel := context.WithCancel(background)
	large, small, before := make(chan error, 1), make(chan error, many), threads(t)
	first := must(p.NewSequence())(t)
	go func() { large <- first.ReserveContext(background, 2*half) }()
	for len(p.first) == 0 {
		time.Sleep(time.Millisecond)
	}
	for i := 0; i < many; i++ {
		seq := must(p.NewSequence())(t)
		go func() { small <- seq.ReserveContext(ctx, 64) }()
	}
	check(t, holder.Reserve(half, -1))
	time.Sleep(50 * time.Millisecond)
	if n := threads(t) - before; n > 10 {
		t.Errorf("%d threads for %d waits", n, many)
	}
	if len(small) > 0 {
		t.Fatal("a later call has ended before the first one: ", <-small)
	}
	cancel()
	for i := 0; i < many; i++ {
		if err := <-small; err != context.Canceled {
			t.Error(err)
		}
	}
	check(t, holder.Close())
	check(t, <-large)
	wants(t, must(p.NewSequence())(t).Reserve(64, -1), ErrTierFull) // its promise holds
}

func TestWaitForRoomEnds(t *testing.T) {
	p := newPool(t, func(o *PoolOptions) { o.BudgetBytes = 4 << 20 })
	holder, seq, tokens := must(p.NewSequence())(t), must(p.NewSequence())(t), 64
	for holder.Reserve(tokens+64, -1) == nil {
		tokens += 64
	}
	ctx, cancel := context.WithTimeout(background, 20*time.Millisecond)
	defer cancel()
	for i := 0; i < 2; i++ { // after its end, too
		if err := seq.ReserveContext(ctx, tokens); err != context.DeadlineExceeded {
			t.Error(err)
		}
	}
	ended := make(chan error)
	go func() { ended <- seq.ReserveContext(background, tokens) }()
	for len(p.first) == 0 {
		time.Sleep(time.Millisecond)
	}
	check(t, p.Close())
	wants(t, <-ended, ErrClosed)
}

func TestWaitForRoomBringsBlocksBack(t *testing.T) {
	p := newPool(t, func(o *PoolOptions) { o.Tiers = &TierOptions{DiskBytes: 64 << 20, DiskFolder: t.TempDir()} })
	a := filled(t, p, 500)
	must(must(a.Move(1, 6, TierDisk))(t).Wait(background))(t)
	check(t, a.ReserveContext(background, 64))
	if r := must(a.Residency())(t); r.DiskBlocks != 0 {
		t.Errorf("%+v", r)
	}
}
