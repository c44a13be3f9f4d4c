package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// Do implements projector.UnitOfWork. apply runs once.
func (db *DB) Do(ctx context.Context, w projector.Work, apply func(ctx context.Context, tx *Model, fresh []int) ([]outbox.Message, error)) error {
	tx, err := db.begin(ctx)
	if err != nil {
		return classed(err, projector.Transient) // it waited for others: not this message's fault
	}
	defer tx.end()
	defer tx.breakOff(ctx)()
	fresh, err := tx.staged.record(w, db.now())
	if err != nil {
		return projector.Permanent(err)
	}
	if w.Rehearse != nil {
		tx.wrote = map[cell]struct{}{}
	}
	if apply != nil && (len(w.Marks) == 0 || len(fresh) > 0) {
		out, err := apply(ctx, tx, fresh)
		if err != nil {
			return applyError(err)
		}
		if err := db.InTx(tx).Enqueue(ctx, out...); err != nil {
			return classed(err, projector.UnknownClass)
		}
	}
	if w.Rehearse != nil {
		return tx.rehearsed(ctx, w.Rehearse)
	}
	if err := tx.commit(ctx); err != nil {
		return classed(err, projector.UnknownClass)
	}
	w.Told(len(fresh))
	return nil
}

// record does all of w but the handlers' writes. Nobody sees it before the commit.
func (s *state) record(w projector.Work, now time.Time) (fresh []int, err error) {
	fresh = s.mark(w.Marks, now)
	if err := s.replayable(w.Replay); err != nil {
		return nil, err
	}
	if w.Behind != nil && !s.isHeld(*w.Behind) {
		return nil, projector.ErrNotHeld
	}
	s.park(w.Park, now)
	s.replay(w.Replay, now)
	for _, a := range w.Done {
		s.names = s.names.drop(pair(nameOf(a), w.Runner))
	}
	for _, a := range w.Forget {
		s.attempts = s.attempts.drop(nameOf(a))
	}
	return fresh, nil
}

// rehearsed tells the rows that were changed, and ends the transaction without a commit.
func (m *Model) rehearsed(ctx context.Context, tell func([]projector.Change)) error {
	changes, err := m.changes()
	if err != nil {
		return projector.Permanent(err)
	}
	if err := ctx.Err(); err != nil {
		return classed(fmt.Errorf("rehearse: %w", err), projector.UnknownClass)
	}
	m.end()
	tell(changes)
	return nil
}

// Records implements projector.UnitOfWork.
func (db *DB) Records() projector.Records {
	return projector.Records{Marks: true, Park: true, Outbox: true, Rehearse: true}
}

// applyError is apply's error with the class that it has, or else that of what is refused, or unknown.
func applyError(err error) error {
	if _, ok := errors.AsType[*projector.Error](err); ok {
		return err
	}
	return refused(err)
}

// refused classes what no retry mends.
func refused(err error) *projector.Error {
	switch {
	case errors.Is(err, eventstore.ErrInvalid):
		return &projector.Error{Class: projector.PermanentClass, Code: "invalid", Err: err}
	case errors.Is(err, eventstore.ErrEventIDReused):
		return &projector.Error{Class: projector.PermanentClass, Code: "event_id_reused", Err: err}
	}
	return &projector.Error{Class: projector.UnknownClass, Err: err}
}

// classed classes what went wrong around apply.
func classed(err error, deadline projector.Class) error {
	switch {
	case errors.Is(err, context.Canceled):
		return &projector.Error{Class: projector.Shutdown, Err: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &projector.Error{Class: deadline, Code: "deadline", Err: err}
	}
	return refused(err)
}

// mark records the marks that are new, and returns their indexes.
func (s *state) mark(keys []marker.Key, now time.Time) (fresh []int) {
	for i, k := range keys {
		if mutant.NoMarker {
			fresh = append(fresh, i)
			continue
		}
		if !s.marked(k) {
			fresh = append(fresh, i)
			for _, name := range append([]string{k.Handler}, k.Was...) { // an instance of the old code looks under that
				s.markers = s.markers.put(pair(name, k.MessageID), now)
			}
		}
	}
	return fresh
}

// marked tells whether the handler, under this name or an earlier one, has left its marker.
func (s *state) marked(k marker.Key) bool {
	return s.markers.has(pair(k.Handler, k.MessageID)) ||
		slices.ContainsFunc(k.Was, func(was string) bool { return s.markers.has(pair(was, k.MessageID)) })
}
