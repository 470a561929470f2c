package turboattention

import "sync/atomic"

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
