package rebuild

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/lease"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Maker makes and ends the generations of a projector.
type Maker struct {
	Host      *model.Host
	Projector *model.Projector
	Worker    *unit.Worker // for units without messages
	looked    time.Time    // when retireAbandoned asked for the lease last
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", model.ErrNoRebuild, fmt.Sprintf(format, args...))
}

// CanRebuild returns ErrNoRebuild if the definition of a projector does not allow this rebuild.
func CanRebuild(p *model.Projector, how generation.How) error {
	switch {
	case !p.Logged:
		return refuse("its runner reads no log for it: give it Options.Markers, and RunnerConfig.Log or a store with events")
	case !p.Keeps.Atomic && !p.Keeps.Markers:
		return refuse("its store keeps no markers")
	case how == generation.InPlace && !p.Resets && !p.Keeps.Reset:
		return refuse("give it OnReset: its store cannot empty tables")
	case how == generation.InPlace && !p.Resets && len(p.Tables) == 0:
		return refuse("give it OnReset or Options.Tables")
	case how != generation.InPlace && (!p.Creates || len(p.Tables) == 0):
		return refuse("give it OnCreate and Options.Tables")
	case len(p.Tables) > 0 && !p.Keeps.Tables && (how != generation.InPlace || !p.Resets):
		return refuse("its store has no tables")
	}
	return nil
}

// TakeUp begins a rebuild: it empties the live read model, or creates the tables of another one. If
// the projector cannot be rebuilt, the request is retired.
func (m *Maker) TakeUp(ctx, hard context.Context, all []*generation.Row, g *generation.Row) error {
	limited, cancel := context.WithTimeout(ctx, 2*m.Host.Timeout)
	defer cancel()
	live, requested := generation.Live(all), g.Revision > 0
	err := CanRebuild(m.Projector, g.How)
	if err == nil && !g.Anyway && g.How != generation.Scratch {
		err = m.Unlogged(limited, live)
	}
	if errors.Is(err, model.ErrNoRebuild) && requested {
		return errors.Join(err, m.refuse(ctx, g, err.Error()))
	}
	if err != nil {
		return err
	}
	to := *g
	if to.Skipped, err = follow.Skipped(limited, m.Host.Store, live); err != nil {
		return err
	}
	to.Oldest, to.Newest, to.Handlers = m.Projector.Version, m.Projector.Version, m.Projector.Marked
	to.TakeOver(live)
	if g.How == generation.InPlace {
		err = m.beginInPlace(hard, live, &to)
	} else {
		to.State, to.Suffix = provider.GenerationBuilding, fmt.Sprintf("_g%d", to.Generation)
		to.Tables = m.Projector.TablesOf(to.Suffix)
		err = m.alone(hard, &to, model.Created, provider.Switch{Set: []provider.Generation{to.Stored()}, Create: to.Tables})
	}
	attrs := []any{
		"projector", m.Projector.Name, "generation", g.Generation, "how", g.How.String(), "version", m.Projector.Version, "by", g.By, "reason", g.Reason,
	}
	switch {
	case err == nil && g.How != generation.Scratch:
		m.Host.Logger.Info("a rebuild begins", attrs...)
	case err != nil && IsFinal(err):
		m.Host.Report(slog.LevelError, "a rebuild could not begin", err, attrs...)
		if requested && hard.Err() == nil {
			return errors.Join(err, m.refuse(ctx, g, failed("its begin", err)))
		}
	}
	return err
}

// IsFinal reports whether an error would probably occur again.
func IsFinal(err error) bool {
	e, ok := errors.AsType[*provider.Error](err) // others are those of reads
	return ok && (e.Class == provider.ClassUnknown || e.Class == provider.ClassPermanent)
}

// failed describes an error without its text, which may have data of users.
func failed(what string, err error) string {
	return fmt.Sprintf("%s failed (%s %s): the log has its text with RunnerConfig.LogErrors", what, provider.ClassOf(err), provider.CodeOf(err))
}

