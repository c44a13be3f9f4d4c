package projector

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Parked is a parked message (dead letter). It has:
//   - the message: MessageID, Topic, Key, Type, Payload, Headers;
//   - why it is parked: Projector, Handler, Class, Code, Attempts, Version, At;
//   - its place: Seq (the order of parking), State, DueAt (when it is tried again);
//   - how it was resolved: ResolvedAt, and the Decision with By and Reason.
type Parked = provider.Parked

// ParkedState is the state of a parked message. Its String is "waiting", "stuck", "replayed" or
// "skipped".
type ParkedState = provider.ParkedState

// The states of a parked message.
const (
	StateWaiting  = provider.StateWaiting  // a runner tries it again
	StateStuck    = provider.StateStuck    // it waits for Replay or Skip
	StateReplayed = provider.StateReplayed // it was applied after Replay
	StateSkipped  = provider.StateSkipped  // Skip gave it up
)

// ParkedFilter selects parked messages by Projector, Handler, Key, Class, Code, Types, States and
// Seqs. The zero filter selects all that are waiting or stuck. Limit and After (a Seq) select a
// page: a zero Limit means 100 in a list, and no limit for Replay and Skip.
type ParkedFilter = provider.ParkedFilter

// Decision is who decided about a parked message (By, 1 to 255 bytes), and why (Reason, 1 to
// 1,000 bytes). It is stored with the message.
type Decision = provider.Decision

// Replay makes the messages that f selects due again, resets their attempts, stores d with them,
// and returns their number. The runners of their projectors apply them and those that wait behind
// them, in order. Without a running service, call Projector.ApplyParked afterwards.
//   - A message that waits behind an earlier stuck one of its key continues to wait.
//   - ErrInput: d has no By or no Reason, or one of them is too long, is not UTF-8 or has a NUL.
//     Nothing is changed.
func Replay(ctx context.Context, p provider.Parking, f ParkedFilter, d Decision) (int, error) {
	return decide(ctx, p, "replay", f, StateWaiting, d)
}

// Skip gives up the messages that f selects, stores d with them, and returns their number. The zero
// filter selects the messages of all projectors. Skip cannot be undone. The messages that wait
// behind them become due. If a projector has markers, a redelivery of a skipped message is ignored.
//   - ErrInput: d has no By or no Reason, or one of them is too long, is not UTF-8 or has a NUL.
//     Nothing is changed.
func Skip(ctx context.Context, p provider.Parking, f ParkedFilter, d Decision) (int, error) {
	return decide(ctx, p, "skip", f, StateSkipped, d)
}

