package projectortest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// patience is how long the kit waits for an event to be applied. It only ends a test that hangs, and must do so before
// go test does, after 10 minutes by default: the kit's message names the event.
const patience = 5 * time.Minute

// handlerTime is how long a handler may take. It is longer than SQLite's busy timeout.
const handlerTime = 10 * time.Second

// pass is a run of a projector on a database of its own.
type pass[Tx any, DB Store[Tx], Row any] struct {
	kit      *Kit[Tx, DB, Row]
	t        testing.TB
	db       DB
	p        *projector.Projector[Tx]
	events   []prepared
	record   *record
	log      *fixedLog
	logID    string
	appended map[int]eventstore.Appended
	runners  []*running[Tx]
	source   source
}

// source is what the runners of a pass read.
type source int

const (
	fromLog source = iota
	fromBroker
)

func (s source) String() string {
	if s == fromLog {
		return "read from the log"
	}
	return "delivered by a broker"
}

// running is a runner, as a process of its own would have it.
type running[Tx any] struct {
	runner *projector.Runner
	tap    *tap[Tx]
	broker broker
	stop   func() error
}

// newPass opens a database in the scope t. It fails the test if that is not possible.
func newPass[Tx any, DB Store[Tx], Row any](t testing.TB, k *Kit[Tx, DB, Row], events []prepared, s source) (*pass[Tx, DB, Row], error) {
	t.Helper()
	db := k.Fresh(t)
	w := &pass[Tx, DB, Row]{
		kit: k, t: t, db: db, p: k.Projector(db), events: events, record: newRecord(events), source: s,
		appended: map[int]eventstore.Appended{},
	}
	w.log = &fixedLog{Log: db, times: map[string]time.Time{}, record: w.record}
	for i := range events {
		w.log.times[events[i].draft.ID] = events[i].RecordedAt
	}
	id, err := db.LogID(t.Context())
	if err != nil {
		return nil, fmt.Errorf("read the log: %w", err)
	}
	w.logID = id.String()
	return w, nil
}

// start starts another runner.
func (w *pass[Tx, DB, Row]) start() error {
	one := &running[Tx]{broker: make(broker), tap: &tap[Tx]{Provider: w.db, record: w.record, probe: w.probe, died: make(chan struct{})}}
	src := projector.FromLog(w.log)
	if w.source == fromBroker {
		src = projector.Subscribe(one.broker, topic)
	}
	r, err := projector.NewRunner(storeOf(one.tap), src, projector.RunnerConfig{
		Log: w.log, Logger: slog.New(slog.DiscardHandler), Timeout: handlerTime,
		Retry: claim.Backoff{Base: time.Millisecond, Max: 20 * time.Millisecond},
	}, w.p)
	if err != nil {
		return err
	}
	one.runner = r
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	one.stop = func() error {
		cancel()
		err := <-done
		done <- nil
		return err
	}
	w.runners = append(w.runners, one)
	select {
	case <-r.Running():
		return w.live()
	case err := <-done:
		done <- nil
		return errors.Join(errors.New("the runner does not start"), err)
	}
}

// live waits until deliveries are applied when they come, and are not left to the reader of the log.
func (w *pass[Tx, DB, Row]) live() error {
	opts := w.p.Options()
	if w.source == fromLog || !opts.Markers || !w.db.Keeps().Markers || opts.BrokerOnly {
		return nil
	}
	return w.poll("the runner begins to apply deliveries", func() (bool, error) {
		c, err := w.db.Checkpoint(w.t.Context(), provider.Build{Projector: w.p.Name()})
		return c.Mode == provider.ModeLive, err
	})
}

// poll calls is until it returns true.
func (w *pass[Tx, DB, Row]) poll(what string, is func() (bool, error)) error {
	waited := time.Duration(0)
	for next := (pauses.Doubling{First: time.Millisecond, Longest: 20 * time.Millisecond}); ; {
		if ok, err := is(); ok || err != nil {
			return err
		}
		pause := next.Next()
		if waited += pause; waited > patience {
			return fmt.Errorf("%s: not within %s", what, patience)
		}
		time.Sleep(pause) // between two polls
	}
}

// stop stops all runners.
func (w *pass[Tx, DB, Row]) stop() error {
	var errs []error
	for _, r := range w.runners {
		if err := r.stop(); !r.tap.dead.Load() {
			errs = append(errs, err)
		}
	}
	w.runners = nil
	return errors.Join(errs...)
}

// append appends an event, unless it is in the log already.
func (w *pass[Tx, DB, Row]) append(n int) error {
	if _, ok := w.appended[n]; ok {
		return nil
	}
	e := &w.events[n]
	at, err := w.db.Append(w.t.Context(), e.Stream, eventstore.Any, []eventstore.Draft{e.draft})
	w.record.change(func() { w.appended[n] = at }) // wakes the readers of the log
	return err
}

// apply appends and delivers an event, and returns when it is applied.
func (w *pass[Tx, DB, Row]) apply(s step) error {
	e := &w.events[s.event]
	if !slices.Contains(w.p.Takes(), e.draft.Type) {
		return w.append(s.event)
	}
	toBoth := slices.Contains(s.faults, twice)
	if toBoth && len(w.runners) < 2 {
		if err := w.start(); err != nil {
			return err
		}
	}
	if len(s.faults) > 0 && !toBoth {
		w.record.arm(e.draft.ID, s.faults)
	}
	if err := w.append(s.event); err != nil {
		return err
	}
	return w.deliver(e, w.appended[s.event], toBoth)
}

