package turboattention

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

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
	if at := must(b.LocateBlocks(0, 3))(t); at[0] == nil || at[2] == nil || must(a.LocateBlocks(1, 1))(t)[0] != nil {
		t.Error("blocks are located elsewhere")
	}
	_, err := p.Memory(TierDevice)
	wants(t, err, ErrUnsupported) // of a CPU
	for _, wrong := range [][2]int{{0, 5}, {4, 1}, {-1, 1}, {0, -1}, {0, math.MaxInt64}} {
		_, err := b.DescribeBlocks(wrong[0], wrong[1])
		wants(t, err, ErrInvalid)
		_, err = b.LocateBlocks(wrong[0], wrong[1])
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
