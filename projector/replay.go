package projector

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
)

// again is a delivery of a parked message.
func (r *Runner) again(ctx, hard context.Context, m *member, p Parked) *delivery {
	msg := message.NewMessage(p.MessageID, p.Payload)
	msg.Metadata = p.Headers
	d := &delivery{Runner: r, ctx: ctx, hard: hard, member: m, topic: p.Topic, msg: msg}
	d.raw, d.malformed = outbox.ParseWatermill(msg)
	return d
}

// againAt is the attempt at a handler of a message that was parked.
func (d *delivery) againAt(h *bound, p Parked) Attempt {
	a := d.at(h)
	if a.Seq, a.Key = p.Seq, p.Key; !p.Holds {
		a.Key = ""
	}
	return a
}

// replay brings a parked message through the handlers that it is parked for, one attempt each. It is an error where that
// failed: then the message stays parked, and due if it was where spent, if there is one, says that it has attempts left.
func (d *delivery) replay(p Parked, cfg ReplayConfig, spent func(attempts int) bool) error {
	hs, err := d.handlersOf(p)
	if codeOf(err) == noHandler && spent != nil {
		return err // another version of the program may have it
	}
	if err != nil {
		return d.failed(p, Attempt{Projector: p.Projector, Handler: p.Handler, MessageID: p.MessageID, Key: p.Key, Seq: p.Seq}, err, false)
	}
	for i, h := range hs {
		run := tries{delivery: d, handler: h, attempt: d.againAt(h, p)}
		defer run.release()
		crash.Point("replay: before")
		v, err := run.once(&Replay{Attempt: run.attempt, Stays: i < len(hs)-1, Force: cfg.Force, Decision: cfg.Decision})
		crash.Point("replay: after")
		switch {
		case err == nil && v == Clear:
			d.tellReplayed(p, h.name, nil)
			continue
		case err == nil && v == Held, errors.Is(err, ErrHeld):
			p.Class, p.Code = HeldClass, ""
			return errors.Join(ErrHeld, d.journalFail(p, run.attempt))
		case err == nil: // settled: it is parked a second time, and that comes first
			return ErrHeld
		case errors.Is(err, ErrNotParked):
			return ErrNotParked
		}
		d.tellReplayed(p, h.name, err)
		switch ClassOf(err) {
		case UnknownClass:
			if d.hard.Err() != nil {
				return err
			}
			if spent == nil {
				p.Attempts++
				break
			}
			if v != Suspect {
				if counted := run.count(); counted != nil {
					return counted
				}
			}
			if !spent(run.attempts) {
				return err
			}
			p.Attempts += run.attempts
		case PermanentClass:
			if p.Attempts++; codeOf(err) == p.Code && p.Code == unregistered {
				return err // as before
			}
		default:
			return err
		}
		if err = d.failed(p, run.attempt, err, spent != nil); spent != nil && isLost(err) {
			run.named = false // and stays named, since it is spent
		}
		return err
	}
	return nil
}

// noHandler is the code of a message whose handler is gone.
const noHandler = "no_handler"

// handlersOf are the handlers that a parked message waits for.
func (d *delivery) handlersOf(p Parked) ([]*bound, error) {
	if d.malformed != nil {
		return nil, &Error{Class: PermanentClass, Code: "malformed", Err: d.malformed}
	}
	takes := d.member.takes(d.raw.Type)
	switch {
	case p.Handler != "":
		for _, h := range takes {
			if h.isNamed(p.Handler) {
				return []*bound{h}, nil
			}
		}
		return nil, &Error{Class: PermanentClass, Code: noHandler, Err: fmt.Errorf("no handler %s takes %s", p.Handler, d.raw.Type)}
	case !d.member.knows(d.raw.Type): // not even by its type
		return nil, &Error{Class: PermanentClass, Code: unregistered, Err: fmt.Errorf("type %s", d.raw.Type)}
	case len(takes) == 0:
		return []*bound{d.member.nobody()}, nil
	}
	return takes, nil
}

// failed says in the journal why a replay failed, and returns the reason. Where it has to be said, that is tried until it succeeds, or
// the runner stops.
func (d *delivery) failed(p Parked, a Attempt, err error, must bool) error {
	p.Class, p.Code, p.Version = ClassOf(err), codeOf(err), d.cfg.Version
	if errors.Is(err, ErrPruned) {
		p.Code = "pruned"
	}
	d.report("parked still", p.Handler, err, "attempts", p.Attempts)
	for tries := 1; ; tries++ {
		told := d.journalFail(p, a)
		if told == nil {
			return err
		}
		if !must || d.hard.Err() != nil || !d.pause(p.Handler, p.Attempts, tries, told) {
			return told
		}
	}
}

