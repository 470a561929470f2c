package turboattention

import (
	"math"
	"reflect"
	"testing"
)

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
