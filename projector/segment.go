package projector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// sharing takes a fair number of the segments of a projector, and reads them. The runners that share
// the segments are known by leases. In the order of their ids, the first ones have one segment more if
// the number does not divide evenly. So all runners agree on how many each has, and none takes more.
type sharing struct {
	*projection
	of        provider.Build // whose segments it shares; zero: none
	terms     claim.Terms    // of the lease that announces this runner
	announced time.Time      // when that was extended last
	mine      map[int]*share // by the number of the segment
	ended     chan int       // numbers of segments whose reader has ended
	readers   sync.WaitGroup
}

// share is a segment that this runner reads.
type share struct {
	*projection // a copy, with a reader of the segment
	stop        context.CancelFunc
	stops       bool // stop was called
}

// fencedPause is the pause before a runner takes a segment again whose reader was fenced.
const fencedPause = 50 * time.Millisecond

// idleLook is the longest pause between two looks at the segments.
const idleLook = 2 * time.Second

// segmentsChanged makes this process look at the segments at once.
func (p *projection) segmentsChanged() {
	select {
	case p.resplits <- struct{}{}:
	default:
	}
}

// share takes segments until ctx ends.
func (p *projection) share(ctx, hard context.Context) {
	s := &sharing{projection: p, mine: map[int]*share{}, ended: make(chan int, maxSegments), terms: claim.Terms{
		Holder: p.runner.id, Token: claim.NewToken(), Lease: p.runner.cfg.Lease,
	}}
	defer s.leave(ctx)
	for ctx.Err() == nil {
		pause, err := s.look(ctx, hard)
		if err != nil && ctx.Err() == nil {
			p.reader.reportError(err)
		}
		select {
		case <-ctx.Done():
		case number := <-s.ended:
			s.forget(number)
		case <-p.resplits:
		case <-time.After(pause):
		}
	}
}

// leave stops all readers, and ends the announcement.
func (s *sharing) leave(ctx context.Context) {
	for _, one := range s.mine {
		one.stop()
	}
	s.readers.Wait()
	for number := range s.mine {
		delete(s.mine, number)
	}
	for len(s.ended) > 0 {
		<-s.ended
	}
	if s.of != (provider.Build{}) {
		s.runner.release(ctx, s.announcement(), s.terms)
		s.of, s.announced = provider.Build{}, time.Time{}
	}
}

func (s *sharing) forget(number int) {
	delete(s.mine, number)
	for len(s.ended) > 0 {
		delete(s.mine, <-s.ended)
	}
}

// prefix is that of the names of all leases that concern the segments of a generation.
func (s *sharing) prefix() string { return "segments/" + s.of.String() + "/" }

const runnerLease = "runner/" // in the names of leases that announce runners

func (s *sharing) announcement() string { return s.prefix() + runnerLease + s.runner.id }

func (s *sharing) lease(number int) string { return s.prefix() + strconv.Itoa(number) }

// look takes segments, or gives some of them up. It returns the pause until the next look.
func (s *sharing) look(ctx, hard context.Context) (pause time.Duration, err error) {
	lease := s.runner.cfg.Lease
	pause = min(lease/3, idleLook)
	g := s.current.Load()
	if g.Generation == 0 {
		s.leave(ctx)
		return pause, nil
	}
	limited, cancel := context.WithTimeout(ctx, s.runner.cfg.Timeout)
	defer cancel()
	c, err := s.runner.store.Checkpoint(limited, g.Build)
	if err != nil {
		return pause, err
	}
	split := c.Split()
	if s.of != g.Build || split.Count == 0 || c.Mode != provider.ModeCatchUp || !s.reader.hasHandlers(c.Handlers) {
		s.leave(ctx)
	}
	if split.Count == 0 || c.Mode != provider.ModeCatchUp || !s.reader.hasHandlers(c.Handlers) {
		return pause, nil
	}
	s.of = g.Build
	if now := s.runner.cfg.Clock(); now.Sub(s.announced) >= lease/4 {
		if _, err := s.runner.acquire(ctx, s.announcement(), s.terms); err != nil {
			return pause, err
		}
		s.announced = now
	}
	names, err := s.runner.store.LeaseNames(limited, s.prefix())
	if err != nil {
		return pause, err
	}
	rank, runners, held := s.others(names)
	quota := split.Count / runners
	if rank < split.Count%runners {
		quota++
	}
	has := s.keep(g, split, quota)
	for i := 0; i < split.Count && has < quota; i++ {
		// Runners begin at different segments, so that they do not ask for the same ones.
		number := split.First + (i+rank*split.Count/runners)%split.Count
		if held[number] || s.mine[number] != nil {
			continue
		}
		took, err := s.take(ctx, hard, g, number)
		if err != nil {
			return pause, err
		}
		if took {
			has++
		}
	}
	if has < quota {
		pause = min(lease/10, pause)
	}
	return pause, nil
}

