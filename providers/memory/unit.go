package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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
	fresh := tx.staged.mark(w.Marks)
	tx.staged.park(w.Park, db.now())
	if apply != nil && (len(w.Marks) == 0 || len(fresh) > 0) {
		out, err := apply(ctx, tx, fresh)
		if err != nil {
			return applyError(err)
		}
		if err := db.InTx(tx).Enqueue(ctx, out...); err != nil {
			return classed(err, projector.UnknownClass)
		}
	}
	if err := tx.commit(ctx); err != nil {
		return classed(err, projector.UnknownClass)
	}
	w.Told(len(fresh))
	return nil
}

// Records implements projector.UnitOfWork.
func (db *DB) Records() projector.Records {
	return projector.Records{Marks: true, Park: true, Outbox: true}
}

// applyError is apply's error with the class that it has, or else unknown.
func applyError(err error) error {
	if _, ok := errors.AsType[*projector.Error](err); ok {
		return err
	}
	return &projector.Error{Class: projector.UnknownClass, Err: err}
}

// classed classes what went wrong around apply.
func classed(err error, deadline projector.Class) error {
	e := &projector.Error{Class: projector.UnknownClass, Err: err}
	switch {
	case errors.Is(err, context.Canceled):
		e.Class = projector.Shutdown
	case errors.Is(err, context.DeadlineExceeded):
		e.Class, e.Code = deadline, "deadline"
	case errors.Is(err, eventstore.ErrInvalid):
		e.Class, e.Code = projector.PermanentClass, "invalid"
	}
	return e
}

// mark records the marks that are new, and returns their indexes.
func (s *state) mark(keys []marker.Key) (fresh []int) {
	for i, k := range keys {
		if mutant.NoMarker {
			fresh = append(fresh, i)
			continue
		}
		if !s.marked(k) {
			fresh = append(fresh, i)
			for _, name := range append([]string{k.Handler}, k.Was...) { // an instance of the old code looks under that
				s.markers = s.markers.put(pair(name, k.MessageID), struct{}{})
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

func (s *state) park(parked []projector.Parked, now time.Time) {
	for _, p := range parked {
		if s.isSetAside(p) {
			continue
		}
		p.Seq, p.At = s.parked.last()+1, now
		s.parked = s.parked.put(p.Seq, ownParked(p))
	}
}

// isSetAside tells whether the message, if it has an id, is parked already.
func (s *state) isSetAside(p projector.Parked) bool {
	for _, is := range s.parked.from(0) {
		if p.MessageID != "" && is.MessageID == p.MessageID && is.Projector == p.Projector && is.Handler == p.Handler {
			return true
		}
	}
	return false
}

// ParkedMessages implements projector.ParkedInspector.
func (db *DB) ParkedMessages(ctx context.Context, name string, after int64, limit int) ([]projector.Parked, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list parked messages: %w", err)
	}
	if limit == 0 {
		limit = 100
	}
	var page []projector.Parked
	for _, p := range db.committed.Load().parked.from(after + 1) {
		if len(page) == limit {
			break
		}
		if name == "" || p.Projector == name {
			page = append(page, ownParked(p))
		}
	}
	return page, nil
}

// ParkedCount implements projector.ParkedInspector.
func (db *DB) ParkedCount(ctx context.Context, name string) (n int64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", err)
	}
	for _, p := range db.committed.Load().parked.from(0) {
		if name == "" || p.Projector == name {
			n++
		}
	}
	return n, nil
}

// Outcomes implements projector.State.
func (db *DB) Outcomes(ctx context.Context, keys []marker.Key) ([]projector.Outcome, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("look up outcomes: %w", err)
	}
	s := db.committed.Load()
	outcomes := make([]projector.Outcome, len(keys))
	for i, k := range keys {
		switch {
		case s.marked(k):
			outcomes[i] = projector.Applied
		case s.isParked(k):
			outcomes[i] = projector.IsParked
		}
	}
	return outcomes, nil
}

// isParked tells whether the message is parked at the handler, or at its projector before any handler.
func (s *state) isParked(k marker.Key) bool {
	for _, p := range s.parked.from(0) {
		if p.MessageID != k.MessageID {
			continue
		}
		if p.Handler == k.Handler || slices.Contains(k.Was, p.Handler) ||
			p.Handler == "" && strings.HasPrefix(k.Handler, p.Projector+"/") {
			return true
		}
	}
	return false
}

// ownParked is own for parked messages.
func ownParked(p projector.Parked) projector.Parked {
	p.Payload = bytes.Clone(p.Payload)
	p.Headers = maps.Clone(p.Headers)
	return p
}
