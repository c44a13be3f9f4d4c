package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
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
	Position    int64        // the checkpoint of the live read model at which both were compared
	Events      int64        // that were applied to the new tables
	Parked      int          // messages that failed there; their effects may be differences
	Differences []Difference // ordered by table, with its name in Options.Tables, and key
	Repaired    []Difference // differences that still existed, and were repaired
}

// Difference is a row of a read model that is missing (no Got), extra (no Want) or different: its
// Table and Key, and the columns as they should be (Want) and as they are (Got), as JSON objects.
type Difference = provider.Difference

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
func (p *Projector[Tx]) Verify(ctx context.Context, db provider.Units[Tx], v Verification, cfg *RunnerConfig) (*Verified, error) {
	result, err := p.verify(ctx, db, v, cfg)
	if err != nil {
		return nil, fmt.Errorf("verify %s: %w", p.name, err)
	}
	return result, nil
}

func (p *Projector[Tx]) verify(ctx context.Context, db provider.Units[Tx], v Verification, cfg *RunnerConfig) (result *Verified, err error) {
	if v.Limit < 0 || v.Rate < 0 {
		return nil, fmt.Errorf("%w: verification.Limit is %d and Rate %d: must be at least 0", ErrInput, v.Limit, v.Rate)
	}
	if v.Limit == 0 {
		v.Limit = 1000
	}
	if v.Repair != (Decision{}) {
		if err := v.Repair.Validate(); err != nil {
			return nil, err
		}
	}
	r, err := runnerOfLog(db, cfg, p)
	if err != nil {
		return nil, err
	}
	one := r.projections[0]
	ctx, release, err := one.holdVerification(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && errors.Is(context.Cause(ctx), errLeaseLost) {
			err = errLeaseLost
		}
		release()
	}()
	g, err := one.beginScratch(ctx, v.Rate)
	if err != nil {
		return nil, err
	}
	defer func() {
		ended := one.endScratch(context.WithoutCancel(ctx), g)
		if result == nil {
			err = errors.Join(err, ended)
		} else if ended != nil { // a repair is committed
			r.report(slog.LevelWarn, "the tables of a verification not dropped: the next runner or verification of the projector drops them", ended,
				"projector", p.name, "generation", g.Generation)
		}
	}()
	one.current.Store(g)
	if err := r.fill(ctx, v.Progress); err != nil {
		return nil, err
	}
	return r.compare(ctx, v)
}

// runnerOfLog returns a runner that reads the log of db or of cfg.
func runnerOfLog[Tx any](db provider.Units[Tx], cfg *RunnerConfig, p *Projector[Tx]) (*Runner, error) {
	log := orZero(cfg).Log
	if log == nil {
		if log = provider.LogOf(db); log == nil {
			return nil, refuse("cfg.Log is nil, and the store has no log")
		}
	}
	return newRunner(db, FromLog(log), orZero(cfg), p)
}

// beginScratch creates the tables of a verification.
func (p *projection) beginScratch(ctx context.Context, rate int) (*generation, error) {
	all, err := p.runner.generationsOf(ctx, p.name)
	if err != nil {
		return nil, err
	}
	is := live(all)
	if build := find(all, (*generation).isBuild); build != nil {
		if build.How != scratch {
			return nil, fmt.Errorf("%w: generation %d is being built (%s)", ErrGeneration, build.Generation, build.How)
		}
		if err := p.endScratch(ctx, build); err != nil { // its process was killed: it lost its lease
			return nil, err
		}
	}
	if !is.takes(p.opts.Version) {
		return nil, fmt.Errorf("%w: the live read model is that of version %d, and this program has version %d",
			ErrGeneration, is.Newest, p.opts.Version)
	}
	if is.Suffix == "" {
		return nil, refuse("its live tables were created without OnCreate: rebuild it once, BlueGreen")
	}
	g := request(all, Rebuild{How: scratch, Rate: rate})
	if err := p.takeUp(ctx, ctx, all, g); err != nil {
		return nil, err
	}
	return p.runner.generation(ctx, g.Build)
}

var errLeaseLost = fmt.Errorf("%w: the lease of the verification expired, because this program or the store did not reply in time: verify again", ErrGeneration)

func (p *projection) verifyLease() string { return "verify/" + p.name }

// holdVerification acquires the lease of the verification of a projector, and renews it until release
// is called. The returned context ends if the lease is lost.
func (p *projection) holdVerification(ctx context.Context) (held context.Context, release func(), err error) {
	r := p.runner
	terms := claim.Terms{Holder: r.id, Token: claim.NewToken(), Lease: r.cfg.Lease}
	for has, began := false, r.cfg.Clock(); !has; { // the process of the last one may have been killed
		if has, err = r.acquire(ctx, p.verifyLease(), terms); err != nil {
			return nil, nil, err
		}
		if waited := r.cfg.Clock().Sub(began); !has && waited > r.cfg.Lease+r.cfg.Lease/10 {
			return nil, nil, fmt.Errorf("%w: another process verifies it", ErrGeneration)
		}
		if !has {
			if wait(ctx, r.cfg.Lease/20); ctx.Err() != nil {
				return nil, nil, ctx.Err()
			}
		}
	}
	held, cancel := context.WithCancelCause(ctx)
	var renewing sync.WaitGroup
	renewing.Go(func() { r.renew(held, p.verifyLease(), terms, func() { cancel(errLeaseLost) }) })
	return held, func() {
		cancel(nil)
		renewing.Wait()
		r.release(ctx, p.verifyLease(), terms)
	}, nil
}