func (m *Maker) refuse(ctx context.Context, g *generation.Row, why string) error {
	ctx, cancel := m.Host.Limited(ctx)
	defer cancel()
	_, err := generation.Change(ctx, m.Host.Store, g, func(g *generation.Row) { g.State, g.Failed = provider.GenerationRetired, why })
	return err
}

// Unlogged returns ErrNoRebuild if the live generation has applied or parked messages that are not
// in the log.
func (m *Maker) Unlogged(ctx context.Context, live *generation.Row) error {
	for _, handler := range m.Projector.Marked {
		for after := ""; ; {
			ids, err := m.Host.Store.Unlogged(ctx, live.Build, handler, after, 500)
			if err != nil {
				return err
			}
			if len(ids) == 0 {
				break
			}
			places, err := m.Host.Log.LogPlaces(ctx, ids) // an event of a type that was unknown has none in its marker
			if err != nil {
				return err
			}
			for _, id := range ids {
				if places[id].Position == 0 {
					return refuse("it has applied messages that are not in the log: a rebuild would lose them (Rebuild.Anyway)")
				}
			}
			after = ids[len(ids)-1]
		}
	}
	f := provider.ParkedFilter{Projector: live.Projector, Generation: live.Generation, Limit: 100}
	for {
		rows, err := m.Host.Store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		ids := make([]string, len(rows))
		for i, row := range rows {
			ids[i], f.After = row.MessageID, row.Seq
		}
		places, err := m.Host.Log.LogPlaces(ctx, ids)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if places[id].Position == 0 {
				return refuse("a parked message is not in the log: replay or skip it first (id %q, Rebuild.Anyway)", id)
			}
		}
	}
}

// beginInPlace empties the read model, and makes a new generation of it.
func (m *Maker) beginInPlace(hard context.Context, live, to *generation.Row) error {
	to.State, to.Suffix, to.Tables = provider.GenerationLive, live.Suffix, live.Tables
	old := *live
	old.State, old.Tables, old.Handlers = provider.GenerationRetired, nil, m.Projector.HandlersOf(live)
	s := provider.Switch{Set: []provider.Generation{old.Stored(), to.Stored()}}
	if m.Projector.Resets {
		return m.alone(hard, to, model.Reset, s)
	}
	s.Reset = m.Projector.TablesOf(live.Suffix)
	return m.alone(hard, to, "", s)
}

// CreateFirst stores the first generation. If nothing was applied yet, it creates its tables.
func (m *Maker) CreateFirst(ctx, hard context.Context, live *generation.Row) (changed bool, err error) {
	c, err := m.Host.Store.Checkpoint(ctx, live.Build)
	if err != nil {
		return false, err
	}
	to, p := *live, m.Projector
	to.Handlers, to.Released = p.Marked, false
	s, with := provider.Switch{}, ""
	switch {
	case c.Mode != 0 && p.Version == 1:
		return false, nil // it was created without OnCreate
	case c.Mode == 0:
		to.Oldest, to.Newest = p.Version, p.Version
		if p.Creates {
			to.Suffix = fmt.Sprintf("_g%d", to.Generation)
			to.Tables, with, s.Show = p.TablesOf(to.Suffix), model.Created, p.ViewsOf(to.Suffix)
			s.Create = to.Tables
		}
	}
	s.Set = []provider.Generation{to.Stored()}
	if err = m.alone(hard, &to, with, s); errors.Is(err, provider.ErrFenced) { // another runner was first
		err = nil
	}
	return err == nil, err
}

// alone runs a unit of a generation, without messages, while no other unit of the projector is open.
func (m *Maker) alone(hard context.Context, g *generation.Row, setup string, s provider.Switch) error {
	defer m.Worker.Close()
	return m.Worker.Alone(hard, g.Build, g.Suffix, setup, s)
}

