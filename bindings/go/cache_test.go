package turboattention

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"
)

var background = context.Background()

func keys(n int, of byte) []Key {
	list := make([]Key, n)
	for i := range list {
		list[i] = Key{of, byte(i), 1}
	}
	return list
}

func TestSequences(t *testing.T) {
	p := newPool(t)
	a := filled(t, p, 200)
	b := must(a.Fork())(t)
	check(t, b.Truncate(130))
	check(t, b.Verify())
	check(t, b.SetPriority(3))
	wants(t, b.Truncate(131), ErrInvalid)
	if length(t, a) != 200 || length(t, b) != 130 || a.ID() == b.ID() {
		t.Error(length(t, a), length(t, b))
	}
	stats := must(p.Stats())(t)
	if stats.Sequences != 2 || stats.Tokens != 330 || stats.SharedBlocks != 3 || stats.BytesUsed == 0 {
		t.Errorf("%+v", stats)
	}
	check(t, a.Close())
	check(t, a.Close())
	_, err := a.Length()
	wants(t, err, ErrStale)
	if stats := must(p.Stats())(t); stats.Sequences != 1 {
		t.Errorf("%+v", stats)
	}
}

func TestNamespaces(t *testing.T) {
	p := newPool(t)
	space := must(p.NewNamespace([32]byte{1}, 0))(t)
	_, err := p.NewNamespace([32]byte{1}, 0)
	wants(t, err, ErrInvalid)
	a, list := filled(t, p, 200), keys(3, 1)
	wants(t, a.Publish(space, keys(4, 1)), ErrInvalid)
	check(t, a.Publish(space, list))
	check(t, a.Close())
	b, n, err := space.Match(append(keys(2, 1), keys(1, 9)...))
	check(t, err)
	if n != 128 || length(t, b) != 128 {
		t.Errorf("%d tokens", n)
	}
	events, hashed := must(space.TakeEvents(10))(t), must(space.HashKeys(list))(t)
	if len(events) != 4 || events[0].Kind != EventReset || events[3].Kind != EventPublished {
		t.Fatalf("%+v", events)
	}
	for _, event := range events[1:] {
		if event.Key != hashed[event.Index] || event.Tier != TierDevice {
			t.Errorf("%+v", event)
		}
	}
	if s := must(space.Stats())(t); s.Entries != 3 || s.Hits != 2 || s.Misses != 1 || s.Published != 3 || s.BytesShared == 0 {
		t.Errorf("%+v", s)
	}
	wants(t, space.Flush(), ErrUnsupported)
	check(t, space.Destroy())
	_, err = space.Stats()
	wants(t, err, ErrStale)
	wants(t, b.Publish(must(newPool(t).NewNamespace([32]byte{1}, 0))(t), list), ErrInvalid) // of another pool
}

func TestAllThatWaits(t *testing.T) {
	p := newPool(t, tiered)
	must(p.Descriptor())(t)
	a, b, space := filled(t, p, 64), filled(t, p, 200), must(p.NewNamespace([32]byte{1}, 0))(t)
	const n = 1500
	for i := 0; i < n; i++ {
		check(t, a.Publish(space, []Key{{byte(i), byte(i >> 8)}}))
	}
	number := uint64(0)
	for _, c := range []struct{ most, want int }{{-1, 0}, {0, 0}, {1100, 1100}, {math.MaxInt, n + 1 - 1100}, {math.MaxInt, 0}} {
		events := must(space.TakeEvents(c.most))(t)
		if len(events) != c.want {
			t.Fatalf("%d of %d events", len(events), c.want)
		}
		for _, event := range events {
			if number++; event.Number != number {
				t.Fatalf("event %d, not %d", event.Number, number)
			}
		}
	}

	var want []uint64
	for i := 0; i < n; i++ {
		move := must(b.Move(1, 1, []Tier{TierHost, TierDevice}[i%2]))(t)
		must(move.Wait(background))(t)
		want = append(want, move.Ticket())
	}
	got := must(p.TakeFinishedMoves(1100))(t)
	for len(got) < n {
		got = append(got, must(p.TakeFinishedMoves(math.MaxInt))(t)...)
	}
	if !reflect.DeepEqual(got, want) {
		t.Error(got)
	}
	if more := must(p.TakeFinishedMoves(1 << 58))(t); len(more) != 0 {
		t.Error(more)
	}
	check(t, space.Destroy())
	_, err := space.TakeEvents(math.MaxInt)
	wants(t, err, ErrStale)
}