// retireAbandoned retires the generation of a verification whose process was killed, so that others
// can be built. It reports whether it did.
func (p *projection) retireAbandoned(ctx context.Context, all []*generation) (bool, error) {
	g := find(all, func(g *generation) bool { return g.isBuild() && g.How == scratch })
	r, now := p.runner, p.runner.cfg.Clock()
	if g == nil || now.Sub(p.looked) < r.cfg.Lease/3 {
		return false, nil
	}
	p.looked = now
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	terms := claim.Terms{Holder: r.id, Token: claim.NewToken(), Lease: r.cfg.Lease}
	has, err := r.acquire(ctx, p.verifyLease(), terms)
	if err != nil || !has {
		return false, err
	}
	changed, err := change(ctx, r.store, g, func(g *generation) {
		g.state, g.Failed = provider.GenerationRetired, "its process ended"
	})
	return changed, errors.Join(err, r.store.ReleaseLease(ctx, p.verifyLease(), terms.Token))
}

// endScratch drops the tables of a verification.
func (p *projection) endScratch(ctx context.Context, g *generation) error {
	ctx, cancel := context.WithTimeout(ctx, 2*p.runner.cfg.Timeout)
	defer cancel()
	for ctx.Err() == nil {
		now, err := p.runner.generation(ctx, g.Build)
		if err != nil {
			return err
		}
		retired, err := change(ctx, p.runner.store, now, func(g *generation) { g.state = provider.GenerationRetired })
		if err != nil {
			return err
		}
		for retired {
			n, err := p.runner.store.ClearGeneration(ctx, g.Build, p.marked, now.Tables, pruneLimit)
			if err != nil {
				return err
			}
			if n == 0 {
				_, err = change(ctx, p.runner.store, now, func(g *generation) { g.Cleared = true })
				return err
			}
		}
	}
	return ctx.Err()
}

// fill runs the runner until the reader of a generation has reached the live one.
func (r *Runner) fill(ctx context.Context, progress func(applied, total int64)) error {
	p := r.projections[0]
	r.assigned = true
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.reached = cancel
	ran := make(chan error, 1)
	go func() { ran <- r.Run(ctx) }()
	for {
		select {
		case err := <-ran:
			return err
		case <-time.After(time.Second):
			if g := p.current.Load(); progress != nil {
				progress(g.Applied, g.Total)
			}
		}
	}
}

// compare compares the tables of the scratch generation with the live ones, and repairs these.
func (r *Runner) compare(ctx context.Context, v Verification) (*Verified, error) {
	p := r.projections[0]
	reader := p.reader
	defer reader.endBackground()
	reader.serving = p.current.Load()
	result := &Verified{}
	c := provider.Comparison{Ignore: v.Ignore, Limit: v.Limit, Found: func(d []Difference) { result.Differences = d }}
	s := provider.Switch{Snapshot: true, Compare: &c}
	var err error
	var last int
	if result.Position, last, err = reader.compare(ctx, s); err != nil {
		return nil, err
	}
	result.Events = reader.applied + int64(last)
	rows, err := r.store.Parked(ctx, ParkedFilter{Projector: p.name, Generation: reader.serving.Generation, Limit: 1000})
	if err != nil {
		return nil, err
	}
	if result.Parked = len(rows); len(result.Differences) == 0 || v.Repair == (Decision{}) {
		return result, nil
	}
	c.Repair, c.Only, c.Found = true, result.Differences, func(d []Difference) { result.Repaired = d }
	if _, _, err = reader.compare(ctx, provider.Switch{Compare: &c}); err != nil {
		return nil, err
	}
	r.cfg.Logger.Warn("rows of the read model were repaired", "projector", p.name, "rows", len(result.Repaired),
		"by", v.Repair.By, "reason", v.Repair.Reason)
	return result, nil
}

// parkedWait is how long a comparison waits for parked messages of the live read model to be applied.
const parkedWait = 20 * time.Second

// errWaits: messages are parked in the live generation, and applied in the other one.
var errWaits = errors.New("messages of the live read model are parked")

