package turboattention

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"turboattention/internal/forked"
)

var steps = flag.Int("steps", 20000, "steps of the leak test")

func residentBytes(t *testing.T) int {
	data := must(os.ReadFile("/proc/self/statm"))(t)
	var size, resident int
	must(fmt.Sscan(string(data), &size, &resident))(t)
	return resident * os.Getpagesize()
}

// Steps, forks, errors and all that a request makes, again and again: the memory of the process stays as it is.
func TestNothingLeaks(t *testing.T) {
	p := newPool(t)
	plan, out := newPlan(t, p), make([]float32, qHeads*dim)
	base, done := filled(t, p, 64), 0
	some := func(n int) {
		for end := done + n; done < end; done++ {
			check(t, step(plan, base, 1, out))
			if done%32 == 0 {
				check(t, base.Truncate(64))
			}
			if done%8 == 0 {
				fork := must(base.Fork())(t)
				wants(t, fork.Truncate(1000), ErrInvalid)
				if done%16 == 0 {
					check(t, fork.Close())
				} // else its finalizer does
				must(p.NewPlan())(t)
			}
			if done%500 == 0 {
				must(p.Metrics(JSON))(t)
				c := must(NewContext(&ContextOptions{Threads: 1, Log: func(LogLevel, string) {}}))(t)
				must(c.NewPool(poolOptions()))(t)
				must(c.NewCalibrator(1024, 256, 128))(t)
				runtime.GC()
			}
		}
	}
	some(*steps / 4)
	runtime.GC()
	before := residentBytes(t)
	some(*steps - *steps/4)
	runtime.GC()
	if grown := residentBytes(t) - before; grown > 12<<20 {
		t.Errorf("%d bytes more after %d steps", grown, *steps)
	}
}

func TestUseAfterClose(t *testing.T) {
	c := must(NewContext(nil))(t)
	p := must(c.NewPool(poolOptions()))(t)
	plan, seq, out := must(p.NewPlan())(t), filled(t, p, 10), make([]float32, qHeads*dim)
	check(t, c.Close())
	check(t, c.Close())
	wants(t, c.Health(), ErrClosed)
	_, err := c.NewPool(poolOptions())
	wants(t, err, ErrClosed)
	check(t, step(plan, seq, 1, out)) // children go on
	s := must(plan.Begin([]*Sequence{seq}, []int{1}, nil))(t)
	check(t, p.Close())
	check(t, p.Close())
	wants(t, s.Append(0, TensorOf(k, 1, kvHeads, dim), TensorOf(v, 1, kvHeads, dim)), ErrClosed)
	check(t, s.Abort())
	wants(t, s.Abort(), ErrState)
	wants(t, step(plan, seq, 1, out), ErrClosed)
	_, err = seq.Length()
	wants(t, err, ErrClosed)
	check(t, seq.Close())
	check(t, plan.Close())
	check(t, plan.Close())
	wants(t, step(plan, seq, 1, out), ErrClosed)
}

// Zero values, such as those of a struct that was not filled in, are no handles for C.
func TestZeroValues(t *testing.T) {
	var c Context
	var p Pool
	var g Group
	var plan Plan
	var k Calibrator
	_, made := c.Info()
	_, planned := p.NewPlan()
	for _, err := range []error{made, planned, g.Health(), step(&plan, nil, 1, nil), k.Observe(0, Tensor{}, Tensor{})} {
		wants(t, err, ErrClosed)
	}
	for _, end := range []func() error{c.Close, p.Close, g.Close, plan.Close, k.Close} {
		check(t, end())
	}
}

// What is not closed is collected, parents and children in any order. The library lets go of an allocator when the last of a
// context's handles was destroyed.
func TestDroppedParents(t *testing.T) {
	var released atomic.Int32
	func() {
		for i := 0; i < 10; i++ {
			allocator := &pages{}
			runtime.SetFinalizer(allocator, func(*pages) { released.Add(1) })
			c := must(NewContext(&ContextOptions{Threads: 1, Allocator: allocator}))(t)
			p := must(c.NewPool(poolOptions()))(t)
			plan := must(p.NewPlan())(t)
			seq := must(p.NewSequence())(t)
			c, p = nil, nil
			runtime.GC()
			check(t, step(plan, seq, 10, make([]float32, 10*qHeads*dim)))
			must(plan.Begin([]*Sequence{seq}, []int{1}, nil))(t) // left open
		}
	}()
	for start := time.Now(); released.Load() < 10; runtime.GC() {
		if time.Since(start) > 10*time.Second {
			t.Fatalf("%d of 10 contexts have ended", released.Load())
		}
		time.Sleep(time.Millisecond)
	}
}

