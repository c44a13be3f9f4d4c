package rebuild

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Switcher makes the generation of a reader live, or compares it with the live one.
type Switcher struct {
	Reader   *follow.Reader
	retrying time.Time              // since when the switch waits for parked messages
	waiting  map[provider.Lane]bool // parked lanes, whose events the last step leaves to the reader
}

// promoteMost is the most events that are applied while all units of the projector wait.
const promoteMost = 200

var (
	// errMany: the live generation has applied too many events that this one has not applied.
	errMany = errors.New("too many events for the last step")
	// errWaits: messages are parked in the live generation, and applied in the other one.
	errWaits = errors.New("messages of the live read model are parked")
)

// promote makes the generation live. First it applies, next to the live generation, the events that
// this one has applied above its checkpoint. The rest is applied in the transaction of the switch,
// while no other unit of the projector is open.
func (s *Switcher) promote(ctx, hard context.Context, g *generation.Row) error {
	r, h := s.Reader, s.Reader.Host
	if err := s.applyBehind(ctx, hard, g, true); err != nil {
		if errors.Is(err, errMany) {
			return nil // catching up is faster
		}
		return err
	}
	all, err := h.Generations(ctx, g.Projector)
	if err != nil {
		return err
	}
	me := generation.Find(all, func(one *generation.Row) bool { return one.Build == g.Build })
	standby := me != nil && me.State == provider.GenerationStandby && me.Promoted
	if me == nil || me.Paused || me.State != provider.GenerationBuilding && !standby {
		h.Follow.Send()
		return nil
	}
	if waits, err := s.waitsForParked(ctx, g); waits || err != nil {
		model.Wait(ctx, model.LookAgain)
		return err
	}
	change := SwitchTo(r.Projector, all, me)
	var d *unit.Done
	err = r.Applier.Turn.Take(ctx, hard, nil, func(_, hard context.Context) error {
		d, err = s.transact(hard, g, change, promoteMost)
		return err
	})
	return s.switched(ctx, hard, g, d, err)
}

// switched does what follows a switch. d is nil if it was not tried.
func (s *Switcher) switched(ctx, hard context.Context, g *generation.Row, d *unit.Done, err error) error {
	h := s.Reader.Host
	switch {
	case s.again(d, err):
		return nil
	case provider.CodeOf(err) == provider.CodeBusy:
		h.Logger.Info("the switch waits for transactions that use the read model", "projector", g.Projector, "generation", g.Generation)
		model.Wait(ctx, model.LookAgain)
		return nil
	case err != nil && hard.Err() == nil && IsFinal(err):
		if d != nil && d.Culprit(err) >= 0 {
			return nil // applied alone, the event is parked
		}
		// such as a view that others depend on
		h.Report(slog.LevelError, "the read model was not switched", err, "projector", g.Projector, "generation", g.Generation)
		_, _, err = s.Reader.Progress.Change(ctx, g, func(g *generation.Row) { g.Promoted, g.Failed = false, failed("the switch", err) })
		return err
	case err != nil:
		return err
	}
	h.Logger.Info("another generation of the read model is live", "projector", g.Projector, "generation", g.Generation)
	h.Follow.Send()
	return provider.ErrFenced // it is served in another way now
}

// transact runs a switch, or a comparison, whose last step applies what is left of the events that the live generation
// has applied: at most a number of them.
func (s *Switcher) transact(hard context.Context, g *generation.Row, change *provider.Switch, most int) (*unit.Done, error) {
	u := s.Reader.Unit(g, nil)
	u.Intent.Once, u.Intent.Messages, u.Intent.Switch = true, nil, change
	also := change.Last
	change.Last = func(ctx context.Context, l provider.Live) ([]provider.Message, error) {
		if also != nil {
			if _, err := also(ctx, l); err != nil {
				return nil, err
			}
		}
		return s.lastStep(ctx, g, u, l, most)
	}
	return s.Reader.Applier.Worker.Transact(hard, u)
}