type table struct {
	mutex  sync.Mutex
	values map[Key][]byte
}

func (s *table) each(items []StoreItem, do func(*StoreItem) bool) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for i := range items {
		if do(&items[i]) {
			items[i].Result = StoreDone
		}
	}
	return nil
}

func (s *table) Exists(items []StoreItem, _ time.Duration) error {
	return s.each(items, func(i *StoreItem) bool { return s.values[i.Key] != nil })
}

func (s *table) Get(items []StoreItem, _ time.Duration) error {
	return s.each(items, func(i *StoreItem) bool {
		value := s.values[i.Key]
		copy(i.Data, value)
		i.Size = uint64(len(value))
		return value != nil
	})
}

func (s *table) Put(items []StoreItem, _ time.Duration) error {
	return s.each(items, func(i *StoreItem) bool {
		s.values[i.Key] = append([]byte(nil), i.Data...)
		return true
	})
}

func (s *table) Remove([]StoreItem, time.Duration) error { panic("oops") }

func TestStores(t *testing.T) {
	store, list := &table{values: map[Key][]byte{}}, keys(3, 1)
	p := newPool(t)
	space := must(p.NewNamespace([32]byte{1}, 0))(t)
	_, err := space.Load(list)
	wants(t, err, ErrState)
	for time, want := range map[time.Duration]int{0: 0, 500: 1, time.Millisecond: 1, 1500 * time.Microsecond: 2, -1: -1} {
		if ms := int(millis(time)); ms != want {
			t.Errorf("%v is %d ms", time, ms)
		}
	}
	for _, timeout := range []time.Duration{-1, 25 * time.Hour, 1 << 62} {
		wants(t, space.AttachStore(store, StoreOptions{Timeout: timeout}), ErrInvalid)
	}
	wants(t, space.AttachStore(nil, StoreOptions{}), ErrInvalid)
	check(t, space.AttachStore(store, StoreOptions{Timeout: time.Minute}))
	wants(t, space.AttachStore(store, StoreOptions{}), ErrState)
	check(t, filled(t, p, 200).Publish(space, list))
	if missing := must(space.FlushStore(-1))(t); missing != 0 || len(store.values) != 3 {
		t.Errorf("%d are missing, %d there", missing, len(store.values))
	}
	if s := must(space.StoreStats())(t); s.Puts != 3 || s.Failure != "" || !s.Failed.IsZero() {
		t.Errorf("%+v", s)
	}
	check(t, space.DetachStore())
	for i := 0; i < 2; i++ {
		other := must(newPool(t).NewNamespace([32]byte{1}, 0))(t)
		check(t, other.AttachStore(store, StoreOptions{Timeout: time.Minute, WriteThrough: Off}))
		info := must(must(other.Load(keys(4, 1)))(t).Wait(background))(t)
		_, n, err := other.Match(list)
		check(t, err)
		if want := uint64(3 - 3*i); info.Moved != want || n != int(64*want) {
			t.Errorf("%+v, %d tokens", info, n)
		}
		if s := must(other.StoreStats())(t); s.Refused != uint64(i) || s.CallsFailed != uint64(i) {
			t.Errorf("%+v", s)
		}
		check(t, other.DetachStore())
		for _, value := range store.values { // is refused; the panic of Remove changes nothing
			value[200] ^= 1
		}
	}
}

