package turboattention

import (
	"runtime"
	"sync/atomic"
)

// use counts the calls that run on a handle. It can be closed at any time; the handle is destroyed when the last call is over.
// That of a zero value, which no function of this package made, counts as closed.
type use struct{ n atomic.Int64 }

const opened = 1 << 62

func (u *use) open() { u.n.Store(opened) }

// enter begins a call; false: the handle is closed.
func (u *use) enter() bool {
	for {
		n := u.n.Load()
		if n&opened == 0 {
			return false
		}
		if u.n.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// leave ends a call; true: destroy the handle now.
func (u *use) leave() bool { return u.n.Add(-1) == 0 }

// close says whether this call closed it, and whether to destroy the handle now.
func (u *use) close() (first, destroy bool) {
	for {
		n := u.n.Load()
		if n&opened == 0 {
			return false, false
		}
		if u.n.CompareAndSwap(n, n&^opened) {
			return true, n == opened
		}
	}
}

// closeLater makes Go close an object when it becomes unreachable. Its end may wait, for a store or for threads, and Go runs
// all finalizers on one goroutine: it gets one of its own.
func closeLater[T any](object *T, end func(*T) error) {
	runtime.SetFinalizer(object, func(object *T) { go func() { _ = end(object) }() })
}
