package projector

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Change is a row that a dry run inserted (no Before), updated, or deleted (no After): its Table,
// and the row before and after as JSON objects of its columns.
type Change = provider.Change

// DryRun is the result of a dry run: what a replay would do.
type DryRun struct {
	Messages int              // number of messages that would be applied
	Changes  []Change         // of the read model, ordered by table and key
	Output   []outbox.Message // messages that handlers would send
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
) (*DryRun, error) {
	r, err := newRunner(db, Source{}, orZero(cfg), p)
	if err != nil {
		return nil, err
	}
	f.Projector = cmp.Or(f.Projector, p.name)
	result, err := r.dryRun(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("dry run: %w", err)
	}
	return result, nil
}

func (r *Runner) dryRun(ctx context.Context, f ParkedFilter) (*DryRun, error) {
	p := r.byName[f.Projector]
	resolved := func(s ParkedState) bool { return s != StateWaiting && s != StateStuck }
	switch {
	case p == nil:
		return nil, fmt.Errorf("%w: filter.Projector is %q: leave it empty, or use this projector", ErrInput, f.Projector)
	case !p.dryRuns:
		return nil, ErrNoDryRun
	case f.Limit < 0 || slices.ContainsFunc(f.States, resolved):
		return nil, fmt.Errorf("%w: filter.Limit must be at least 0, and filter.States only waiting and stuck", ErrInput)
	}
	if err := r.chooseOnce(ctx); err != nil {
		return nil, err
	}
	f.Generation = p.build().Generation
	rows, err := r.store.Parked(ctx, f)
	if err != nil {
		return nil, err
	}
	received, err := r.receiveParked(ctx, rows)
	if err != nil {
		return nil, err
	}
	result := &DryRun{}
	var msgs []*inbound
	for i, row := range rows {
		if m := p.acceptParked(received[i], row); m.aside != nil {
			result.Failures = append(result.Failures, DryRunFailure{row, m.aside.cause})
		} else {
			msgs = append(msgs, m)
		}
	}
	w := &worker{projection: p}
	defer w.endBackground()
	for len(msgs) > 0 {
		u := w.newUnit(msgs)
		u.intent.DryRun = func(changes []Change) { result.Changes = p.named(changes) }
		err := u.attempt(ctx, false)
		if err == nil {
			for i, m := range msgs {
				switch {
				case m.aside != nil: // it could not be decoded
					result.Failures = append(result.Failures, DryRunFailure{*m.parked, m.aside.cause})
				case u.live[i] && u.parked[i] == nil:
					result.Messages++
				default:
					result.Waiting++
				}
			}
			result.Output = u.output
			return result, nil
		}
		if provider.ClassOf(err) == ClassTransient || ctx.Err() != nil {
			return nil, err
		}
		at := u.culprit(err)
		if at < 0 && provider.ClassOf(err) == ClassPermanent {
			at, err = w.firstFailure(ctx, msgs, err)
		}
		if at < 0 {
			return nil, err
		}
		// Try again without the message, and so without those that wait behind it.
		result.Failures = append(result.Failures, DryRunFailure{*msgs[at].parked, err})
		msgs = slices.Delete(msgs, at, at+1)
	}
	return result, nil
}

// named gives changes the names of Options.Tables.
func (p *projection) named(changes []Change) []Change {
	suffix := p.current.Load().Suffix
	for i, c := range changes {
		if name, ok := strings.CutSuffix(c.Table, suffix); ok && slices.Contains(p.opts.Tables, name) {
			changes[i].Table = name
		}
	}
	return changes
}

// firstFailure returns the first message whose failure ends a dry run, and its error. It is for an
// error that belongs to no message, such as output that the outbox refuses: it runs the first
// message, then the first two, and so on. The result is -1 if none of these fails again, or if the
// failure is not that of a message.
func (w *worker) firstFailure(ctx context.Context, msgs []*inbound, err error) (int, error) {
	for n := 1; n <= len(msgs); n++ {
		u := w.newUnit(msgs[:n])
		u.intent.DryRun = func([]Change) {}
		if again := u.attempt(ctx, false); provider.ClassOf(again) == ClassPermanent {
			return n - 1, again
		} else if again != nil {
			return -1, again
		}
	}
	return -1, err
}
