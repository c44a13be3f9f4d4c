package postgres

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/kinora-go/kinora/projector"
)

// turns lets the units of one mark, or of one parked message, follow one another within this process. Without it, each of many deliveries of one
// message would wait for the first one's marker with a connection of its own, until the pool has none left.
type turns struct {
	mu    sync.Mutex
	marks map[string]*turn
}

// turn is one name's.
type turn struct {
	free chan struct{} // holds something while nobody has it
	want int           // who has it, or waits
}

// turnsOf are the turns that a unit takes: those of its marks, of the parked messages that it replays, and of rehearsals, which
// have two connections each.
func turnsOf(w projector.Work) []string {
	names := make([]string, 0, len(w.Marks)+len(w.Replay)+1)
	for _, m := range w.Marks {
		names = append(names, m.Handler+"\x00"+m.MessageID)
	}
	for _, r := range w.Replay {
		names = append(names, "\x00"+strconv.FormatInt(r.Seq, 10))
	}
	if w.Rehearse != nil {
		names = append(names, "\x00rehearsal")
	}
	return names
}

// take waits for the turns of all names. The function that it returns gives them back. The end of ctx is transient: it
// is not the message's fault that others are at it.
func (t *turns) take(ctx context.Context, names []string) (leave func(), err error) {
	slices.Sort(names) // or two units could wait for one another
	names = slices.Compact(names)
	var mine []string
	leave = func() {
		for _, name := range mine {
			t.release(name, true)
		}
	}
	for _, name := range names {
		select {
		case <-t.want(name).free:
			mine = append(mine, name)
		case <-ctx.Done():
			t.release(name, false)
			leave()
			return nil, &projector.Error{Class: projector.Transient, Code: "waiting", Err: fmt.Errorf("wait for another delivery: %w", ctx.Err())}
		}
	}
	return leave, nil
}

func (t *turns) want(name string) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.marks[name]
	if one == nil {
		one = &turn{free: make(chan struct{}, 1)}
		one.free <- struct{}{}
		if t.marks == nil {
			t.marks = map[string]*turn{}
		}
		t.marks[name] = one
	}
	one.want++
	return one
}

func (t *turns) release(name string, had bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.marks[name]
	if had {
		one.free <- struct{}{}
	}
	if one.want--; one.want == 0 {
		delete(t.marks, name)
	}
}