type writer func()

func (w writer) WriteAt(data []byte, _ int64) (int, error) {
	w()
	return len(data), nil
}

// A sequence that is not used after a call is not collected, and so released, while the call runs.
func TestACallKeepsItsSequence(t *testing.T) {
	p := newPool(t)
	seq, collected := filled(t, p, 10), make(chan struct{})
	runtime.SetFinalizer(seq, nil)
	runtime.SetFinalizer(seq, func(*Sequence) { close(collected) })
	must(seq.Export(writer(func() {
		for i := 0; i < 5; i++ {
			runtime.GC()
			select {
			case <-collected:
				t.Fatal("the sequence is collected")
			case <-time.After(time.Millisecond):
			}
		}
	})))(t)
	collect(t, collected)
}

// A BlockStore that does not return before it is told to.
type stuck struct {
	BlockStore
	called, end chan struct{}
}

func (s *stuck) Get([]StoreItem, time.Duration) error {
	close(s.called)
	<-s.end
	return nil
}

// Collects garbage until something is done, up to 10 s.
func collect(t *testing.T, done <-chan struct{}) {
	t.Helper()
	for start := time.Now(); ; runtime.GC() {
		select {
		case <-done:
			return
		case <-time.After(time.Millisecond):
		}
		if time.Since(start) > 10*time.Second {
			t.Fatal("not collected")
		}
	}
}

// A pool that is collected waits for its store. Finalizers of others do not.
func TestDroppedPoolWaitsAlone(t *testing.T) {
	end, released := make(chan struct{}), make(chan struct{})
	var once sync.Once
	letGo := func() { once.Do(func() { close(end) }) }
	defer letGo()
	func() {
		store := &stuck{called: make(chan struct{}), end: end}
		runtime.SetFinalizer(store, func(*stuck) { close(released) })
		p := must(must(NewContext(nil))(t).NewPool(poolOptions()))(t)
		space := must(p.NewNamespace([32]byte{1}, 0))(t)
		check(t, space.AttachStore(store, StoreOptions{Timeout: time.Minute}))
		must(space.Load(keys(1, 1)))(t)
		<-store.called
	}()
	for i := 0; i < 3; i++ { // at the latest after the first one the pool's has run
		done := make(chan struct{})
		runtime.SetFinalizer(&stuck{}, func(*stuck) { close(done) })
		collect(t, done)
	}
	letGo()
	collect(t, released) // by the pool's end
}

// An Allocator with pages of the system.
type pages struct {
	sync.Mutex
	lists  map[unsafe.Pointer][]byte
	broken bool
	exits  bool
}

func (p *pages) Allocate(bytes, alignment uintptr) unsafe.Pointer {
	if p.broken {
		panic("allocate")
	}
	if p.exits {
		runtime.Goexit()
	}
	list, err := syscall.Mmap(-1, 0, int(bytes), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil
	}
	p.Lock()
	defer p.Unlock()
	if p.lists == nil {
		p.lists = map[unsafe.Pointer][]byte{}
	}
	p.lists[unsafe.Pointer(&list[0])] = list
	return unsafe.Pointer(&list[0])
}

func (p *pages) Deallocate(data unsafe.Pointer, bytes, alignment uintptr) {
	p.Lock()
	defer p.Unlock()
	_ = syscall.Munmap(p.lists[data])
	delete(p.lists, data)
}

func TestPanicsInCallbacks(t *testing.T) {
	logged := make(chan string, 100)
	allocator := &pages{}
	c := must(NewContext(&ContextOptions{Threads: 1, LogLevel: LogDebug, Allocator: allocator,
		Log: func(level LogLevel, message string) { logged <- message; panic("log") }}))(t)
	defer c.Close()
	p := must(c.NewPool(poolOptions()))(t)
	defer p.Close()
	seq, plan := must(p.NewSequence())(t), newPlan(t, p)
	allocator.broken = true
	wants(t, step(plan, seq, 1, make([]float32, qHeads*dim)), ErrMemory)
	allocator.broken = false
	check(t, step(plan, seq, 1, make([]float32, qHeads*dim)))
	if len(logged) == 0 {
		t.Error("nothing was logged")
	}
}

