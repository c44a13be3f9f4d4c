package task

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

type pendingChange struct {
	c     provider.TaskChange
	reply chan changeResult
	fails int       // statements that failed; one may have been applied, and its reply lost
	since time.Time // of the first one
}

type changeResult struct {
	got provider.TaskChanged
	err error
}

// change applies a change. While the database is away it waits: another worker cannot take the task over
// then.
func (e *engine[Tx]) change(c provider.TaskChange) (provider.TaskChanged, error) {
	p := &pendingChange{c: c, reply: make(chan changeResult, 1)}
	select {
	case e.changes <- p:
	case <-e.hard.Done():
		return provider.TaskChanged{}, context.Cause(e.hard)
	}
	select {
	case r := <-p.reply:
		return r.got, r.err
	case <-e.hard.Done():
		return provider.TaskChanged{}, context.Cause(e.hard)
	}
}

const (
	changeBatch = 500
	changeLimit = 5 * time.Second // of a statement with several changes
	changeTries = 3               // of a change that fails while the store replies to others
	changeMin   = 10 * time.Millisecond
	changeMax   = time.Second
)

// flush applies changes. Those that come while a statement is in progress share the next one. If that
// fails, each of its changes continues alone: one may be at fault, or wait for a lock.
func (e *engine[Tx]) flush() {
	for {
		select {
		case p := <-e.changes:
			batch := []*pendingChange{p}
			for range min(len(e.changes), changeBatch-1) {
				batch = append(batch, <-e.changes)
			}
			if err := e.apply(batch, min(changeLimit, max(e.cfg.Lease/4, changeMin))); err != nil {
				e.failed(e.hard, "tasks not changed", err)
				for _, p := range batch {
					e.repeats.Go(func() { e.repeat(p, err) })
				}
			}
		case <-e.hard.Done():
			return
		}
	}
}

// repeat applies a change that has failed until it succeeds. A change that failed for a lease, while the
// store replied to others, is at fault.
func (e *engine[Tx]) repeat(p *pendingChange, err error) {
	for pause := (pauses.Doubling{First: changeMin, Longest: changeMax}); e.hard.Err() == nil; {
		if p.fails >= changeTries && now().Sub(p.since) > e.cfg.Lease && e.reached.Load() > p.since.UnixNano() {
			p.reply <- changeResult{err: err}
			return
		}
		pauses.Wait(e.hard, pause.Next())
		if err = e.apply([]*pendingChange{p}, claimLimit); err == nil {
			return
		}
	}
}

// apply applies changes in one statement, and replies to them if that succeeds.
func (e *engine[Tx]) apply(batch []*pendingChange, limit time.Duration) error {
	changes := make([]provider.TaskChange, len(batch))
	for i, p := range batch {
		changes[i] = p.c
	}
	ctx, cancel := context.WithTimeout(e.hard, limit)
	defer cancel()
	began := now()
	got, err := e.db.ChangeTasks(ctx, changes)
	e.replied(err)
	refused := 0
	for i, p := range batch {
		if err != nil {
			if p.fails++; p.fails == 1 {
				p.since = now()
			}
			continue
		}
		if p.fails > 0 && p.c.To != Claimed && got[i].Now.Status == p.c.To { // by the statement whose reply was lost
			got[i].Applied = true
		}
		if !got[i].Applied {
			refused++
		}
		p.reply <- changeResult{got: got[i]}
	}
	if observe := e.cfg.Observer.Changed; observe != nil {
		observe(len(batch), refused, now().Sub(began), err)
	}
	return err
}