// Clear deletes at most 500 rows of each kind, and the tables, of a retired generation. done is false as long as there may be more.
func Clear(ctx context.Context, h *model.Host, g *generation.Row) (n int, done bool, err error) {
	c, err := h.Store.Checkpoint(ctx, g.Build)
	if err != nil {
		return 0, false, err
	}
	handlers := follow.OwnHandlers(g.Projector, g.Handlers, follow.Names(c.Handlers))
	tables := make([]provider.TablePair, len(g.Tables)) // readers see others
	for i, table := range g.Tables {
		tables[i].Table = table
	}
	n, err = h.Store.ClearGeneration(ctx, g.Build, handlers, tables, 500)
	if err != nil || n > 0 {
		return n, false, err
	}
	_, err = generation.Change(ctx, h.Store, g, func(g *generation.Row) { g.Cleared = true })
	return 0, err == nil, err
}

// VerifyLease returns the name of the lease of the verification of a projector.
func (m *Maker) VerifyLease() string { return follow.VerifyLease + m.Projector.Name }

// RetireAbandoned retires the generation of a verification whose process was killed, so that others
// can be built. It reports whether it did.
func (m *Maker) RetireAbandoned(ctx context.Context, all []*generation.Row) (changed bool, err error) {
	g := generation.Find(all, func(g *generation.Row) bool { return g.IsBuild() && g.How == generation.Scratch })
	now := m.Host.Clock()
	if g == nil || now.Sub(m.looked) < m.Host.Lease/3 {
		return false, nil
	}
	m.looked = now
	ctx, cancel := m.Host.Limited(ctx)
	defer cancel()
	_, err = m.Host.Leases.While(ctx, m.VerifyLease(), claim.NewToken(), func(ctx context.Context) error {
		changed, err = generation.Change(ctx, m.Host.Store, g, func(g *generation.Row) {
			g.State, g.Failed = provider.GenerationRetired, "its process ended"
		})
		return err
	})
	return changed, err
}

var errLeaseLost = fmt.Errorf("%w: the lease of the verification expired, because this program or the store did not reply in time: verify again", model.ErrGeneration)

