package projector

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// setReplayed sets inbound.replayed and inbound.skipped.
func (r *reader) setReplayed(ctx context.Context, msgs []*inbound) error {
	g := r.current.Load()
	for _, m := range msgs {
		if _, m.skipped = slices.BinarySearch(g.Skipped, m.id); !m.skipped {
			_, m.skipped = slices.BinarySearch(r.skips, m.id)
		}
	}
	if !g.isReplaying() || len(msgs) == 0 {
		return nil
	}
	if g.How == scratch {
		for _, m := range msgs {
			m.replayed = true
		}
		return nil
	}
	others, orUnseen := []int{0}, true
	if g.isLive() {
		others, orUnseen = append(slices.Clone(g.Earlier), g.Source), false
	}
	for _, of := range others {
		asked, err := r.notPassed(ctx, msgs, of)
		if err == nil {
			err = r.askReplayed(ctx, asked, of, func(is provider.Outcome) bool {
				return !isParked(is) && (orUnseen || is != provider.OutcomeUnseen)
			})
		}
		if err != nil {
			return err
		}
		msgs = slices.DeleteFunc(slices.Clone(msgs), func(m *inbound) bool { return m.replayed })
	}
	return nil
}

// passed is what another generation has passed: every event up to its checkpoint, and those that its
// segments have passed, is applied there, but those that were parked. That stays true.
type passed struct {
	provider.Checkpoint
	parked map[string]bool // by id; nil: it is not known which
}

// notPassed sets inbound.replayed of the events that another generation has passed: the live one if
// of is zero. It returns the other events. So usually no event must be looked up by its id.
func (r *reader) notPassed(ctx context.Context, msgs []*inbound, of int) (rest []*inbound, err error) {
	r.passing.Lock()
	defer r.passing.Unlock()
	p := r.passed[of]
	if len(msgs) > 0 && msgs[len(msgs)-1].raw.Position > p.Place.Position {
		if p, err = r.askPassed(ctx, of); err != nil {
			return nil, err
		}
		r.passed[of] = p
	}
	for _, m := range msgs {
		if m.replayed = p.parked != nil && p.Applied(m.raw.Stream, m.raw.Position) && !p.parked[m.id]; !m.replayed {
			rest = append(rest, m)
		}
	}
	return rest, nil
}

func (r *reader) askPassed(ctx context.Context, of int) (p passed, err error) {
	const most = 1000
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	c, err := r.runner.store.Checkpoint(ctx, provider.Build{Projector: r.name, Generation: of})
	if err != nil || c.Mode == 0 {
		return p, err
	}
	// After the checkpoint: an event that it has passed was applied or parked before.
	rows, err := r.runner.store.Parked(ctx, ParkedFilter{Projector: r.name, Generation: c.Generation, Limit: most})
	if err != nil || len(rows) == most {
		return p, err
	}
	p.Checkpoint, p.parked = c, map[string]bool{}
	for _, row := range rows {
		p.parked[row.MessageID] = true
	}
	return p, nil
}

// isReplayed reports whether another generation had applied the message when it was parked.
func isReplayed(row *Parked) bool {
	_, is := row.Headers[headerReplayed]
	return is
}

// parkedAsReplayed is isReplayed for a message that is parked in a generation, the live one if it is
// zero.
func (p *projection) parkedAsReplayed(ctx context.Context, m *inbound, of int) (bool, error) {
	if of == 0 {
		c, err := p.runner.store.Checkpoint(ctx, provider.Build{Projector: p.name})
		if err != nil {
			return false, err
		}
		of = c.Generation
	}
	f := ParkedFilter{Projector: p.name, Generation: of, Key: m.key}
	for {
		rows, err := p.runner.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return false, err
		}
		for i := range rows {
			if rows[i].MessageID == m.id {
				return isReplayed(&rows[i]), nil
			}
		}
		f.After = rows[len(rows)-1].Seq
	}
}

