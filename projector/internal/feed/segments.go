package feed

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/plan"
	"github.com/kinora-go/kinora/provider"
)

// sharing takes a fair number of the segments of a generation, and reads them. The runners that share
// the segments are known by leases.
type sharing struct {
	*crew
	of        provider.Build // whose segments it shares; zero: none
	token     claim.Token    // of the lease that announces this runner
	announced time.Time      // when that was extended last
	mine      map[int]*share // by the number of the segment
	ended     chan int       // numbers of segments whose reader has ended
	readers   sync.WaitGroup
}

type share struct {
	stop  context.CancelFunc
	stops bool // stop was called
}

const (
	MaxSegments = 256                   // of a projector
	fencedPause = 50 * time.Millisecond // before a runner takes a segment again whose reader was fenced
	idleLook    = 2 * time.Second       // the longest pause between two looks at the segments
	runnerLease = "runner/"             // in the names of leases that announce runners
)

func (c *crew) share(ctx, hard context.Context) {
	s := &sharing{crew: c, mine: map[int]*share{}, ended: make(chan int, MaxSegments), token: claim.NewToken()}
	defer s.leave(ctx)
	for ctx.Err() == nil {
		pause, err := s.look(ctx, hard)
		if err != nil && ctx.Err() == nil {
			c.post.ReportError(err)
		}
		select {
		case <-ctx.Done():
		case number := <-s.ended:
			s.forget(number)
		case <-c.resplit:
		case <-time.After(pause):
		}
	}
}

func (s *sharing) leave(ctx context.Context) {
	for _, one := range s.mine {
		one.stop()
	}
	s.readers.Wait()
	clear(s.mine)
	for len(s.ended) > 0 {
		<-s.ended
	}
	if s.of != (provider.Build{}) {
		s.feeder.Host.Leases.Release(ctx, s.announcement(), s.token)
		s.of, s.announced = provider.Build{}, time.Time{}
	}
}

func (s *sharing) forget(number int) {
	delete(s.mine, number)
	for len(s.ended) > 0 {
		delete(s.mine, <-s.ended)
	}
}

func (s *sharing) announcement() string {
	return follow.SegmentLeases(s.of) + runnerLease + s.feeder.Host.ID
}

// look takes segments, or gives some of them up. It returns the pause until the next look.
func (s *sharing) look(ctx, hard context.Context) (pause time.Duration, err error) {
	h, g := s.feeder.Host, s.current.Load()
	pause = min(h.Lease/3, idleLook)
	if g.Generation == 0 {
		s.leave(ctx)
		return pause, nil
	}
	limited, cancel := h.Limited(ctx)
	defer cancel()
	c, err := h.Store.Checkpoint(limited, g.Build)
	if err != nil {
		return pause, err
	}
	shared := c.Split().Count > 0 && c.Mode == provider.ModeCatchUp && follow.HandlersOf(s.feeder.Projector).Match(c.Handlers)
	if !shared || s.of != g.Build {
		s.leave(ctx)
	}
	if !shared {
		return pause, nil
	}
	s.of = g.Build
	names, err := h.Store.LeaseNames(limited, follow.SegmentLeases(s.of))
	if err != nil {
		return pause, err
	}
	now, seen := h.Clock(), s.seen(names, c.Split())
	if s.yield.Left(now, h.Lease) && slices.ContainsFunc(seen.Runners, func(id string) bool { return id != seen.Runner }) {
		s.leave(ctx)
		return pause, nil
	}
	if now.Sub(s.announced) >= h.Lease/4 {
		if _, err := h.Leases.Acquire(ctx, s.announcement(), s.token); err != nil {
			return pause, err
		}
		s.announced = now
	}
	has, quota, err := s.take(ctx, hard, g, seen)
	if has < quota {
		pause = min(h.Lease/10, pause)
	}
	return pause, err
}

// seen returns what the names of leases say, and what this runner reads.
func (s *sharing) seen(names []string, split provider.Split) plan.Sharing {
	seen := plan.Sharing{Runner: s.feeder.Host.ID, Held: map[int]bool{}, Split: split}
	for _, name := range names {
		name = strings.TrimPrefix(name, follow.SegmentLeases(s.of))
		if id, announces := strings.CutPrefix(name, runnerLease); announces {
			seen.Runners = append(seen.Runners, id)
		} else if number, err := strconv.Atoi(name); err == nil {
			seen.Held[number] = true
		}
	}
	for number, one := range s.mine {
		if !one.stops {
			seen.Mine = append(seen.Mine, number)
		} else {
			seen.Held[number] = true
		}
	}
	return seen
}

// take stops readers, or starts others, until this runner has its share. It returns how many segments it has.
func (s *sharing) take(ctx, hard context.Context, g *generation.Row, seen plan.Sharing) (has, quota int, err error) {
	share := plan.ShareOf(seen)
	for _, number := range slices.Sorted(maps.Keys(s.mine)) {
		if one := s.mine[number]; !one.stops && !slices.Contains(share.Keep, number) {
			one.stops = true
			one.stop()
		}
	}
	has = len(share.Keep)
	for _, number := range share.Ask {
		if has == share.Quota {
			break
		}
		took, err := s.takeOne(ctx, hard, g, number)
		if err != nil {
			return has, share.Quota, err
		}
		if took {
			has++
		}
	}
	return has, share.Quota, nil
}

// takeOne begins to read a segment, unless another runner has it.
func (s *sharing) takeOne(ctx, hard context.Context, g *generation.Row, number int) (bool, error) {
	h, p := s.feeder.Host, s.newPost(number)
	has, err := h.Leases.Acquire(ctx, p.Lease(g), p.Token)
	if err != nil || !has {
		return false, err
	}
	work, stop := context.WithCancel(ctx)
	s.mine[number] = &share{stop: stop}
	s.readers.Go(func() {
		defer stop()
		defer p.Applier.Begin()()
		err := h.Leases.Hold(work, p.Lease(g), p.Token, func(ctx context.Context) error { return s.serve(ctx, hard, p, g, nil) })
		switch {
		case err == nil, work.Err() != nil:
		case errors.Is(err, provider.ErrFenced), errors.Is(err, follow.ErrYields): // by a new split, for example
			model.Wait(work, fencedPause)
		case errors.Is(err, model.ErrLogChanged):
			h.End(err)
		case errors.Is(err, provider.ErrEnded):
			h.Follow.Send()
			model.Wait(work, fencedPause)
		default:
			p.ReportError(err)
			model.Wait(work, h.Lease/10)
		}
		s.ended <- number
	})
	return true, nil
}