// As a callback that calls t.Fatal. What the call held is given back.
func TestGoexitInCallbacks(t *testing.T) {
	allocator := &pages{}
	var exits atomic.Bool
	c := must(NewContext(&ContextOptions{Threads: 1, LogLevel: LogDebug, Allocator: allocator, Log: func(LogLevel, string) {
		if exits.Load() {
			runtime.Goexit()
		}
	}}))(t)
	defer c.Close()
	p := must(c.NewPool(poolOptions()))(t)
	defer p.Close()
	seq, plan, path := filled(t, p, 500), newPlan(t, p), filepath.Join(t.TempDir(), "a")
	exits.Store(true)
	for _, call := range []func(){
		func() { _ = seq.Save(path, func(done, total uint64) error { runtime.Goexit(); return nil }) },
		func() { _, _ = seq.Export(&narrow{0, func() (int, error) { runtime.Goexit(); return 0, nil }}) },
	} {
		done, returned := make(chan bool), false
		go func() {
			defer close(done)
			call()
			returned = true
		}()
		<-done
		if returned {
			t.Error("the goroutine has not ended")
		}
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error("a save that was stopped has left its file", err)
	}
	check(t, step(plan, seq, 1, make([]float32, qHeads*dim)))
	check(t, seq.Close())
	if stats := must(p.Stats())(t); stats.BytesUsed != 0 {
		t.Errorf("%d bytes are held by calls that are over", stats.BytesUsed)
	}
	allocator.exits = true
	other := must(p.NewSequence())(t)
	wants(t, step(plan, other, 700, make([]float32, 700*qHeads*dim)), ErrMemory)
	allocator.exits = false
	check(t, step(plan, other, 700, make([]float32, 700*qHeads*dim)))
}

// A BlockStore whose Get ends its goroutine.
type ending struct{ BlockStore }

func (ending) Get([]StoreItem, time.Duration) error {
	runtime.Goexit()
	return nil
}

func TestGoexitInAStore(t *testing.T) {
	p := newPool(t)
	space := must(p.NewNamespace([32]byte{1}, 0))(t)
	check(t, space.AttachStore(ending{}, StoreOptions{}))
	info := must(must(space.Load(keys(1, 1)))(t).Wait(background))(t)
	if stats := must(space.StoreStats())(t); info.Moved != 0 || stats.CallsFailed != 1 {
		t.Errorf("%+v %+v", info, stats)
	}
}

func TestPlanIsExclusive(t *testing.T) {
	p := newPool(t)
	plan, seq, folder := newPlan(t, p), filled(t, p, 10), t.TempDir()
	plan.busy.Store(true) // as while a call runs
	wants(t, step(plan, seq, 1, nil), ErrBusy)
	wants(t, plan.Close(), ErrBusy)
	plan.busy.Store(false)
	check(t, plan.SetStreamRefused())
	check(t, seq.Save(filepath.Join(folder, "a"), nil))
	wants(t, plan.Step([]*Sequence{nil}, []int{1}, nil), ErrInvalid)
	wants(t, plan.Step([]*Sequence{seq}, []int{1, 2}, nil), ErrInvalid)
	wants(t, plan.Step([]*Sequence{seq, seq}, []int{1, 1}, nil), ErrInvalid)
	wants(t, plan.Step([]*Sequence{seq}, []int{-1}, nil), ErrInvalid)
	wants(t, plan.Step([]*Sequence{seq}, []int{1 << 40}, nil), ErrInvalid)
	wants(t, newPlan(t, newPool(t)).Step([]*Sequence{seq}, []int{1}, nil), ErrInvalid)
}

func (p *Plan) SetStreamRefused() error { // on a CPU there are no streams
	if err := p.SetStream(nil); !errors.Is(err, ErrUnsupported) {
		return fmt.Errorf("%v", err)
	}
	return nil
}

