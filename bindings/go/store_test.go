package turboattention

import (
	"sync"
	"testing"
	"time"

	"turboattention/internal/rawstore"
)

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

func TestStoreOfC(t *testing.T) {
	before := rawstore.Released()
	p := newPool(t)
	space := must(p.NewNamespace([32]byte{1}, 0))(t)
	wants(t, space.AttachStoreAt(nil, StoreOptions{}), ErrInvalid)
	check(t, space.AttachStoreAt(rawstore.Set(), StoreOptions{}))
	wants(t, space.AttachStoreAt(rawstore.Set(), StoreOptions{}), ErrState) // and is released
	check(t, filled(t, p, 200).Publish(space, keys(3, 1)))
	if missing := must(space.FlushStore(-1))(t); missing != 0 {
		t.Errorf("%d are missing", missing)
	}
	check(t, space.DetachStore())
	other := must(newPool(t).NewNamespace([32]byte{1}, 0))(t)
	check(t, other.AttachStoreAt(rawstore.Set(), StoreOptions{WriteThrough: Off}))
	if info := must(must(other.Load(keys(4, 1)))(t).Wait(background))(t); info.Moved != 3 {
		t.Errorf("%+v", info)
	}
	check(t, other.DetachStore())
	check(t, p.Close())
	wants(t, space.AttachStoreAt(rawstore.Set(), StoreOptions{}), ErrClosed)
	if n := rawstore.Released() - before; n != 4 {
		t.Errorf("released %d times", n)
	}
}
