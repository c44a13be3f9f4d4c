package task

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// pendingChange is a change that waits for its statement.
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

// change applies a change. While the database is away it waits: the task is still that of this
// worker if nobody else could take it over.
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
	changeTries = 3 // of a change that fails while the store replies to others
	changeMin   = 10 * time.Millisecond
	changeMax   = time.Second
)

// flush applies changes. Those that come while a statement is in progress share the next one.
func (e *engine[Tx]) flush() {
	var batch []*pendingChange
	pause := changeMin
	for e.hard.Err() == nil {
		if len(batch) == 0 {
			select {
			case p := <-e.changes:
				batch = append(batch, p)
			case <-e.hard.Done():
				return
			}
		}
		batch = e.collect(batch)
		err := e.apply(batch)
		if err == nil {
			batch, pause = batch[:0], changeMin
			continue
		}
		e.failed(e.hard, "tasks not changed", err)
		if batch = e.applyEach(batch, err); len(batch) > 0 {
			e.sleep(e.hard, pause, nil, nil)
			pause = min(2*pause, changeMax)
		}
	}
}

// collect adds the changes that have come since.
func (e *engine[Tx]) collect(batch []*pendingChange) []*pendingChange {
	for len(batch) < changeBatch {
		select {
		case p := <-e.changes:
			batch = append(batch, p)
			continue
		default:
		}
		break
	}
	return batch
}

// apply applies changes in one statement, and replies to them if that succeeds.
func (e *engine[Tx]) apply(batch []*pendingChange) error {
	changes := make([]provider.TaskChange, len(batch))
	for i, p := range batch {
		changes[i] = p.c
	}
	ctx, cancel := context.WithTimeout(e.hard, claimLimit)
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

// applyEach applies each change of a batch that failed with err alone, because one of them may be at
// fault. It returns those that are to be tried again.
func (e *engine[Tx]) applyEach(batch []*pendingChange, err error) (left []*pendingChange) {
	for _, p := range batch {
		if len(batch) > 1 {
			err = e.apply([]*pendingChange{p})
		}
		switch {
		case err == nil:
		case p.fails >= changeTries && now().Sub(p.since) > e.cfg.Lease && e.reached.Load() > p.since.UnixNano(): // the store replies to others
			p.reply <- changeResult{err: err}
		default:
			left = append(left, p)
		}
	}
	return left
}
