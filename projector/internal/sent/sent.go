// Package sent knows which messages another generation has applied, so that no output is sent twice.
package sent

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/lease"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Asker asks what other generations have applied. The goroutines of a generation share it.
type Asker struct {
	Host      *model.Host
	Projector *model.Projector
	mu        sync.Mutex
	passed    map[int]passed // by generation
	found     map[int]int64  // by generation: the Seq of the first parked message that was found last
	many      time.Time      // when a generation had more parked messages than are listed
}

// passed is what another generation has passed: every event up to its checkpoint, and those that its
// segments have passed, is applied there, but those that were parked. That stays true.
type passed struct {
	provider.Checkpoint
	parked map[string]bool // by id; nil: it is not known which
}

// Ask sets Replayed and Skipped of messages of a generation, and Contested of those that another
// generation may apply at the same time. skips are sorted ids of further events that operators have
// skipped.
func (a *Asker) Ask(ctx context.Context, g *generation.Row, skips []string, msgs []*model.Message) error {
	for _, m := range msgs {
		if _, m.Skipped = slices.BinarySearch(g.Skipped, m.ID); !m.Skipped {
			_, m.Skipped = slices.BinarySearch(skips, m.ID)
		}
	}
	if !g.IsReplaying() || len(msgs) == 0 {
		return nil
	}
	if g.How == generation.Scratch {
		for _, m := range msgs {
			m.Replayed = true
		}
		return nil
	}
	others, orUnseen := []int{0}, true
	if g.IsLive() {
		others, orUnseen = append(slices.Clone(g.Earlier), g.Source), false
	}
	for _, of := range others {
		asked, err := a.notPassed(ctx, msgs, of)
		if err == nil {
			err = a.outcomes(ctx, asked, of, func(o provider.Outcome) bool {
				return !isParked(o) && (orUnseen || o != provider.OutcomeUnseen)
			})
		}
		if err != nil {
			return err
		}
		msgs = notReplayed(msgs)
	}
	return nil
}

// AskParked is Ask for parked messages: another generation may have applied them since they were
// parked. A generation that is not live asks the live one, which asks those next to it.
func (a *Asker) AskParked(ctx context.Context, b provider.Build, msgs []*model.Message) error {
	if msgs = notReplayed(msgs); len(msgs) == 0 {
		return nil
	}
	all, err := a.Host.Generations(ctx, a.Projector.Name)
	if err != nil {
		return err
	}
	live := generation.Live(all).Build == b
	for _, g := range all {
		if live && !g.IsFed() || !live && !g.IsLive() {
			continue
		}
		err := a.outcomes(ctx, msgs, g.Generation, func(o provider.Outcome) bool {
			return o == provider.OutcomeApplied || o == provider.OutcomeSkipped && !live
		})
		if msgs = notReplayed(msgs); err != nil {
			return err
		}
		for _, m := range msgs {
			m.Contested = true
		}
	}
	return nil
}

func notReplayed(msgs []*model.Message) []*model.Message {
	return slices.DeleteFunc(slices.Clone(msgs), func(m *model.Message) bool { return m.Replayed })
}

// notPassed sets Replayed of the events that another generation has passed: the live one if of is zero. It
// returns the other events. So usually no event must be looked up by its id.
func (a *Asker) notPassed(ctx context.Context, msgs []*model.Message, of int) (rest []*model.Message, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.passed[of]
	if len(msgs) > 0 && msgs[len(msgs)-1].Raw.Position > p.Place.Position {
		if p, err = a.askPassed(ctx, of); err != nil {
			return nil, err
		}
		if a.passed == nil {
			a.passed = map[int]passed{}
		}
		a.passed[of] = p
	}
	for _, m := range msgs {
		if m.Replayed = p.parked != nil && p.Applied(m.Raw.Stream, m.Raw.Position) && !p.parked[m.ID]; !m.Replayed {
			rest = append(rest, m)
		}
	}
	return rest, nil
}

func (a *Asker) askPassed(ctx context.Context, of int) (p passed, err error) {
	ctx, cancel := a.Host.Limited(ctx)
	defer cancel()
	now := a.Host.Clock()
	if now.Sub(a.many) < manyFor {
		return p, nil
	}
	c, err := a.Host.Store.Checkpoint(ctx, provider.Build{Projector: a.Projector.Name, Generation: of})
	if err != nil || c.Mode == 0 {
		return p, err
	}
	// After the checkpoint: an event that it has passed was applied or parked before.
	rows, err := a.Host.Store.Parked(ctx, provider.ParkedFilter{Projector: a.Projector.Name, Generation: c.Generation, Limit: rowsPage})
	if err != nil || len(rows) == rowsPage {
		a.many = now
		return p, err
	}
	p.Checkpoint, p.parked = c, map[string]bool{}
	for _, row := range rows {
		p.parked[row.MessageID] = true
	}
	return p, nil
}

