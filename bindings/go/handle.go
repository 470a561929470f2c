package turboattention

import (
	"runtime"
	"sync/atomic"
)

// use counts the calls that run on a handle. It can be closed at any time; the handle is destroyed when the last call is over.
type use struct{ n atomic.Int64 }

const closed = 1 << 62

// enter begins a call; false: the handle is closed.
func (u *use) enter() bool {
	for {
		n := u.n.Load()
		if n&closed != 0 {
			return false
		}
		if u.n.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// leave ends a call; true: destroy the handle now.
func (u *use) leave() bool { return u.n.Add(-1) == closed }

// close says whether this call closed it, and whether to destroy the handle now.
func (u *use) close() (first, destroy bool) {
	for {
		n := u.n.Load()
		if n&closed != 0 {
			return false, false
		}
		if u.n.CompareAndSwap(n, n|closed) {
			return true, n == 0
		}
	}
}

// closeLater makes Go close an object when it becomes unreachable. Its end may wait, for a store or for threads, and Go runs
// all finalizers on one goroutine: it gets one of its own.
func closeLater[T any](object *T, end func(*T) error) {
	runtime.SetFinalizer(object, func(object *T) { go func() { _ = end(object) }() })
}