// setSent sets inbound.replayed of parked messages that another generation has applied since they were
// parked, and inbound.contested of the others. A generation that is not live asks the live one, which
// asks those next to it.
func (w *worker) setSent(ctx context.Context, msgs []*inbound) error {
	if msgs = slices.DeleteFunc(slices.Clone(msgs), func(m *inbound) bool { return m.replayed }); len(msgs) == 0 {
		return nil
	}
	all, err := w.runner.generationsOf(ctx, w.name)
	if err != nil {
		return err
	}
	isLive := live(all).Build == w.build()
	for _, g := range all {
		isNext := !g.isLive() && g.state != provider.GenerationRetired && g.How != scratch && g.state != provider.GenerationRequested
		if isLive && !isNext || !isLive && !g.isLive() {
			continue
		}
		err := w.askReplayed(ctx, msgs, g.Generation, func(is provider.Outcome) bool {
			return is == provider.OutcomeApplied || is == provider.OutcomeSkipped && !isLive
		})
		if msgs = slices.DeleteFunc(msgs, func(m *inbound) bool { return m.replayed }); err != nil {
			return err
		}
		for _, m := range msgs {
			m.contested = true
		}
	}
	return nil
}

func isParked(is provider.Outcome) bool {
	return is == provider.OutcomeWaiting || is == provider.OutcomeStuck
}

// askReplayed sets inbound.replayed by the outcomes of the messages in another generation, the live
// one if it is zero.
func (p *projection) askReplayed(ctx context.Context, msgs []*inbound, of int, is func(provider.Outcome) bool) error {
	var asked []*inbound
	var questions []provider.Question
	for _, m := range msgs {
		if len(m.handlers) > 0 {
			h := m.handlers[0]
			asked, questions = append(asked, m), append(questions, provider.Question{
				Generation: of, Handler: h.Name, Was: h.Was, MessageID: m.id, RecordedAt: m.raw.RecordedAt, Position: m.raw.Position,
			})
		}
	}
	if len(questions) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.runner.cfg.Timeout)
	defer cancel()
	c, err := p.runner.store.Checkpoint(ctx, provider.Build{Projector: p.name, Generation: of})
	if err != nil {
		return err
	}
	outcomes, err := p.runner.store.Outcomes(ctx, questions)
	if err != nil {
		return err
	}
	for i, m := range asked {
		if outcomes[i] == provider.OutcomeUnseen && len(c.Segments) > 0 && c.Applied(m.raw.Stream, m.raw.Position) {
			outcomes[i] = provider.OutcomeApplied
		}
		if m.replayed = is(outcomes[i]); !m.replayed && isParked(outcomes[i]) {
			if m.replayed, err = p.parkedAsReplayed(ctx, m, of); err != nil {
				return err
			}
			m.contested = !m.replayed
		}
	}
	return nil
}

// errTurn: another program applies contested messages of the projector.
var errTurn = errors.New("another program applies parked messages")

// inTurn calls apply, which applies messages that ask has asked about. If one of them is contested, it
// holds a lease meanwhile, and asks again: of the generations that apply a parked message, only the
// first sends its output.
func (w *worker) inTurn(
	ctx, hard context.Context, msgs []*inbound, ask func(context.Context, []*inbound) error, apply func(ctx, hard context.Context),
) error {
	if w.hasTurn || !slices.ContainsFunc(msgs, func(m *inbound) bool { return m.contested }) {
		apply(ctx, hard)
		return nil
	}
	return w.takeTurn(ctx, hard, func(ctx, hard context.Context) error {
		if err := ask(ctx, msgs); err != nil {
			return err
		}
		apply(ctx, hard)
		return nil
	})
}

// takeTurn calls fn while it holds the lease for contested messages. Its contexts end if the lease is
// lost.
func (w *worker) takeTurn(ctx, hard context.Context, fn func(ctx, hard context.Context) error) error {
	r, lease := w.runner, "output/"+w.name
	terms := claim.Terms{Holder: r.id, Token: claim.NewToken(), Lease: r.cfg.Lease}
	for tries := 0; ; tries++ {
		has, err := r.acquire(ctx, lease, terms)
		if err != nil {
			return err
		}
		if has {
			break
		}
		if tries == 50 {
			return errTurn
		}
		wait(ctx, readMin)
	}
	hard, stop := context.WithCancel(hard)
	ctx, lost := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	renewing.Go(func() { r.renew(ctx, lease, terms, func() { stop(); lost() }) })
	w.hasTurn = true
	defer func() {
		w.hasTurn = false
		stop()
		lost()
		renewing.Wait()
		r.release(ctx, lease, terms)
	}()
	return fn(ctx, hard)
}