// rows sets Replayed of messages that are parked in a generation, if they were replayed when they were parked there, and
// Contested of the others. There may be many, while the generation waits for a program that is able to apply them. So
// it reads the rows of the generation page by page, and begins at the first one that it found last: both are in the order of the
// log, more or less.
func (a *Asker) rows(ctx context.Context, msgs []*model.Message, generation int) error {
	open := map[string]*model.Message{}
	for _, m := range msgs {
		open[m.ID], m.Contested = m, true
	}
	a.mu.Lock()
	from := a.found[generation]
	a.mu.Unlock()
	first := int64(0)
	look := func(after, end int64) error {
		for f := (provider.ParkedFilter{Projector: a.Projector.Name, Generation: generation, Limit: min(2*len(msgs), rowsPage), After: after}); len(open) > 0; {
			limited, cancel := a.Host.Limited(ctx)
			rows, err := a.Host.Store.Parked(limited, f)
			cancel()
			if err != nil || len(rows) == 0 {
				return err
			}
			for i := range rows {
				if f.After = rows[i].Seq; f.After >= end {
					return nil
				}
				if m := open[rows[i].MessageID]; m != nil {
					m.Replayed = model.IsReplayed(&rows[i])
					m.Contested = !m.Replayed
					delete(open, m.ID)
					if first == 0 {
						first = f.After
					}
				}
			}
		}
		return nil
	}
	err := look(max(from-1, 0), math.MaxInt64)
	if err == nil && from > 0 {
		err = look(0, from)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.found == nil {
		a.found = map[int]int64{}
	}
	a.found[generation] = first
	return err
}

const (
	rowsPage = 1000        // the most parked messages of a query
	manyFor  = time.Second // how long it is not asked again which there are, if there are more
)

func isParked(o provider.Outcome) bool {
	return o == provider.OutcomeWaiting || o == provider.OutcomeStuck
}

// outcomes sets Replayed by the outcomes of the messages in another generation, the live one if it is
// zero.
func (a *Asker) outcomes(ctx context.Context, msgs []*model.Message, of int, sent func(provider.Outcome) bool) error {
	var asked []*model.Message
	var questions []provider.Question
	for _, m := range msgs {
		if len(m.Handlers) > 0 {
			h := m.Handlers[0]
			asked, questions = append(asked, m), append(questions, provider.Question{
				Generation: of, Handler: h.Name, Was: h.Was, MessageID: m.ID, RecordedAt: m.Raw.RecordedAt, Position: m.Raw.Position,
			})
		}
	}
	if len(questions) == 0 {
		return nil
	}
	limited, cancel := a.Host.Limited(ctx)
	defer cancel()
	c, err := a.Host.Store.Checkpoint(limited, provider.Build{Projector: a.Projector.Name, Generation: of})
	if err != nil {
		return err
	}
	outcomes, err := a.Host.Store.Outcomes(limited, questions)
	if err != nil {
		return err
	}
	var parked []*model.Message
	for i, m := range asked {
		if outcomes[i] == provider.OutcomeUnseen && len(c.Segments) > 0 && c.Applied(m.Raw.Stream, m.Raw.Position) {
			outcomes[i] = provider.OutcomeApplied
		}
		if m.Replayed = sent(outcomes[i]); !m.Replayed && isParked(outcomes[i]) {
			parked = append(parked, m)
		}
	}
	return a.rows(ctx, parked, c.Generation)
}

// ErrTurn: another program applies contested messages of the projector.
var ErrTurn = errors.New("another program applies parked messages")

// Turn is the right of one applier to apply contested messages: of the generations that apply a parked
// message, only the first sends its output.
type Turn struct {
	Asker *Asker
	has   bool
}

// Needs reports whether one of the messages is contested, and the applier does not have the turn. Then it takes the turn, and asks
// about them again.
func (t *Turn) Needs(msgs []*model.Message) bool {
	return !t.has && slices.ContainsFunc(msgs, func(m *model.Message) bool { return m.Contested })
}

// Take calls ask, unless it is nil, and then fn while it holds the lease for contested messages. Their contexts end if the lease
// is lost. If others hold it for too long, it returns ErrTurn.
func (t *Turn) Take(ctx, hard context.Context, ask func(context.Context) error, fn func(ctx, hard context.Context) error) error {
	leases, name := &t.Asker.Host.Leases, "output/"+t.Asker.Projector.Name
	for tries := 0; ; tries++ {
		had, err := leases.While(ctx, name, claim.NewToken(), func(held context.Context) error {
			hard, stop := context.WithCancel(hard)
			defer stop()
			defer context.AfterFunc(held, func() {
				if errors.Is(context.Cause(held), lease.ErrLost) && ctx.Err() == nil { // this lease, and not that of the reader
					stop()
				}
			})()
			t.has = true
			defer func() { t.has = false }()
			if ask != nil {
				if err := ask(held); err != nil {
					return err
				}
			}
			return fn(held, hard)
		})
		if had || err != nil {
			return err
		}
		if tries == 50 {
			return ErrTurn
		}
		model.Wait(ctx, model.Soon)
	}
}
