package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
)

// member is one projector, its transaction type forgotten.
type member struct {
	name     string
	strange  Unknown
	parking  Parking
	types    []string
	marks    bool
	names    []string // of all markers that it leaves
	handlers []bound
	record   func(context.Context, Work) error                                      // without a handler's effect
	rehearse func(context.Context, *Runner, []rehearsed) (*Rehearsal, int64, error) // nil where the provider has none
	ready    func(context.Context) error

	inspector   ParkedInspector // nil where the provider is none
	parkedCount func(ctx context.Context, projector string) (int64, error)
	keeper      marker.Keeper // nil where there are no markers
}

func (m *member) knows(eventType string) bool { return slices.Contains(m.types, eventType) }

// takes are the handlers of a type.
func (m *member) takes(eventType string) (hs []*bound) {
	for i := range m.handlers {
		if slices.Contains(m.handlers[i].types, eventType) {
			hs = append(hs, &m.handlers[i])
		}
	}
	return hs
}

// nobody stands for the handlers of a type that is known and that none takes.
func (m *member) nobody() *bound {
	return &bound{unit: func(ctx context.Context, _ eventstore.Raw, w Work, _ *deadline) (bool, error) {
		return false, m.record(ctx, w)
	}}
}

// bound is one handler of a member.
type bound struct {
	name  string // in full
	was   []string
	types []string
	noop  bool // its markers cannot be written
	unit  func(context.Context, eventstore.Raw, Work, *deadline) (skipped bool, err error)
}

func (h *bound) isNamed(name string) bool { return h.name == name || slices.Contains(h.was, name) }

func newMember[Tx any](u UnitOfWork[Tx], p *Projector[Tx], log *slog.Logger) (member, error) {
	marks := p.opts.Markers
	if marks && !u.Records().Marks {
		marks = false
		log.Debug("markers are a no-op: the provider cannot write them together with the read model", "projector", p.name)
	}
	one := member{
		name: p.name, strange: p.opts.Unknown, parking: p.opts.Parking, types: p.types.Names(), marks: marks, names: p.Handlers(),
		ready: func(ctx context.Context) error {
			if c, ok := any(u).(outbox.ReadyChecker); ok {
				return c.Ready(ctx)
			}
			return nil
		},
		record: func(ctx context.Context, w Work) error { return u.Do(ctx, w, nil) },
	}
	if in, ok := any(u).(ParkedInspector); ok {
		one.inspector, one.parkedCount = in, in.ParkedCount
	}
	if p.opts.Parking == Halt && (one.inspector == nil || !marks) {
		// A halted message comes again after its replay, and only its marker says so.
		return one, errors.New("to halt wants markers, and a provider that is a ParkedInspector")
	}
	if marks {
		var ok bool
		if one.keeper, ok = any(u).(marker.Keeper); !ok {
			return one, errors.New("this unit of work keeps markers, and hides that it is a marker.Keeper")
		}
	}
	runs := map[string]runFunc[Tx]{}
	for _, h := range p.handlers {
		name, was := p.full(h.name), p.fulls(h.was)
		runs[name] = func(ctx context.Context, tx Tx, raw eventstore.Raw) ([]outbox.Message, error) {
			out, err := h.run(ctx, tx, p.types, raw)
			if err == nil {
				err = ctx.Err() // a handler that was interrupted may not have noticed what it could not write
			}
			if err != nil {
				return nil, err
			}
			return caused(out, name, raw), nil
		}
		one.handlers = append(one.handlers, bound{
			name: name, was: was, types: h.match(p.types),
			noop: p.opts.Markers && !marks,
			unit: func(ctx context.Context, raw eventstore.Raw, w Work, limit *deadline) (skipped bool, err error) {
				if marks {
					w.Marks = []marker.Key{{Handler: name, Was: was, MessageID: raw.ID}}
					w.Fresh = func(n int) { skipped = n == 0 }
				}
				err = u.Do(ctx, w, func(ctx context.Context, tx Tx, _ []int) ([]outbox.Message, error) {
					ctx, done := limit.handler(ctx)
					defer done()
					crash.Point("handler: before")
					out, err := runs[name](ctx, tx, raw)
					crash.Point("handler: after")
					return out, err
				})
				return skipped, err
			},
		})
	}
	one.rehearse = rehearsal(u, p.name, marks, runs)
	return one, nil
}

// runFunc runs a handler in a transaction.
type runFunc[Tx any] func(ctx context.Context, tx Tx, raw eventstore.Raw) ([]outbox.Message, error)

// mayRun tells what no retry can help.
func (m *member) mayRun(ctx context.Context) error {
	if err := m.ready(ctx); err != nil {
		return err
	}
	if m.parking != Halt {
		return nil
	}
	n, err := m.parkedCount(ctx, m.name)
	if err == nil && n > 0 {
		err = fmt.Errorf("%w: %s: %d parked", ErrHalted, m.name, n)
	}
	return err
}
