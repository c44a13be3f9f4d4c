package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector/internal/feed"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/provider"
)

// Verification configures Verify. The zero value is the default.
type Verification struct {
	Ignore []string // columns that are not compared, such as those with the time of a write
	Limit  int      // the most differences to find; zero means 1000
	Rate   int      // as in Rebuild
	// Repair, if it is not zero, says who repairs the differences, and why. Then the rows that still
	// differ are replaced by the right ones, in a transaction in which no event is applied.
	Repair Decision
	// Progress, if not nil, is called about once a second with the number of applied events, and that
	// of all events.
	Progress func(applied, total int64)
}

// Verified is the result of Verify.
type Verified struct {
	Position    int64                 // the checkpoint of the live read model at which both were compared
	Events      int64                 // that were applied to the new tables
	Parked      int                   // messages that failed there; their effects may be differences
	Differences []provider.Difference // ordered by table, with its name in Options.Tables, and key
	Repaired    []provider.Difference // differences that still existed, and were repaired
}

// Verify applies the events of the log to new tables, and compares the live tables with them, as of
// one moment. It requires no running service, and may run next to one: events that are applied
// meanwhile make no differences. The new tables are dropped at the end; if that fails, it is logged, and
// the next runner or verification of p drops them.
//   - Each verification uses up the number of a generation, also if it fails: a process that was suspended
//     might still write under it.
//   - A repair is done as a whole or not at all. If the tables refer to each other by foreign keys, v.Limit must be at
//     least the number of differences.
//   - p must have OnCreate, and its handlers must use Table. Their output is dropped.
//   - A nil cfg means the default. cfg.Log is the log of the events, if db does not have it.
//   - ErrNoRebuild: p cannot be rebuilt; the text says why.
//   - ErrGeneration: a rebuild or another verification of p is going on, the read model is that of
//     another Options.Version, some of its messages are parked that do not fail now (replay or skip
//     them first), or the verification could not extend its lease (cfg.Lease).
//   - ErrInput: v has a negative number or an invalid Decision.
func (p *Projector[Tx]) Verify(ctx context.Context, db provider.Units[Tx], v Verification, cfg *RunnerConfig) (result *Verified, err error) {
	defer check.Wrap(&err, "verify %s", p.name)
	if v.Limit < 0 || v.Rate < 0 {
		return nil, fmt.Errorf("%w: verification.Limit is %d and Rate %d: must be at least 0", ErrInput, v.Limit, v.Rate)
	}
	v.Limit = cmp.Or(v.Limit, 1000)
	if v.Repair != (Decision{}) {
		if err := v.Repair.Validate(); err != nil {
			return nil, err
		}
	}
	r, err := runnerOfLog(db, cfg, p)
	if err != nil {
		return nil, err
	}
	err = r.all.Feeders[0].Maker.WhileVerifying(ctx, func(ctx context.Context) error {
		result, err = r.verify(ctx, v)
		return err
	})
	return result, err
}

func runnerOfLog[Tx any](db provider.Units[Tx], cfg *RunnerConfig, p *Projector[Tx]) (*Runner, error) {
	log := cmp.Or(orZero(cfg).Log, provider.LogOf(db))
	if log == nil {
		return nil, fmt.Errorf("%w: cfg.Log is nil, and the store has no log", ErrNoRebuild)
	}
	return newRunner(db, FromLog(log), orZero(cfg), p)
}

// verify fills new tables, and compares the live tables with them.
func (r *Runner) verify(ctx context.Context, v Verification) (result *Verified, err error) {
	f := r.all.Feeders[0]
	g, err := f.Maker.BeginScratch(ctx, v.Rate)
	if err != nil {
		return nil, err
	}
	defer func() {
		ended := f.Maker.EndScratch(context.WithoutCancel(ctx), g)
		if result == nil {
			err = errors.Join(err, ended)
		} else if ended != nil { // a repair is committed
			r.host.Report(slog.LevelWarn, "the tables of a verification not dropped: the next runner or verification of the projector drops them", ended,
				"projector", g.Projector, "generation", g.Generation)
		}
	}()
	f.Keep(g)
	if err := r.fill(ctx, f, v.Progress); err != nil {
		return nil, err
	}
	return r.compare(ctx, f, v)
}

func (r *Runner) fill(ctx context.Context, f *feed.Feeder, progress func(applied, total int64)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.kept, f.Kept, f.Reached = true, true, cancel
	ran := make(chan error, 1)
	go func() { ran <- r.Run(ctx) }()
	for {
		select {
		case err := <-ran:
			return err
		case <-time.After(time.Second):
			if g := f.Current(); progress != nil {
				progress(g.Applied, g.Total)
			}
		}
	}
}

// compare compares the tables of the scratch generation with the live ones, and repairs these.
func (r *Runner) compare(ctx context.Context, f *feed.Feeder, v Verification) (*Verified, error) {
	g := f.Current()
	at, err := r.host.Store.Checkpoint(ctx, g.Build)
	if err != nil {
		return nil, err
	}
	reader := f.Reader(g, at)
	defer reader.Applier.Worker.Close()
	switcher := &rebuild.Switcher{Reader: reader}
	result := &Verified{}
	c := provider.Comparison{Ignore: v.Ignore, Limit: v.Limit, Found: func(d []provider.Difference) { result.Differences = d }}
	var last int
	if result.Position, last, err = switcher.Compare(ctx, g, provider.Switch{Snapshot: true, Compare: &c}); err != nil {
		return nil, err
	}
	result.Events = reader.Progress.Applied + int64(last)
	rows, err := r.host.Store.Parked(ctx, ParkedFilter{Projector: g.Projector, Generation: g.Generation, Limit: 1000})
	if err != nil {
		return nil, err
	}
	if result.Parked = len(rows); len(result.Differences) == 0 || v.Repair == (Decision{}) {
		return result, nil
	}
	c.Repair, c.Only, c.Found = true, result.Differences, func(d []provider.Difference) { result.Repaired = d }
	if _, _, err = switcher.Compare(ctx, g, provider.Switch{Compare: &c}); err != nil {
		return nil, err
	}
	r.host.Logger.Warn("rows of the read model were repaired", "projector", g.Projector, "rows", len(result.Repaired),
		"by", v.Repair.By, "reason", v.Repair.Reason)
	return result, nil
}
