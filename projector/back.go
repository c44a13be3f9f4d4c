package projector

import (
	"context"
	"errors"
	"time"
)

// returned is the decision of the runner itself.
var returned = Decision{By: "runner", Reason: "what it waited for is done"}

// tried is what one who brings back messages of a projector knows of those that came in vain.
type tried struct {
	due     map[int64]again // by Seq
	unknown map[int64]bool  // by Seq: what is as unregistered here as it was when it was parked
}

// again is when a message that was brought back in vain is tried the next time.
type again struct {
	tries int
	at    time.Time
}

// bringBack replays what waited and is due. What fails stays due until its attempts are spent, and is left alone for as long as
// Retry says; what no handler here takes is left to newer runners.
func (r *Runner) bringBack(ctx, hard context.Context, m *member, known *tried) (back int, err error) {
	progress, inARow := false, 0
	for after := int64(0); ctx.Err() == nil; {
		due, err := r.duePage(ctx, m, nil, after)
		if err != nil || len(due) == 0 && !progress {
			return back, err
		}
		if len(due) == 0 {
			after, progress = 0, false // what was behind those that went on is due now
		}
		for _, p := range due {
			after = p.Seq
			if ctx.Err() != nil || r.cfg.Clock().Before(known.due[p.Seq].at) || r.names.isUnder(p) {
				continue
			}
			switch err := r.again(ctx, hard, m, p).replay(p, ReplayConfig{Decision: returned}, r.cfg.Retry.Spent); {
			case err == nil:
				back, progress, inARow = back+1, true, 0
				delete(known.due, p.Seq)
				continue
			case isLost(err):
				return back, err
			default:
				if known.putOff(p.Seq, r.cfg); isAway(err) {
					inARow++
				}
				if inARow == 3 { // everybody's trouble
					return back, err
				}
			}
		}
	}
	return back, ctx.Err()
}

// putOff leaves a message alone for a while.
func (k *tried) putOff(seq int64, cfg RunnerConfig) {
	if len(k.due) > 10_000 || k.due == nil {
		k.due = map[int64]again{} // it costs a try
	}
	n := k.due[seq].tries + 1
	delay, _ := cfg.Retry.Delay(n)
	k.due[seq] = again{n, cfg.Clock().Add(delay)}
}

// bringKnown replays what was parked as unregistered and is of a type that is known by now.
func (r *Runner) bringKnown(ctx, hard context.Context, m *member, known *tried) {
	still, waits := map[int64]bool{}, map[string]bool{} // waits are keys of which one is still to be waited for
	for after := int64(0); ctx.Err() == nil; {
		due, err := r.duePage(ctx, m, m.types, after)
		if err != nil {
			return
		}
		if len(due) == 0 {
			known.unknown = still
			return
		}
		for _, p := range due {
			if after = p.Seq; p.Code != unregistered || ctx.Err() != nil {
				continue // see bringBack
			}
			if known.unknown[p.Seq] || waits[p.Key] {
				still[p.Seq] = known.unknown[p.Seq]
				waits[p.Key] = waits[p.Key] || p.Holds && p.Key != ""
				continue
			}
			err := r.again(ctx, hard, m, p).replay(p, ReplayConfig{Decision: returned}, r.cfg.Retry.Spent)
			if isLost(err) {
				return
			}
			still[p.Seq] = ClassOf(err) == PermanentClass && codeOf(err) == unregistered
			waits[p.Key] = waits[p.Key] || err != nil && p.Holds && p.Key != ""
		}
	}
}

// isAway tells whether err is the world's fault, and says nothing about a message; isLost, that it is the store's.
func isAway(err error) bool {
	class := ClassOf(err)
	return err != nil && (class == Transient || class == Shutdown || class == Ambiguous)
}

func isLost(err error) bool {
	_, ok := errors.AsType[*lost](err)
	return ok
}

func (r *Runner) duePage(ctx context.Context, m *member, types []string, after int64) ([]Parked, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	due, err := r.journal.DueParked(ctx, m.name, types, after, 100)
	if err != nil && ctx.Err() == nil {
		r.log.Warn("what waits is not looked at", "projector", m.name, "class", ClassOf(err).String(), "code", codeOf(err), "err", err)
	}
	if err != nil {
		err = away(err)
	}
	return due, err
}