func (d *delivery) journalFail(p Parked, a Attempt) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.msg.Context()), d.cfg.Timeout)
	defer cancel()
	if err := d.journal.FailParked(ctx, d.names.runner, p, a); err != nil {
		return away(err)
	}
	return nil
}

func (d *delivery) tellReplayed(p Parked, handler string, err error) {
	if d.cfg.Observer.Replayed != nil {
		d.cfg.Observer.Replayed(p.Projector, handler, err)
	}
}

// ReplayConfig tells how parked messages are replayed. Decision says who does it and why.
type ReplayConfig struct {
	Rate  float64 // messages a second at most; zero means 100, negative no limit
	Force bool    // also those of which the markers from when they were parked are pruned: they may take effect a second time
	Decision
}

// Replays are what came of it.
type Replays struct {
	Replayed int
	Failed   int // these are still parked, with what they failed with now
	Waiting  int // those behind one that failed, or that was not picked
}

// ErrNoHandler: a projector of a parked message is none of the runner's.
var ErrNoHandler = errors.New("no projector of this runner")

// Replay handles parked messages again, in order, through the same units of work as deliveries: marked, counted, and each
// resolved with its effect. What fails stays parked, and the later ones of its key behind it. What waits behind one that
// is replayed comes along, whether f picks it or not. The runner need not run, and others may.
//   - It goes on past messages that fail. An error is the database's, the end of ctx, ErrInput or ErrNoHandler, with what was done until then.
//   - What comes along is neither picked nor limited by cfg; what fails of it stays as it is.
//   - Where markers of the time are pruned, a message fails with the code "pruned" (ErrPruned), unless cfg.Force.
//   - f.State must be StillParked.
func (r *Runner) Replay(ctx context.Context, f ParkedFilter, cfg ReplayConfig) (done Replays, err error) {
	if err := errors.Join(cfg.Validate(), f.check()); err != nil {
		return done, fmt.Errorf("replay: %w", err)
	}
	if cfg.Rate == 0 {
		cfg.Rate = 100
	}
	defer r.names.stop(context.WithoutCancel(ctx))
	defer r.names.keepAlive()()
	touched := map[*member]bool{}
	err = r.eachParked(ctx, f, func(m *member, p Parked) error {
		began := r.cfg.Clock()
		err := r.again(ctx, ctx, m, p).replay(p, cfg, nil)
		if ctx.Err() != nil || isLost(err) {
			return errors.Join(err, ctx.Err())
		}
		done.count(err)
		touched[m] = true
		if cfg.Rate > 0 {
			rest(ctx, time.Duration(float64(time.Second)/cfg.Rate)-r.cfg.Clock().Sub(began))
		}
		return ctx.Err()
	})
	for i := 0; err == nil && i < len(r.members); i++ {
		if touched[&r.members[i]] {
			n := 0
			n, err = r.bringBack(ctx, ctx, &r.members[i], &tried{})
			done.Replayed += n
		}
	}
	if err != nil {
		err = fmt.Errorf("replay: %w", err)
	}
	return done, err
}

// count counts what came of one.
func (n *Replays) count(err error) {
	switch {
	case err == nil:
		n.Replayed++
	case errors.Is(err, ErrNotParked):
	case errors.Is(err, ErrHeld):
		n.Waiting++
	default:
		n.Failed++
	}
}

// rest waits for d, or until ctx ends.
func rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (f ParkedFilter) check() error {
	if f.State != StillParked || f.Limit < 0 {
		return fmt.Errorf("%w: only what is still parked can be replayed, and not a negative number of them", ErrInput)
	}
	return nil
}

// eachParked gives those that f picks, in order, page by page.
func (r *Runner) eachParked(ctx context.Context, f ParkedFilter, do func(*member, Parked) error) error {
	inspector := r.members[0].inspector
	if inspector == nil {
		return errors.New("this unit of work is no ParkedInspector")
	}
	left := f.Limit
	for {
		if f.Limit = 100; left > 0 {
			f.Limit = min(left, 100)
		}
		page, err := inspector.ParkedMessages(ctx, f)
		if err != nil || len(page) == 0 {
			return err
		}
		for _, p := range page {
			f.After = p.Seq
			m := r.member(p.Projector)
			if m == nil {
				if f.Projector == "" {
					continue // somebody else's
				}
				return fmt.Errorf("%w: %s", ErrNoHandler, p.Projector)
			}
			if err := do(m, p); err != nil {
				return err
			}
		}
		if left > 0 {
			if left -= len(page); left <= 0 {
				return nil
			}
		}
	}
}

func (r *Runner) member(name string) *member {
	for i := range r.members {
		if r.members[i].name == name {
			return &r.members[i]
		}
	}
	return nil
}