// WhileVerifying calls fn while it holds the lease of the verification.
func (m *Maker) WhileVerifying(ctx context.Context, fn func(context.Context) error) error {
	for began := m.Host.Clock(); ; { // the process of the last one may have been killed
		lost := false
		had, err := m.Host.Leases.While(ctx, m.VerifyLease(), claim.NewToken(), func(ctx context.Context) error {
			err := fn(ctx)
			lost = errors.Is(context.Cause(ctx), lease.ErrLost)
			return err
		})
		switch waited := m.Host.Clock().Sub(began); {
		case had && err != nil && lost:
			return errLeaseLost
		case had, err != nil:
			return err
		case waited > m.Host.Lease+m.Host.Lease/10:
			return fmt.Errorf("%w: another process verifies it", model.ErrGeneration)
		}
		if model.Wait(ctx, m.Host.Lease/20); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// Lacks returns ErrGeneration if the live generation has what the program does not: handlers that it has not removed, or events
// of a schema version that it cannot read. Their effects would be missing in a read model that it builds.
func (m *Maker) Lacks(ctx context.Context, live *generation.Row) error {
	seen := maps.Clone(live.Seen)
	maps.DeleteFunc(seen, func(eventType string, _ []int) bool { return m.Projector.Types.Newest(eventType) == 0 })
	lacks, err := m.LacksOf(ctx, live.Build, seen)
	if err != nil || len(lacks) == 0 {
		return err
	}
	return fmt.Errorf("%w: this program lacks what the live read model has: %s", model.ErrGeneration, strings.Join(lacks, ", "))
}

// LacksOf returns which handlers of a generation, and which schema versions that it has seen, the program lacks: needs, sorted.
func (m *Maker) LacksOf(ctx context.Context, b provider.Build, seen map[string][]int) ([]string, error) {
	ctx, cancel := m.Host.Limited(ctx)
	defer cancel()
	c, err := m.Host.Store.Checkpoint(ctx, b)
	lacks := m.Projector.LacksOf(seen)
	for eventType, lacking := range follow.HandlersOf(m.Projector).Lacking(c.Handlers) {
		for _, one := range lacking {
			lacks = append(lacks, provider.NeedHandler(one.Handler, eventType))
		}
	}
	slices.Sort(lacks)
	return lacks, err
}

// BeginScratch creates the tables of a verification.
func (m *Maker) BeginScratch(ctx context.Context, rate int) (*generation.Row, error) {
	all, err := m.Host.Generations(ctx, m.Projector.Name)
	if err != nil {
		return nil, err
	}
	live := generation.Live(all)
	for _, g := range all {
		switch {
		case g.IsBuild() && g.How != generation.Scratch:
			return nil, fmt.Errorf("%w: generation %d is being built (%s)", model.ErrGeneration, g.Generation, g.How)
		case g.How != generation.Scratch || g.Cleared:
		default: // its process was killed, and lost its lease, or its tables could not be dropped
			if err := m.EndScratch(ctx, g); err != nil && g.IsBuild() {
				return nil, err
			} else if err != nil {
				m.Host.Report(slog.LevelWarn, "the tables of an earlier verification not dropped", err, "projector", g.Projector, "generation", g.Generation)
			}
		}
	}
	if !live.Takes(m.Projector.Version) {
		return nil, fmt.Errorf("%w: the live read model is that of version %d, and this program has version %d",
			model.ErrGeneration, live.Newest, m.Projector.Version)
	}
	if err := m.Lacks(ctx, live); err != nil {
		return nil, err
	}
	if live.Suffix == "" {
		return nil, refuse("its live tables were created without OnCreate: rebuild it once, BlueGreen")
	}
	g := generation.Next(all, generation.Order{How: generation.Scratch, Rate: rate})
	if err := m.TakeUp(ctx, ctx, all, g); err != nil {
		return nil, err
	}
	return m.Host.Generation(ctx, g.Build)
}

// EndScratch drops the tables of a verification.
func (m *Maker) EndScratch(ctx context.Context, g *generation.Row) error {
	ctx, cancel := context.WithTimeout(ctx, 2*m.Host.Timeout)
	defer cancel()
	for ctx.Err() == nil {
		now, err := m.Host.Generation(ctx, g.Build)
		if err != nil {
			return err
		}
		retired, err := generation.Change(ctx, m.Host.Store, now, func(g *generation.Row) { g.State = provider.GenerationRetired })
		for done := false; err == nil && retired && !done; {
			if _, done, err = Clear(ctx, m.Host, now); done {
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Sample applies the first events behind a position in a transaction that is rolled back, and returns the number of
// events per second, or zero if it fails. g is not stored; the reader is at no checkpoint.
func Sample(ctx context.Context, r *follow.Reader, g *generation.Row, after int64) float64 {
	w := r.Applier.Worker
	defer w.Close()
	page, err := r.Host.Log.LogPage(ctx, provider.LogQuery{After: after, Filter: r.Projector.Rules.Filter, Limit: model.LogBatch})
	if err != nil || len(page.Events) == 0 {
		return 0
	}
	if _, err := r.Host.ReadLogID(ctx); err != nil {
		return 0
	}
	u := w.Of(g.Build, g.Suffix, nil)
	if r.Projector.Creates {
		u.Setup, u.Suffix = model.Created, fmt.Sprintf("_g%d", g.Generation)
	}
	u.Intent.Once, u.Intent.Messages, u.Intent.Reader = true, nil, &provider.Reader{}
	u.Intent.Switch = &provider.Switch{Snapshot: true, Last: func(ctx context.Context, _ provider.Live) ([]provider.Message, error) {
		u.Messages, err = r.Accept(ctx, g, page.Events)
		return model.UnitOf(u.Messages), err
	}}
	began := r.Host.Clock()
	if _, err := w.Transact(ctx, u); err != nil {
		return 0
	}
	return float64(len(page.Events)) / max(r.Host.Clock().Sub(began), time.Microsecond).Seconds()
}
