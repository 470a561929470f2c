package turboattention

import (
	"context"
	"math"
	"runtime/pprof"
	"testing"
	"time"
)

// Two ranks of a local group, each with a pool.
func ranks(t *testing.T, change ...func(*PoolOptions)) (groups [2]*Group, pools [2]*Pool) {
	t.Helper()
	id := must(NewGroupID(GroupLocal))(t)
	for i := range groups {
		pools[i] = newPool(t, change...)
		groups[i] = must(pools[i].context.JoinGroup(GroupOptions{Kind: GroupLocal, ID: id, Rank: i, Ranks: 2,
			Operation: 5 * time.Second}))(t)
		group := groups[i]
		t.Cleanup(func() { group.Close() })
	}
	for _, group := range groups {
		check(t, group.WaitReady(background))
	}
	return groups, pools
}

func TestTransfers(t *testing.T) {
	groups, pools := ranks(t)
	a := filled(t, pools[0], 300)
	want := attend(t, pools[0], a)
	receive := must(groups[1].Receive(pools[1], 0, 7))(t)
	send := must(groups[0].Send(a, 1, 7, SendCopy))(t)
	info := must(receive.Wait(background))(t)
	if info.Length != 300 || info.Blocks != 5 || info.Peer != 0 || info.Tag != 7 || info.Rank != -1 || info.BytesMoved == 0 {
		t.Errorf("%+v", info)
	}
	must(send.Wait(background))(t)
	same(t, want, attend(t, pools[1], info.Sequence))
	if again := must(receive.Info())(t); again.Sequence != info.Sequence {
		t.Error("another sequence")
	}
	must(groups[0].Descriptor())(t)
	if finished := must(groups[0].TakeFinished(math.MaxInt))(t); len(finished) != 1 || finished[0] != send.Ticket() {
		t.Error(finished, send.Ticket())
	}
	move := must(groups[0].Send(a, 1, 8, SendMove))(t)
	must(must(groups[1].Receive(pools[1], 0, 8))(t).Wait(background))(t)
	must(move.Wait(background))(t)
	_, err := a.Length()
	wants(t, err, ErrStale)
	check(t, a.Close())

	if g := must(groups[1].Info())(t); g.State != GroupReady || g.Rank != 1 || g.Ranks != 2 || g.Kind != GroupLocal {
		t.Errorf("%+v", g)
	}
	if peer := must(groups[1].Peer(0))(t); peer.Route != RouteHostMemory || peer.Rank != 0 {
		t.Errorf("%+v", peer)
	}

	// nobody sends: a context ends the wait, Cancel the transfer
	lonely := must(groups[1].Receive(pools[1], 0, 9))(t)
	ctx, cancel := context.WithTimeout(background, 10*time.Millisecond)
	defer cancel()
	if _, err := lonely.Wait(ctx); err != context.DeadlineExceeded {
		t.Error(err)
	}
	check(t, lonely.Cancel())
	_, err = lonely.Wait(background)
	wants(t, err, ErrCancelled)

	check(t, groups[0].Abort())
	wants(t, groups[0].Health(), ErrCancelled)
	for start := time.Now(); groups[1].Health() == nil && time.Since(start) < 5*time.Second; { // until rank 1 has heard of it
		time.Sleep(time.Millisecond)
	}
	wants(t, groups[1].WaitReady(background), ErrPeerLost)
}

// A rank that closes its group leaves it.
func TestClosedGroup(t *testing.T) {
	groups, _ := ranks(t)
	check(t, groups[0].Close())
	wants(t, groups[0].Health(), ErrClosed)
	for start := time.Now(); groups[1].Health() == nil && time.Since(start) < 5*time.Second; {
		time.Sleep(time.Millisecond)
	}
	wants(t, groups[1].Health(), ErrPeerLost)
}

func TestWaitingTakesNoThreads(t *testing.T) {
	groups, pools := ranks(t)
	ctx, cancel := context.WithCancel(background)
	ended := make(chan error)
	threads := pprof.Lookup("threadcreate").Count
	before := threads()
	for i := 0; i < 200; i++ {
		receive := must(groups[1].Receive(pools[1], 0, uint64(i)))(t)
		go func() { _, err := receive.Wait(ctx); ended <- err }()
	}
	time.Sleep(100 * time.Millisecond)
	if n := threads() - before; n > 20 {
		t.Errorf("%d threads for 200 waits", n)
	}
	cancel()
	for i := 0; i < 200; i++ {
		if err := <-ended; err != context.Canceled {
			t.Error(err)
		}
	}
}

func TestFetch(t *testing.T) {
	groups, pools := ranks(t)
	var spaces [2]*Namespace
	for i := range spaces {
		spaces[i] = must(pools[i].NewNamespace([32]byte{1}, 0))(t)
		check(t, spaces[i].Join(groups[i]))
	}
	wants(t, spaces[0].Join(groups[0]), ErrInvalid)
	list := keys(3, 1)
	check(t, filled(t, pools[0], 200).Publish(spaces[0], list))
	ctx, cancel := context.WithTimeout(background, 5*time.Second)
	defer cancel()
	for places := make([]Place, 1); places[0].Answer != AnswerYes; {
		places = must(spaces[1].LookupWait(ctx, groups[1], list))(t)
	}
	if info := must(must(spaces[1].Fetch(groups[1], list))(t).Wait(ctx))(t); info.Length != 192 {
		t.Errorf("%+v", info)
	}
	if _, n, err := spaces[1].Match(list); n != 192 || err != nil {
		t.Error(n, err)
	}
	check(t, spaces[1].Leave(groups[1]))
	wants(t, spaces[1].Leave(groups[1]), ErrState)
}

func TestPartition(t *testing.T) {
	groups, pools := ranks(t)
	want := attend(t, pools[0], filled(t, pools[0], 300))
	type result struct {
		out []float32
		err error
	}
	results := make(chan result)
	for i := range groups {
		go func(group *Group, pool *Pool) {
			out := make([]float32, 300*qHeads*dim)
			err := func() error {
				seq, err := pool.NewSequence()
				if err != nil {
					return err
				}
				if err := seq.Partition(group, PartitionOptions{Tag: 5, Output: OutputAll}); err != nil {
					return err
				}
				plan, err := pool.NewPlan()
				if err != nil {
					return err
				}
				if err := step(plan, seq, 300, out); err != nil {
					return err
				}
				out = out[:qHeads*dim]
				return plan.StepQueries([]*Sequence{seq}, nil, []int{1}, func(s *Step) error {
					return s.Attend(0, TensorOf(q, 1, qHeads, dim), TensorOf(out, 1, qHeads, dim), nil)
				})
			}()
			results <- result{out, err}
		}(groups[i], pools[i])
	}
	for range groups {
		r := <-results
		check(t, r.err)
		for i := range want {
			if d := want[i] - r.out[i]; d > 1e-3 || d < -1e-3 {
				t.Fatalf("element %d: %v and %v", i, want[i], r.out[i])
			}
		}
	}
}