// compare runs s for the generation that the reader serves, whose tables are right, and the live one.
// It returns the position of the live checkpoint, and the number of events of the last step. The
// reader does not run, or it calls compare.
func (r *reader) compare(ctx context.Context, s provider.Switch) (position int64, last int, err error) {
	for tries, began := 1, r.runner.cfg.Clock(); ; tries++ {
		if position, last, err = r.compareOnce(ctx, s); err == nil || ctx.Err() != nil {
			return position, last, err
		}
		code, waits := provider.CodeOf(err), errors.Is(err, errWaits)
		if waits && r.runner.cfg.Clock().Sub(began) > parkedWait {
			return position, last, fmt.Errorf("%w: %w", ErrGeneration, err)
		}
		if !waits && !errors.Is(err, errMany) && !errors.Is(err, errParks) && code != provider.CodeBusy && provider.ClassOf(err) != ClassTransient || errors.Is(err, provider.ErrFenced) {
			return position, last, err
		}
		delay, _ := r.runner.cfg.Retry.Delay(tries)
		wait(ctx, delay)
	}
}

func (r *reader) compareOnce(ctx context.Context, s provider.Switch) (position int64, applied int, err error) {
	c, err := r.runner.store.Checkpoint(ctx, r.build())
	if err != nil {
		return 0, 0, err
	}
	if r.at.Mode == 0 { // it does not run
		r.at, r.read = c, c.Place.Position
	}
	if err := r.applyBehind(ctx, ctx, false); err != nil {
		return 0, 0, err
	}
	all, err := r.runner.generationsOf(ctx, r.name)
	if err != nil {
		return 0, 0, err
	}
	is := live(all)
	if err := r.checkParked(ctx, is.Build); err != nil {
		return 0, 0, err
	}
	if r.serving.How == scratch && !is.takes(r.opts.Version) {
		return 0, 0, fmt.Errorf("%w: the read model of another version has become live", ErrGeneration)
	}
	compared := *s.Compare
	s.Compare, compared.Pairs = &compared, nil
	for _, name := range r.opts.Tables {
		compared.Pairs = append(compared.Pairs, provider.TablePair{Table: name + r.serving.Suffix, Other: name + is.Suffix})
	}
	// Differences have the names of Options.Tables.
	compared.Only = slices.Clone(compared.Only)
	for i := range compared.Only {
		compared.Only[i].Table += is.Suffix
	}
	found := compared.Found
	compared.Found = func(d []Difference) {
		for i := range d {
			d[i].Table = strings.TrimSuffix(d[i].Table, is.Suffix)
		}
		found(d)
	}
	u := r.newUnit(nil)
	u.intent.Once, u.intent.Messages, u.intent.Reader = true, nil, r.identity()
	last := r.lastStep(u, completePage)
	s.Last = func(ctx context.Context, l provider.Live) ([]provider.Message, error) {
		if position = l.Checkpoint.Place.Position; l.Checkpoint.Generation != is.Generation {
			return nil, fmt.Errorf("%w: another generation has become live", ErrGeneration)
		}
		if l.Checkpoint.Restored {
			return nil, fmt.Errorf("%w: the read model has gone back to an earlier state: first a runner must apply the lost events again", ErrGeneration)
		}
		if err := r.checkParked(ctx, is.Build); err != nil { // not in the snapshot, so it was checked before too
			return nil, err
		}
		return last(ctx, l)
	}
	u.intent.Switch = &s
	err = u.transact(ctx)
	_ = r.again(u, err)
	return position, len(u.msgs), err
}

// checkParked returns errWaits if messages are parked in the live generation, and not in the one that
// the reader serves: the tables would differ by these, and a repair would apply them twice.
func (r *reader) checkParked(ctx context.Context, live provider.Build) error {
	theirs, err := r.parkedIn(ctx, live)
	if err != nil || len(theirs) == 0 {
		return err
	}
	ours, err := r.parkedIn(ctx, r.build())
	if err != nil {
		return err
	}
	for id := range theirs {
		if !ours[id] {
			return fmt.Errorf("%w (id %q)", errWaits, id)
		}
	}
	return nil
}

// parkedIn returns the ids of the messages of a generation that are waiting or stuck.
func (r *reader) parkedIn(ctx context.Context, b provider.Build) (map[string]bool, error) {
	ids := map[string]bool{}
	f := ParkedFilter{Projector: b.Projector, Generation: b.Number(), States: []ParkedState{StateWaiting, StateStuck}, Limit: 1000}
	for {
		rows, err := r.runner.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return ids, err
		}
		for _, row := range rows {
			ids[row.MessageID], f.After = true, row.Seq
		}
	}
}

// compareFirst compares a generation that was built with Rebuild.Check with the live one. Without
// differences it is promoted.
func (r *reader) compareFirst(ctx, hard context.Context) error {
	found := 0
	c := provider.Comparison{Limit: 1000, Found: func(d []Difference) { found = len(d) }}
	if _, _, err := r.compare(ctx, provider.Switch{Snapshot: true, Compare: &c}); err != nil {
		return err
	}
	_, err := r.change(ctx, func(g *generation) {
		if g.Promoted = found == 0; !g.Promoted {
			g.Failed = fmt.Sprintf("%d rows differ from the live read model: promote it or cancel it", found)
		}
	})
	return err
}