// others returns the rank of this runner among those that share the segments, their number, and which
// segments are leased.
func (s *sharing) others(names []string) (rank, runners int, held map[int]bool) {
	ids := []string{s.runner.id}
	held = map[int]bool{}
	for _, name := range names {
		name = strings.TrimPrefix(name, s.prefix())
		if id, is := strings.CutPrefix(name, runnerLease); is {
			ids = append(ids, id)
		} else if number, err := strconv.Atoi(name); err == nil {
			held[number] = true
		}
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	return slices.Index(ids, s.runner.id), len(ids), held
}

// keep stops the readers of segments that the split does not have, and those above the quota. It returns
// how many go on.
func (s *sharing) keep(g *generation, split provider.Split, quota int) (has int) {
	numbers := make([]int, 0, len(s.mine))
	for number := range s.mine {
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	for _, number := range numbers {
		one := s.mine[number]
		switch {
		case one.stops:
		case has == quota || !split.Has(number):
			one.stops = true
			one.stop()
		default:
			has++
			if one.current.Load().revision < g.revision {
				one.current.Store(g)
			}
		}
	}
	return has
}

// take begins to read a segment, unless another runner has it.
func (s *sharing) take(ctx, hard context.Context, g *generation, number int) (bool, error) {
	one := s.in(g, true)
	r := one.reader
	r.segment, r.lease, r.serving = number, s.lease(number), g
	has, err := s.runner.acquire(ctx, r.lease, r.terms)
	if err != nil || !has {
		return false, err
	}
	work, stop := context.WithCancel(ctx)
	s.mine[number] = &share{projection: one, stop: stop}
	s.readers.Go(func() {
		defer stop()
		defer r.beginLoop()()
		defer r.endBackground()
		err := r.serve(work, hard)
		switch {
		case err == nil, work.Err() != nil:
		case errors.Is(err, provider.ErrFenced): // by a new split, for example
			wait(work, fencedPause)
		case errors.Is(err, ErrLogChanged):
			s.runner.end(err)
		case errors.Is(err, provider.ErrEnded):
			s.runner.followNow()
			wait(work, fencedPause)
		default:
			r.reportError(err)
			wait(work, s.runner.cfg.Lease/10)
		}
		s.ended <- number
	})
	return true, nil
}

// attachSegment makes this reader the one that moves its segment.
func (r *reader) attachSegment(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	c, err := r.runner.store.Checkpoint(limited, r.build())
	if err != nil {
		return err
	}
	if c.Restored || c.Restoring || !r.hasHandlers(c.Handlers) {
		return provider.ErrFenced
	}
	was, ok, err := r.runner.store.TakeSegment(limited, r.build(), r.segment, r.terms.Token)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return err
	}
	r.at = c
	r.at.Place, r.at.Token = was.Place, r.terms.Token
	r.read, r.verified = r.at.Place.Position, r.runner.cfg.Clock()
	r.late = lateOf(&r.at)
	if len(c.Splits) > 1 {
		r.before = &provider.Checkpoint{Splits: c.Splits[1:], Segments: c.Segments}
	}
	if was.Token != (claim.Token{}) && was.Token != r.terms.Token { // that reader did not detach
		r.suspects = maxBatch
	}
	if err := r.verify(ctx, r.build(), r.at); err != nil {
		return err
	}
	return r.checkServing(ctx)
}

// detachSegment records that the reader of a segment ended cleanly, if it still has the lease.
func (r *reader) detachSegment(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if r.at.Token == r.terms.Token {
		if has, err := r.runner.store.AcquireLease(limited, r.lease, r.terms); err == nil && has {
			_, _, _ = r.runner.store.TakeSegment(limited, r.build(), r.segment, claim.Token{})
		}
	}
	r.runner.release(ctx, r.lease, r.terms)
}

// hasHandlers reports whether this program has the recorded handlers, and no other ones.
func (r *reader) hasHandlers(recorded []provider.Began) bool {
	own := r.handlersFrom(recorded, 0)
	return slices.EqualFunc(own, recorded, func(a, b provider.Began) bool {
		return a.Type == b.Type && slices.Contains(r.named[named{b.Type, b.Handler}], a.Handler)
	})
}

// ownEvents are the events that a reader is to apply, as of the moment when it begins to read a page.
type ownEvents struct {
	segment int // 0: all
	split   provider.Split
	before  *provider.Checkpoint
	late    []provider.Began
}

func (r *reader) ownEvents() ownEvents { return ownEvents{r.segment, r.at.Split(), r.before, r.late} }

// of returns those of the events that the reader is to apply: not applied yet, and of its segment.
func (o *ownEvents) of(events []eventstore.Raw) []eventstore.Raw {
	if o.segment == 0 && o.before == nil {
		return events
	}
	return slices.DeleteFunc(slices.Clone(events), func(e eventstore.Raw) bool {
		return o.segment > 0 && o.split.Of(e.Stream) != o.segment || o.before != nil && o.before.Applied(e.Stream, e.Position)
	})
}

// taken removes the handlers of messages that begin behind them: handlers that were added while some
// segments were ahead of the checkpoint. Messages without another handler are left out.
func (o *ownEvents) taken(msgs []*inbound) []*inbound {
	if len(o.late) == 0 {
		return msgs
	}
	return slices.DeleteFunc(msgs, func(m *inbound) bool {
		had := len(m.handlers)
		m.handlers = slices.DeleteFunc(slices.Clone(m.handlers), func(h provider.Handler) bool {
			return slices.ContainsFunc(o.late, func(b provider.Began) bool {
				return b.Type == m.raw.Type && b.Handler == h.Name && m.position <= b.Position
			})
		})
		return had > 0 && len(m.handlers) == 0
	})
}

// lateOf returns the handlers that begin behind the place of a checkpoint.
func lateOf(c *provider.Checkpoint) (late []provider.Began) {
	for _, b := range c.Handlers {
		if b.Position > c.Place.Position {
			late = append(late, b)
		}
	}
	return late
}

// checkSegments returns ErrInput if the projector cannot have the segments that it asks for.
func (o *Options) checkSegments(src Source) error {
	if o.Segments < 0 || o.Segments > maxSegments {
		return fmt.Errorf("%w: options.Segments is %d: must be 0 to %d", ErrInput, o.Segments, maxSegments)
	}
	if o.Segments > 1 && src.log == nil && !src.isZero() {
		return fmt.Errorf("%w: options.Segments is %d: only a runner FromLog can split a projector", ErrInput, o.Segments)
	}
	return nil
}