func TestFiles(t *testing.T) {
	p, folder := newPool(t), t.TempDir()
	a := filled(t, p, 200)
	want := attend(t, p, a)
	path := filepath.Join(folder, "a")
	calls := 0
	check(t, a.Save(path, func(done, total uint64) error { calls++; return nil }))
	if calls == 0 {
		t.Error("no progress")
	}
	wants(t, a.Save(path, nil), ErrInvalid) // exists
	b := must(p.LoadSequence(path, nil))(t)
	same(t, want, attend(t, p, b))

	mine := errors.New("mine")
	if err := a.Save(path+"2", func(uint64, uint64) error { return mine }); err != mine {
		t.Error(err)
	}
	func() {
		defer func() {
			if recover() != "oops" {
				t.Error("the panic is gone")
			}
		}()
		_ = a.Save(path+"2", func(uint64, uint64) error { panic("oops") })
	}()
	if _, err := os.Stat(path + "2"); !os.IsNotExist(err) {
		t.Error(err)
	}
	wants(t, a.Save("a\x00b", nil), ErrInvalid)
	_, err := p.LoadSequence(path+"3", nil)
	wants(t, err, ErrIO)

	all := filepath.Join(folder, "all")
	check(t, p.Save(all, true, nil))
	other := newPool(t)
	loaded := must(other.Load(all, func(done, total uint64) error { return nil }))(t)
	if len(loaded) != 2 {
		t.Fatal(loaded)
	}
	same(t, want, attend(t, other, loaded[a.ID()]))
	empty := filepath.Join(folder, "empty")
	check(t, newPool(t).Save(empty, false, nil))
	if loaded := must(other.Load(empty, nil))(t); len(loaded) != 0 {
		t.Error(loaded)
	}
	data := must(os.ReadFile(path))(t)
	data[len(data)/2] ^= 1
	check(t, os.WriteFile(path+"4", data, 0o600))
	_, err = p.LoadSequence(path+"4", nil)
	wants(t, err, ErrCorrupt)
}

// Takes most bytes, then does as fail says.
type narrow struct {
	most int
	fail func() (int, error)
}

func (n *narrow) WriteAt(data []byte, _ int64) (int, error) {
	if n.most -= len(data); n.most < 0 {
		return n.fail()
	}
	return len(data), nil
}

func TestExports(t *testing.T) {
	p, path := newPool(t), filepath.Join(t.TempDir(), "a")
	a := filled(t, p, 200)
	want := attend(t, p, a)
	file := must(os.Create(path + "1"))(t)
	n := must(a.Export(file))(t)
	check(t, file.Close())
	data := must(os.ReadFile(path + "1"))(t)
	check(t, a.Save(path, nil))
	if !bytes.Equal(data, must(os.ReadFile(path))(t)) || n != int64(len(data)) {
		t.Errorf("%d bytes are not those of a save", n)
	}
	same(t, want, attend(t, p, must(p.ImportSequence(data))(t)))

	mine := errors.New("mine")
	for _, most := range []int{0, len(data) / 2, len(data) - 1} {
		if _, err := a.Export(&narrow{most, func() (int, error) { return 0, mine }}); err != mine {
			t.Error(most, err)
		}
		if _, err := a.Export(&narrow{most, func() (int, error) { return 0, nil }}); err != io.ErrShortWrite {
			t.Error(most, err)
		}
		func() {
			defer func() {
				if recover() != "oops" {
					t.Error("the panic is gone")
				}
			}()
			_, _ = a.Export(&narrow{most, func() (int, error) { panic("oops") }})
		}()
	}
	_, err := a.Export(nil)
	wants(t, err, ErrInvalid)
	data[len(data)/2] ^= 1
	for _, bad := range [][]byte{data, data[:100], nil} {
		_, err = p.ImportSequence(bad)
		wants(t, err, ErrCorrupt)
	}
	if s := must(p.Stats())(t); s.Sequences != 2 {
		t.Errorf("%+v", s)
	}
}

func tiered(o *PoolOptions) { o.Tiers = &TierOptions{HostBytes: 32 << 20, BeginWaitMillis: 50} }

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