// deliver delivers an event to the first runner, or to all, and returns when it is applied. After a crash it starts
// another runner.
func (w *pass[Tx, DB, Row]) deliver(e *prepared, at eventstore.Appended, toAll bool) error {
	for {
		targets := w.runners[:1]
		if toAll {
			targets = w.runners
		}
		crashed, err := w.deliverOnce(e, at, targets)
		if err != nil || !crashed {
			return err
		}
		if err := w.stop(); err != nil {
			return err
		}
		if err := w.start(); err != nil {
			return err
		}
	}
}

// deliverOnce returns when an event is applied, and acked by each of the runners if it was delivered to them.
func (w *pass[Tx, DB, Row]) deliverOnce(e *prepared, at eventstore.Appended, to []*running[Tx]) (crashed bool, err error) {
	var sent []*message.Message
	if w.source == fromBroker {
		m := messageOf(e, at, w.logID)
		for _, r := range to {
			one := m.Copy()
			select {
			case r.broker <- one:
				sent = append(sent, one)
			case <-r.tap.died:
				return true, nil
			case <-time.After(patience): // ends a test that hangs
				return false, fmt.Errorf("%s: the runner does not take the delivery within %s", e, patience)
			}
		}
	}
	for i, m := range sent {
		for done := false; !done; {
			_, problem, changed := w.record.is(e.draft.ID)
			if problem != nil {
				return false, nil
			}
			select {
			case <-m.Acked():
				done = true
			case <-to[i].tap.died:
				return true, nil
			case <-changed:
			case <-time.After(patience): // ends a test that hangs
				return false, fmt.Errorf("%s: not acked within %s%s", e, patience, w.record.last(e.draft.ID))
			}
		}
	}
	return w.applied(e.draft.ID, e.String(), to[0].tap.died)
}

// applied waits until an event is applied.
func (w *pass[Tx, DB, Row]) applied(id, name string, died <-chan struct{}) (crashed bool, err error) {
	late := time.After(patience) // ends a test that hangs
	for {
		applied, problem, changed := w.record.is(id)
		if problem != nil {
			return false, nil
		}
		select {
		case <-died:
			return true, nil
		default:
		}
		if applied {
			return false, nil
		}
		select {
		case <-changed:
		case <-died:
		case <-late:
			return false, fmt.Errorf("%s: not applied within %s%s", name, patience, w.record.last(id))
		}
	}
}

// settle waits until the events that handlers have appended are applied too.
func (w *pass[Tx, DB, Row]) settle() error {
	for round := 0; w.record.problem() == nil; round++ {
		more, err := w.foreign(true)
		if err != nil {
			return err
		}
		waiting := false
		for _, raw := range more {
			if done, _, _ := w.record.is(raw.ID); done || !slices.Contains(w.p.Takes(), raw.Type) {
				continue
			}
			waiting = true
			e := &prepared{Event{Stream: raw.Stream, Metadata: raw.Metadata, RecordedAt: raw.RecordedAt}, eventstore.Draft{
				ID: raw.ID, Type: raw.Type, Schema: raw.Schema, Data: raw.Data, Metadata: raw.Metadata,
			}}
			// A runner that has crashed after its last commit is still the first one.
			if err := w.deliver(e, eventstore.Appended{Version: raw.Version, Position: raw.Position}, false); err != nil {
				return err
			}
		}
		if !waiting {
			return nil
		}
		if round > 100 {
			return errors.New("the handlers append events without end")
		}
	}
	return nil
}

// foreign returns the events of the log that are not those of the test: handlers have appended them.
func (w *pass[Tx, DB, Row]) foreign(settled bool) (found []eventstore.Raw, err error) {
	for after := int64(0); ; {
		page, err := w.db.LogPage(w.t.Context(), provider.LogQuery{After: after, Unsettled: !settled})
		if err != nil {
			return nil, err
		}
		for _, raw := range page.Events {
			if _, ok := w.record.number[raw.ID]; !ok {
				found = append(found, raw)
			}
			after = raw.Position
		}
		if !page.Full {
			return found, nil
		}
	}
}

// rows reads the read model.
func (w *pass[Tx, DB, Row]) rows(ctx context.Context) ([]Row, error) {
	rows, err := w.kit.Rows(ctx, w.db)
	if err != nil {
		err = fmt.Errorf("read the rows: %w", err)
	}
	return rows, err
}

// probe describes what other transactions see: the rows, and the events of handlers.
func (w *pass[Tx, DB, Row]) probe(ctx context.Context) (string, error) {
	rows, err := w.rows(ctx)
	if err != nil {
		return "", err
	}
	events, err := w.foreign(false)
	if err != nil {
		return "", err
	}
	all := rowTexts(rows)
	for _, raw := range events {
		all = append(all, fmt.Sprintf("event %s in the stream %s", raw.Type, raw.Stream))
	}
	return strings.Join(all, "\n"), nil
}

// rowTexts describes rows, one a line.
func rowTexts[Row any](rows []Row) []string {
	all := make([]string, len(rows))
	for i, row := range rows {
		all[i] = strings.ReplaceAll(fmt.Sprintf("%+v", row), "\n", `\n`)
	}
	return all
}