// Many goroutines work on one pool, until another one closes it.
func TestRaces(t *testing.T) {
	p := newPool(t, tiered)
	space := must(p.NewNamespace([32]byte{1}, 0))(t)
	var workers sync.WaitGroup
	var made atomic.Int32
	for i := 0; i < 4; i++ {
		workers.Add(1)
		go func(i int) {
			defer workers.Done()
			out := make([]float32, 70*qHeads*dim)
			err := func() error {
				plan, err := p.NewPlan()
				if err != nil {
					return err
				}
				defer plan.Close()
				for {
					seq, _, err := space.Match(keys(1, byte(i)))
					if err != nil {
						return err
					}
					if err := step(plan, seq, 70, out); err != nil {
						return err
					}
					fork, err := seq.Fork()
					if err != nil {
						return err
					}
					move, err := seq.Move(0, 1, TierHost)
					if err != nil {
						return err
					}
					_ = seq.Publish(space, keys(1, byte(i)))
					if _, err := move.Wait(background); errors.Is(err, ErrClosed) {
						return err
					}
					if _, err := p.Stats(); err != nil {
						return err
					}
					go fork.Close()
					if err := seq.Close(); err != nil {
						return err
					}
					made.Add(1)
				}
			}()
			wants(t, err, ErrClosed)
		}(i)
	}
	for made.Load() < 40 {
		time.Sleep(time.Millisecond)
	}
	check(t, p.Close())
	workers.Wait()
}

// A context is closed beside calls, and destroyed after the last of them.
func TestRacesOfClose(t *testing.T) {
	for i := 0; i < 50; i++ {
		c := must(NewContext(&ContextOptions{Threads: 1}))(t)
		var callers sync.WaitGroup
		var made atomic.Int32
		for j := 0; j < 4; j++ {
			callers.Add(1)
			go func() {
				defer callers.Done()
				for ; ; made.Add(1) {
					if _, err := c.Info(); err != nil {
						wants(t, err, ErrClosed)
						return
					}
				}
			}()
		}
		for made.Load() < 10 {
			runtime.Gosched()
		}
		check(t, c.Close())
		callers.Wait()
	}
}

// Signals interrupt system calls of the library; what it does is the same.
func TestSignals(t *testing.T) {
	p := newPool(t, func(o *PoolOptions) { o.Tiers = &TierOptions{DiskBytes: 64 << 20, DiskFolder: t.TempDir()} })
	a, folder := filled(t, p, 500), t.TempDir()
	want := attend(t, p, a)
	stop := make(chan bool)
	var sender sync.WaitGroup
	sender.Add(1)
	go func() {
		defer sender.Done()
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Microsecond):
				_ = syscall.Kill(os.Getpid(), syscall.SIGURG)
				_ = syscall.Kill(os.Getpid(), syscall.SIGWINCH)
			}
		}
	}()
	for i := 0; i < 10; i++ {
		path := filepath.Join(folder, fmt.Sprint(i))
		check(t, a.Save(path, nil))
		same(t, want, attend(t, p, must(p.LoadSequence(path, nil))(t)))
		must(must(a.Move(1, 6, TierDisk))(t).Wait(background))(t)
		same(t, want, attend(t, p, a))
	}
	close(stop)
	sender.Wait()
}

func TestForkedChild(t *testing.T) {
	p := newPool(t)
	plan, seq := newPlan(t, p), filled(t, p, 10)
	wrong := forked.Handles(unsafe.Pointer(p.context.c), unsafe.Pointer(p.c), unsafe.Pointer(plan.c.plan), seq.ID())
	if wrong != 0 {
		t.Errorf("check %d of the child failed", wrong)
	}
	check(t, step(plan, seq, 1, make([]float32, qHeads*dim)))
}

func TestErrors(t *testing.T) {
	_, err := newContext(t).NewPool(PoolOptions{})
	var e *Error
	if !errors.As(err, &e) || e.Argument != 1 || e.Sequence != -1 || !errors.Is(err, ErrInvalid) || errors.Is(err, ErrBusy) ||
		!strings.Contains(err.Error(), "TA_E_INVALID") {
		t.Errorf("%+v", e)
	}
	if Code(12345).String() != "unknown" || ErrForked.Error() != "TA_E_FORKED" {
		t.Error("names")
	}
}