// ApplyParked applies the parked messages of p that are due, and those that become due with them,
// and returns. Tools call it after Replay or Skip. It needs no running service, and may run next
// to one. A nil cfg means the default.
//   - A message that fails again is not an error: it stays parked. List the parked messages
//     afterwards.
//   - ErrGeneration: no generation of the read model is that of p's Version.
//   - ErrHalted: p has the option Halt, and a message is stuck or p is unable to apply it.
//   - provider.ClassUnable: messages need what this program lacks, such as cfg.Decode (the code "no_decoder") or a schema version
//     ("unregistered"). They and those behind them continue to wait; the others are applied.
//   - If ctx ends, it returns nil after the message in flight.
func (p *Projector[Tx]) ApplyParked(ctx context.Context, db provider.Units[Tx], cfg *RunnerConfig) error {
	r, err := newRunner(db, Source{}, orZero(cfg), p)
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func orZero(cfg *RunnerConfig) (zero RunnerConfig) {
	if cfg == nil {
		return zero
	}
	return *cfg
}

func decide(
	ctx context.Context, p provider.Parking, verb string, f ParkedFilter, to ParkedState, d Decision,
) (n int, err error) {
	defer check.Wrap(&err, "%s parked messages", verb)
	if err = d.Validate(); err == nil {
		n, err = p.Decide(ctx, f, to, d)
	}
	return n, err
}

// DryRun is the result of a dry run: what a replay would do.
type DryRun struct {
	Messages int               // number of messages that would be applied
	Changes  []provider.Change // of the read model, ordered by table and key
	Output   []outbox.Message  // messages that handlers would send
	Failures []DryRunFailure
	Waiting  int // number of messages that would wait behind one that fails or was not selected
}

// DryRunFailure is a message that would fail.
type DryRunFailure struct {
	Parked Parked
	Err    error
}

// DryRun replays parked messages of p in one transaction that is rolled back, and returns the
// rows that would change. Their tables have the names of Options.Tables. It counts no attempts and
// changes no parked message. It needs no running service, and may run next to one.
//   - f selects the messages, at most f.Limit (zero means 100). An empty f.Projector means p.
//   - Handlers run, one after another, each within cfg.Timeout. Their effects outside the
//     transaction are real, and a message that crashed its process may do so again. A nil cfg
//     means the default.
//   - If a message fails, the others run again without it, in a new transaction that is rolled
//     back too.
//   - ErrNoDryRun: the provider cannot show the changes of a unit.
//   - ErrGeneration: no generation of the read model is that of p's Version.
//   - ErrInput: f.Projector is another projector, f.Limit is negative, or f.States has other
//     states than waiting and stuck.
func (p *Projector[Tx]) DryRun(
	ctx context.Context, db provider.Units[Tx], f ParkedFilter, cfg *RunnerConfig,
) (result *DryRun, err error) {
	r, err := newRunner(db, Source{}, orZero(cfg), p)
	if err != nil {
		return nil, err
	}
	defer check.Wrap(&err, "dry run")
	f.Projector = cmp.Or(f.Projector, p.name)
	return r.dryRun(ctx, f)
}

func (r *Runner) dryRun(ctx context.Context, f ParkedFilter) (*DryRun, error) {
	feeder := r.feeder(f.Projector)
	resolved := func(s ParkedState) bool { return s != StateWaiting && s != StateStuck }
	switch {
	case feeder == nil:
		return nil, fmt.Errorf("%w: filter.Projector is %q: leave it empty, or use this projector", ErrInput, f.Projector)
	case !feeder.Projector.Keeps.DryRun:
		return nil, ErrNoDryRun
	case f.Limit < 0 || slices.ContainsFunc(f.States, resolved):
		return nil, fmt.Errorf("%w: filter.Limit must be at least 0, and filter.States only waiting and stuck", ErrInput)
	}
	if err := r.all.ChooseOnce(ctx); err != nil {
		return nil, err
	}
	d := dry{Worker: feeder.Worker(), g: feeder.Current(), result: &DryRun{}}
	defer d.Close()
	f.Generation = d.g.Generation
	rows, err := r.host.Store.Parked(ctx, f)
	if err != nil {
		return nil, err
	}
	all, err := feeder.Parked(ctx, rows)
	if err != nil {
		return nil, err
	}
	var msgs []*model.Message
	for _, m := range all {
		if m.Aside != nil {
			d.fails(m, m.Aside.Cause)
		} else {
			msgs = append(msgs, m)
		}
	}
	for len(msgs) > 0 {
		done, err := d.try(ctx, msgs, func(changes []provider.Change) { d.result.Changes = d.named(changes) })
		if err == nil {
			d.add(done)
			break
		}
		if provider.ClassOf(err) == ClassTransient || ctx.Err() != nil {
			return nil, err
		}
		at := done.Culprit(err)
		if at < 0 && provider.ClassOf(err) == ClassPermanent {
			at, err = d.firstFailure(ctx, msgs, err)
		}
		if at < 0 {
			return nil, err
		}
		// Try again without the message, and so without those that wait behind it.
		d.fails(msgs[at], err)
		msgs = slices.Delete(msgs, at, at+1)
	}
	return d.result, nil
}

type dry struct {
	*unit.Worker
	g      *generation.Row
	result *DryRun
}

func (d *dry) fails(m *model.Message, err error) {
	d.result.Failures = append(d.result.Failures, DryRunFailure{*m.Parked, err})
}

func (d *dry) try(ctx context.Context, msgs []*model.Message, changes func([]provider.Change)) (*unit.Done, error) {
	u := d.Of(d.g.Build, d.g.Suffix, msgs)
	u.Intent.DryRun = changes
	return d.Run(ctx, u)
}

func (d *dry) add(done *unit.Done) {
	for i, m := range done.Unit.Messages {
		switch {
		case m.Aside != nil: // it could not be decoded
			d.fails(m, m.Aside.Cause)
		case done.Fates[i] == unit.Changed || done.Rows[i] != nil:
			d.result.Waiting++
		default:
			d.result.Messages++
		}
	}
	d.result.Output = done.Output
}

// named gives changes the names of Options.Tables.
func (d *dry) named(changes []provider.Change) []provider.Change {
	for i, c := range changes {
		if name, ok := strings.CutSuffix(c.Table, d.g.Suffix); ok && slices.Contains(d.Projector.Tables, name) {
			changes[i].Table = name
		}
	}
	return changes
}

// firstFailure returns the first message whose failure ends a dry run, and its error. It is for an
// error that belongs to no message, such as output that the outbox refuses: it runs the first
// message, then the first two, and so on. The result is -1 if none of these fails again, or if the
// failure is not that of a message.
func (d *dry) firstFailure(ctx context.Context, msgs []*model.Message, err error) (int, error) {
	for n := 1; n <= len(msgs); n++ {
		_, again := d.try(ctx, msgs[:n], func([]provider.Change) {})
		if provider.ClassOf(again) == ClassPermanent {
			return n - 1, again
		} else if again != nil {
			return -1, again
		}
	}
	return -1, err
}
