package projectortest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// problem is a mistake of a projector that a pass has shown.
type problem struct {
	kind  string // problems of one kind have the same cause
	event string // the id of the event, if the problem belongs to one
	text  string
	clean bool // a clean pass has shown it
}

// isDifference reports whether rows or output differ between two passes.
func (p *problem) isDifference() bool { return p.kind == "rows differ" || p.kind == "output differs" }

// record has what the runners of one pass have committed. They share it.
type record struct {
	mu      sync.Mutex
	number  map[string]int     // the events of the test, by id
	faults  map[string][]fault // of the next units that apply an event, by its id
	applied map[string]bool    // by event id
	output  []outbox.Message
	errs    map[string]error // of the last unit that failed with this event alone
	err     *problem
	changed chan struct{} // closed at each change
}

func newRecord(events []prepared) *record {
	r := &record{number: map[string]int{}, faults: map[string][]fault{}, applied: map[string]bool{}, errs: map[string]error{}, changed: make(chan struct{})}
	for i := range events {
		r.number[events[i].draft.ID] = i
	}
	return r
}

// change calls f, and wakes those who wait.
func (r *record) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

// arm gives the next units that apply an event one fault each.
func (r *record) arm(id string, faults []fault) {
	r.change(func() { r.faults[id] = faults })
}

// take returns the fault of a unit, and removes it.
func (r *record) take(u *provider.Unit) fault {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range u.Messages {
		id := u.Messages[i].ID
		if next := r.faults[id]; len(next) > 0 && len(u.Messages[i].Handlers) > 0 {
			r.faults[id] = next[1:]
			return next[0]
		}
	}
	return noFault
}

// committed records a unit.
func (r *record) committed(u *provider.Unit, found provider.Found, c provider.Closing) {
	r.change(func() {
		r.output = append(r.output, c.Output...)
		parked := map[int]bool{}
		for _, a := range c.Park {
			if parked[a.Message] = true; r.err == nil && a.Parked.Class != provider.ClassHeld {
				r.err = r.parked(&a.Parked)
			}
		}
		for i := range u.Messages {
			left := found.Left != nil && found.Left[i]
			notLive := found.Live != nil && !found.Live[i]
			if !parked[i] && !left && !notLive {
				r.applied[u.Messages[i].ID] = true
			}
		}
	})
}

// parked returns the problem of an event that could not be applied.
func (r *record) parked(p *provider.Parked) *problem {
	name := p.Handler
	if name == "" {
		name = p.Projector
	}
	text := fmt.Sprintf("%s failed for this event: %s", name, p.Class)
	if err := r.errs[p.MessageID]; err != nil {
		text = fmt.Sprintf("%s failed for this event: %v", name, err)
	}
	kind := "handler"
	if p.Code == provider.CodeDeadline || p.Code == "stuck" {
		kind = "waits"
	}
	return &problem{kind: kind, event: p.MessageID, text: text}
}

// failed records the error of a unit whose handlers took that long.
func (r *record) failed(u *provider.Unit, err error, took time.Duration) {
	r.change(func() {
		if len(u.Messages) == 1 {
			r.errs[u.Messages[0].ID] = err
		}
		if r.err == nil && took > waitTime {
			r.err = &problem{kind: "waits", event: r.eventOf(u), text: fmt.Sprintf("the handlers took %s: %v", took.Round(time.Second), err)}
		}
	})
}

// last returns the last error of an event, as text.
func (r *record) last(id string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.errs[id]; err != nil {
		return ": " + err.Error()
	}
	return ""
}

// waitTime is how long handlers take at least that end with an error because they wait. It is shorter than
// SQLite's busy timeout.
const waitTime = 3 * time.Second

// fail records the first problem.
func (r *record) fail(p *problem) {
	r.change(func() {
		if r.err == nil {
			r.err = p
		}
	})
}

// eventOf returns the id of the first event of a unit.
func (r *record) eventOf(u *provider.Unit) string {
	for i := range u.Messages {
		if _, ok := r.number[u.Messages[i].ID]; ok {
			return u.Messages[i].ID
		}
	}
	return ""
}

// is reports whether an event is applied, and the first problem. changed is closed when that changes.
func (r *record) is(id string) (applied bool, err *problem, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.applied[id], r.err, r.changed
}

func (r *record) problem() *problem {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// emitted returns the output of all units, in the order of the events.
func (r *record) emitted() []outbox.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := slices.Clone(r.output)
	at := func(m outbox.Message) int {
		if n, ok := r.number[m.Headers[provider.HeaderCausation]]; ok {
			return n
		}
		return len(r.number)
	}
	slices.SortStableFunc(out, func(a, b outbox.Message) int { return cmp.Compare(at(a), at(b)) })
	return out
}

// texts describes messages for a comparison. A message that is emitted twice with one id is stored once.
func texts(out []outbox.Message) (all []string) {
	for _, m := range out {
		var headers []string
		for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
			headers = append(headers, name+"="+m.Headers[name])
		}
		all = append(all, fmt.Sprintf("message %s to %s, key %s, headers %s: %s", m.ID, m.Topic, m.Key, strings.Join(headers, " "), m.Payload))
	}
	return all
}