// lastStep returns the messages of a unit with Switch: the events that the live generation has applied and this one
// has not, at most the given number. Those that would be parked are left out: the reader parks them
// later, because they are above the checkpoint.
func (s *Switcher) lastStep(ctx context.Context, g *generation.Row, u *unit.Unit, l provider.Live, most int) ([]provider.Message, error) {
	behind, err := s.behind(ctx, l, false)
	if err != nil {
		return nil, err
	}
	if u.Messages, err = s.Reader.Accept(ctx, g, behind); err != nil {
		return nil, err
	}
	isUnable := func(m *model.Message) bool {
		return m.Aside != nil && provider.ClassOf(m.Aside.Cause) == provider.ClassUnable
	}
	if g.How == generation.Scratch && slices.ContainsFunc(u.Messages, isUnable) {
		return nil, errUnable
	}
	u.Messages = slices.DeleteFunc(u.Messages, func(m *model.Message) bool { return s.waiting[m.Lane] })
	if len(u.Messages) > most {
		return nil, errMany
	}
	return model.UnitOf(u.Messages), nil
}

// again reports whether the last step can be tried again at once.
func (s *Switcher) again(d *unit.Done, err error) bool {
	if !errors.Is(err, unit.ErrParks) {
		return errors.Is(err, errMany)
	}
	if s.waiting == nil {
		s.waiting = map[provider.Lane]bool{}
	}
	for _, lane := range d.Parks {
		s.waiting[lane] = true
	}
	return true
}

// waitsForParked reports whether parked messages of the generation will be tried again soon, such as
// those that a crash has left. Readers would miss their events after a switch. A switch does not wait for
// messages that were tried more than three times, and waits for at most 30 s.
func (s *Switcher) waitsForParked(ctx context.Context, g *generation.Row) (bool, error) {
	h := s.Reader.Host
	now := h.Clock()
	if !s.retrying.IsZero() && now.Sub(s.retrying) > 30*time.Second {
		return false, nil
	}
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	rows, err := h.Store.Parked(ctx, provider.ParkedFilter{
		Projector: g.Projector, Generation: g.Generation, States: []provider.ParkedState{provider.StateWaiting},
	})
	soon := slices.ContainsFunc(rows, func(p provider.Parked) bool {
		return !p.DueAt.IsZero() && p.Class != provider.ClassHeld && p.Attempts <= 3
	})
	if err == nil && !soon {
		soon, err = s.leftToOthers(ctx, g)
	}
	if err != nil || !soon {
		return false, err
	}
	if s.retrying.IsZero() {
		s.retrying = now
		h.Logger.Info("the switch waits for parked messages that are tried again", "projector", g.Projector, "generation", g.Generation)
	}
	return true, nil
}

// leftToOthers reports whether another program will apply messages that this one is unable to apply.
func (s *Switcher) leftToOthers(ctx context.Context, g *generation.Row) (bool, error) {
	list, err := s.Reader.Host.Store.Needs(ctx, []provider.Need{{Build: g.Build}})
	if err != nil || len(list) == 0 {
		return false, err
	}
	needs := make([]string, len(list))
	for i := range list {
		needs[i] = list[i].Needs
	}
	return s.Reader.Host.Meets(ctx, s.Reader.Projector, g, needs...), nil
}

// applyBehind applies the events that the live generation has applied above its checkpoint, until
// few are left. If the reader catches up, and many events up to the live checkpoint are not applied,
// it returns errMany.
func (s *Switcher) applyBehind(ctx, hard context.Context, g *generation.Row, catchesUp bool) error {
	for range 20 {
		behind, live, err := s.behindNow(ctx, g.Projector)
		if err != nil {
			return err
		}
		if catchesUp && len(behind) > promoteMost && behind[promoteMost].Position <= live.Position {
			return errMany
		}
		if _, err := s.Reader.Complete(ctx, hard, g, behind); err != nil {
			return err
		}
		if len(behind) <= promoteMost/2 {
			break
		}
	}
	return nil
}

// behindNow returns events that the live generation has applied and this one has not, and the place
// of the live checkpoint.
func (s *Switcher) behindNow(ctx context.Context, projector string) (behind []eventstore.Raw, live provider.LogPlace, err error) {
	store := s.Reader.Host.Store
	c, err := store.Checkpoint(ctx, provider.Build{Projector: projector})
	if err != nil {
		return nil, live, err
	}
	b := provider.Build{Projector: projector, Generation: c.Generation}
	behind, err = s.behind(ctx, provider.Live{Checkpoint: c, Unapplied: func(ctx context.Context, m []provider.Message) ([]bool, error) {
		return store.Unapplied(ctx, b, m)
	}}, true)
	return behind, c.Place, err
}