func TestForgetRetainDescribe(t *testing.T) {
	p := newPool(t)
	a := filled(t, p, 200)
	if n := must(a.Forget(60, 100))(t); n != 64 { // block 1 is the only whole one
		t.Error(n)
	}
	if n := must(a.Forget(0, 192))(t); n != 128 {
		t.Error(n)
	}
	if r := must(a.Residency())(t); r.DroppedBlocks != 3 || r.DeviceBlocks != 1 || length(t, a) != 200 {
		t.Errorf("%+v", r)
	}
	for _, wrong := range [][2]int{{0, 201}, {-1, 1}, {0, -1}, {math.MaxInt64, 1}} {
		_, err := a.Forget(wrong[0], wrong[1])
		wants(t, err, ErrInvalid)
	}
	wants(t, a.Truncate(100), ErrState)
	check(t, step(newPlan(t, p), a, 1, make([]float32, qHeads*dim))) // goes on

	b := filled(t, p, 200)
	check(t, b.Publish(must(p.NewNamespace([32]byte{1}, 0))(t), make([]Key, 1)))
	check(t, b.Pin(1, 1))
	check(t, b.Retain(0, 2, &Retention{Priority: 50, DurationMillis: 1 << 40}))
	check(t, b.Retain(2, 1, &Retention{Priority: 3}))
	wants(t, b.Retain(2, 2, nil), ErrState) // not full
	wants(t, b.Retain(2, 3, nil), ErrInvalid)
	wants(t, b.Retain(-1, 1, nil), ErrInvalid)
	for _, wrong := range []Retention{{Priority: 64}, {Priority: -1}, {Priority: 1 << 32}, {DurationMillis: -1}} {
		wants(t, b.Retain(0, 1, &wrong), ErrInvalid)
	}
	list := must(b.DescribeBlocks(0, 4))(t)
	if left := list[0].RetainedMillis; left < 1<<39 || left > 1<<40 {
		t.Error(left)
	}
	list[0].RetainedMillis, list[1].RetainedMillis = 0, 0
	d := must(p.Describe())(t)
	for i, want := range []BlockInfo{
		{Bytes: d.TokenBlockBytes, Owners: 2, Priority: 50, Published: true}, // the sink block stays 8 bits
		{Bytes: d.ChannelBlockBytes, Owners: 1, Pins: 1, Priority: 50},
		{Bytes: d.ChannelBlockBytes, Owners: 1, Priority: 3, RetainedMillis: -1},
		{Bytes: d.TokenBlockBytes, Owners: 1, Priority: 32, RetainedMillis: -1, Open: true},
	} {
		if list[i] != want {
			t.Errorf("block %d: %+v", i, list[i])
		}
	}
	check(t, b.Retain(0, 3, nil))
	if i := must(b.DescribeBlocks(0, 1))(t)[0]; i.Priority != 32 || i.RetainedMillis != -1 {
		t.Errorf("%+v", i)
	}
	if i := must(a.DescribeBlocks(1, 1))(t)[0]; i != (BlockInfo{Dropped: true, Priority: 32, RetainedMillis: -1}) {
		t.Errorf("%+v", i)
	}
	must(b.DescribeBlocks(4, 0))(t)
	for _, wrong := range [][2]int{{0, 5}, {4, 1}, {-1, 1}, {0, -1}, {0, math.MaxInt64}} {
		_, err := b.DescribeBlocks(wrong[0], wrong[1])
		wants(t, err, ErrInvalid)
	}
}