// behind returns the events that the live generation has applied and this one has not, in order
// of position. If the live generation may change meanwhile (changes), it leaves out those that have
// an event before them in their stream that was not applied when it was looked at: that one may have
// been applied before later ones are looked at.
func (s *Switcher) behind(ctx context.Context, l provider.Live, changes bool) (behind []eventstore.Raw, err error) {
	r, open := s.Reader, map[string]bool{}
	q := provider.LogQuery{After: r.At().Place.Position, Filter: r.Filter(), Limit: lookPage, Unsettled: true}
	for {
		page, err := r.Host.Page(ctx, q)
		if err != nil {
			return nil, err
		}
		missing, err := r.Unapplied(ctx, page.Events)
		if err != nil {
			return nil, err
		}
		ours, err := appliedIn(ctx, l, missing)
		if err != nil {
			return nil, err
		}
		if changes {
			ours = inOrder(open, missing, ours)
		}
		behind = append(behind, ours...)
		last := page.End.Position
		if n := len(page.Events); n > 0 {
			last = max(last, page.Events[n-1].Position)
		}
		if !page.Full || last <= q.After {
			return behind, nil
		}
		q.After = last
	}
}

// lookPage is the most events that are looked at with one query.
const lookPage = 1000

// inOrder returns the events of applied without those behind an event of all in their stream that is
// not in applied. open are the streams that have such an event.
func inOrder(open map[string]bool, all, applied []eventstore.Raw) (kept []eventstore.Raw) {
	for _, e := range all {
		switch {
		case len(applied) == 0 || applied[0].ID != e.ID:
			open[e.Stream] = true
			continue
		case !open[e.Stream]:
			kept = append(kept, e)
		}
		applied = applied[1:]
	}
	return kept
}

// appliedIn returns the events that a generation has applied or parked: those up to its checkpoint or
// to the segment of their stream, and those that have the markers of the handlers that it takes their types with.
func appliedIn(ctx context.Context, l provider.Live, events []eventstore.Raw) (applied []eventstore.Raw, err error) {
	takers := map[string][]provider.Handler{}
	for _, b := range l.Checkpoint.Handlers {
		takers[b.Type] = append(takers[b.Type], b.Taker())
	}
	var asked []provider.Message
	for _, e := range events {
		if !l.Checkpoint.Applied(e.Stream, e.Position) && len(takers[e.Type]) > 0 {
			asked = append(asked, provider.Message{ID: e.ID, Handlers: takers[e.Type], Position: e.Position})
		}
	}
	open := map[string]bool{}
	for page := range slices.Chunk(asked, lookPage) {
		unapplied, err := l.Unapplied(ctx, page)
		if err != nil {
			return nil, err
		}
		for i, m := range page {
			open[m.ID] = unapplied[i]
		}
	}
	return slices.DeleteFunc(slices.Clone(events), func(e eventstore.Raw) bool {
		return !l.Checkpoint.Applied(e.Stream, e.Position) && (len(takers[e.Type]) == 0 || open[e.ID])
	}), nil
}

// SwitchTo returns the switch that makes a generation live. The one that was live becomes standby,
// if programs can feed it: it has tables of its own. Older ones are retired.
func SwitchTo(p *model.Projector, all []*generation.Row, me *generation.Row) *provider.Switch {
	s := &provider.Switch{Show: p.ViewsOf(me.Suffix)}
	was, to := *generation.Live(all), *me
	to.State, to.Promoted, to.Failed = provider.GenerationLive, false, ""
	to.TakeOver(&was) // the last step may leave out events that it has applied
	was.Paused = false
	if was.Handlers = p.HandlersOf(&was); was.Suffix != "" {
		was.State, was.Promoted = provider.GenerationStandby, false
	} else {
		was.State = provider.GenerationRetired
		for _, name := range p.Tables {
			s.Rename = append(s.Rename, provider.TablePair{Table: name, Other: fmt.Sprintf("%s_g%d", name, was.Generation)})
		}
	}
	s.Set = append(s.Set, was.Stored())
	for _, g := range all {
		if g.State == provider.GenerationStandby && g.Build != me.Build {
			older := *g
			older.State = provider.GenerationRetired
			s.Set = append(s.Set, older.Stored())
		}
	}
	s.Set = append(s.Set, to.Stored())
	return s
}