func TestShift(t *testing.T) {
	rotary := Rotary{Pairs: RotaryAdjacent, Channels: dim, Angles: make([]float64, layers*dim/2)} // turns nothing
	with := func(r Rotary) func(*PoolOptions) { return func(o *PoolOptions) { o.Rotary = &r } }
	p := newPool(t, with(rotary))
	d := must(p.Describe())(t)
	if d.Rotary == nil || !reflect.DeepEqual(*d.Rotary, rotary) {
		t.Fatalf("%+v", d.Rotary)
	}
	must(p.context.NewPool(d.PoolOptions))(t).Close()
	plan, seq := newPlan(t, p), filled(t, p, 200)
	fork := must(seq.Fork())(t)
	ask := func(s *Sequence, queries int, at ...int64) ([]float32, error) {
		step, err := plan.BeginWith([]*Sequence{s}, nil, []int{queries}, &StepOptions{QueryPositions: at})
		if err != nil {
			return nil, err
		}
		defer step.abort()
		out := make([]float32, qHeads*dim)
		return out, step.Attend(0, TensorOf(q, 1, qHeads, dim), TensorOf(out, 1, qHeads, dim), nil)
	}
	same(t, must(ask(seq, 1, 199))(t), attend(t, p, seq))
	must(ask(seq, 1, 100))(t)
	check(t, seq.Shift(64, 64))
	if n := must(fork.Forget(64, 64))(t); n != 64 || length(t, seq) != 200 {
		t.Error(n, length(t, seq))
	}
	forgotten := must(ask(fork, 1, 199))(t)
	for i, x := range must(ask(seq, 1, 199))(t) {
		if math.Abs(float64(x-forgotten[i])) > 1e-5 {
			t.Fatal(i, x, forgotten[i])
		}
	}
	_, err := ask(seq, 1, 100)
	wants(t, err, ErrState) // in the gap
	for _, at := range [][]int64{{}, {198, 199}, {-1}, {200}} {
		_, err := ask(seq, 1, at...)
		wants(t, err, ErrInvalid)
	}
	wants(t, seq.Shift(60, 64), ErrInvalid)
	wants(t, seq.Shift(64, 192), ErrInvalid)

	one := newPool(t, with(Rotary{Channels: 4, Angles: []float64{0.5, 0.25}})) // of all layers
	if r := must(one.Describe())(t).Rotary; r.Pairs != RotaryHalves || len(r.Angles) != 2 || r.Angles[1] != 0.25 {
		t.Errorf("%+v", r)
	}
	o := poolOptions()
	o.Rotary = &Rotary{Channels: 4, Angles: make([]float64, 3)}
	_, err = p.context.NewPool(o)
	wants(t, err, ErrShape)
	o.Rotary = &Rotary{Channels: 3, Angles: make([]float64, 1)}
	_, err = p.context.NewPool(o)
	wants(t, err, ErrInvalid)
	plain := newPool(t)
	if d := must(plain.Describe())(t); d.Rotary != nil {
		t.Errorf("%+v", d.Rotary)
	}
	wants(t, filled(t, plain, 64).Shift(0, 64), ErrUnsupported)
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

func TestDescribe(t *testing.T) {
	p := newPool(t, tiered, func(o *PoolOptions) {
		o.Numerics.KOffset = make([]float32, layers*kvHeads*dim)
		o.Numerics.KOffset[5] = 2
	})
	d := must(p.Describe())(t)
	if d.Layers != layers || d.KVHeads != kvHeads || d.HeadDim != dim || d.Bits != 4 || len(d.KBits) != layers*kvHeads ||
		d.Numerics.Exp != ExpPoly || d.Numerics.Hadamard != On || d.Numerics.SinkBlocks != 1 || d.Numerics.KOffset[5] != 2 ||
		d.Tiers == nil || d.Tiers.BeginWaitMillis != 50 || d.Device != CPU || d.BudgetBytes != 64<<20 || d.TokenBlockBytes == 0 {
		t.Errorf("%+v", d)
	}
	again := must(p.context.NewPool(d.PoolOptions))(t)
	defer again.Close()
	if e := must(again.Describe())(t); e.Fingerprint != d.Fingerprint {
		t.Error("a pool of the same options is another one")
	}
}

func TestContextInfo(t *testing.T) {
	c := must(NewContext(&ContextOptions{Threads: 2, ISA: ISAScalar}))(t)
	defer c.Close()
	info := must(c.Info())(t)
	if info.Threads != 2 || info.ISA != ISAScalar || info.ISABest < ISAScalar || info.DeviceName == "" {
		t.Errorf("%+v", info)
	}
	check(t, c.Health())
	if Version() < 100 || ABIVersion() != 1 || !strings.HasPrefix(BuildInfo(), "turboattention ") {
		t.Error(Version(), ABIVersion(), BuildInfo())
	}
	_, err := NewContext(&ContextOptions{Threads: -1})
	wants(t, err, ErrInvalid)
}

func TestDenseAndMerge(t *testing.T) {
	c := newContext(t)
	const n = 96
	tq, whole := TensorOf(q, 4, qHeads, dim), make([]float32, 4*qHeads*dim)
	attend := func(from, to int, out []float32, lse []float32) {
		check(t, c.AttendDense(tq, TensorOf(k[from*kvHeads*dim:], to-from, kvHeads, dim),
			TensorOf(v[from*kvHeads*dim:], to-from, kvHeads, dim), TensorOf(out, 4, qHeads, dim),
			&DenseOptions{Variant: DenseIntFlashHalf, Attend: AttendOptions{Mask: MaskFull, LSE: FloatsOf(lse)}}))
	}
	lse := make([]float32, 4*qHeads)
	attend(0, n, whole, lse)
	var states []State
	for i := 0; i < 3; i++ {
		out, lse := make([]float32, len(whole)), make([]float32, len(lse))
		attend(i*n/3, (i+1)*n/3, out, lse)
		states = append(states, State{TensorOf(out, 4, qHeads, dim), FloatsOf(lse)})
	}
	merged, mergedLSE := make([]float32, len(whole)), make([]float32, len(lse))
	check(t, c.MergeStates(states, TensorOf(merged, 4, qHeads, dim), FloatsOf(mergedLSE), nil))
	for i := range whole {
		if d := whole[i] - merged[i]; d > 0.01 || d < -0.01 {
			t.Fatalf("element %d: %v and %v", i, whole[i], merged[i])
		}
	}
	wants(t, c.MergeStates(nil, TensorOf(merged, 4, qHeads, dim), Floats{}, nil), ErrInvalid)
	wants(t, c.MergeStates(states, TensorOf(merged, 4, qHeads, dim), FloatsOf(mergedLSE[1:]), nil), ErrShape)
	tk := TensorOf(k, n, kvHeads, dim)
	check(t, c.AttendDense(tq, tk, tk, TensorOf(merged, 4, qHeads, dim), nil))
	check(t, c.AttendDense(tq, tk, tk, TensorOf(merged, 4, qHeads, dim),
		&DenseOptions{QOffsets: []int64{0, 1, 4}, KOffsets: []int64{0, 50, 96}}))
	wants(t, c.AttendDense(tq, tk, tk, tq, &DenseOptions{Batch: 3, QOffsets: []int64{0, 4}}), ErrInvalid)
}

func TestCalibrator(t *testing.T) {
	c := must(newContext(t).NewCalibrator(layers, kvHeads, dim))(t)
	_, err := c.Finish(1)
	wants(t, err, ErrState)
	for layer := 0; layer < layers; layer++ {
		check(t, c.Observe(layer, TensorOf(k, 100, kvHeads, dim), TensorOf(v, 100, kvHeads, dim)))
	}
	maps := must(c.Finish(1))(t)
	if maps.KBits[0]+maps.KBits[1] != 6 || maps.KPriority[0] == 0 {
		t.Errorf("%+v", maps)
	}
	newPool(t, func(o *PoolOptions) { o.KBits, o.VBits = maps.KBits, maps.VBits })
	costs := make([]float32, 3*layers*kvHeads)
	maps = must(c.Choose(costs, costs, 1<<30))(t)
	if maps.KBits[0] != 2 || maps.VBits[layers*kvHeads-1] != 2 {
		t.Errorf("what costs nothing: %+v", maps)
	}
	_, err = c.Choose(costs, costs, 1)
	wants(t, err, ErrInvalid)
	_, err = c.Choose(costs[1:], costs, 1<<30)
	wants(t, err, ErrInvalid)
	check(t, c.Close())
	check(t, c.Close())
	wants(t, c.Observe(0, TensorOf(k, 1, kvHeads, dim), TensorOf(v, 1, kvHeads, dim)), ErrClosed)
}

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
