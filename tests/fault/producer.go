package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// producer issues commands. One goroutine per stream knows the number of the next command. After
// any result other than an ack it reads that number by plain SQL.
type producer struct {
	*work
	ledger *ledger
	repo   *eventstore.Repository[*account]
}

// account is the aggregate of the commands that use a repository.
type account struct{ n int }

// Apply implements eventstore.Aggregate.
func (a *account) Apply(event any) {
	if m, ok := event.(moved); ok {
		a.n = m.N
	}
}

var errStale = errors.New("the stream's version is not the one that the producer expects")

func (w *work) produce(ctx context.Context) error {
	l, err := openLedger(w.Dir, w.Name, w.Life)
	if err != nil {
		return err
	}
	repo, err := eventstore.NewRepository(w.db, types, category, func(string) *account { return &account{} }, nil)
	if err != nil {
		return err
	}
	p := &producer{work: w, ledger: l, repo: repo}
	var all sync.WaitGroup
	for i := range w.Workers {
		all.Go(func() { p.issue(ctx, i) })
	}
	w.status.set(wordReady, 1)
	all.Wait()
	l.close()
	return nil
}

// slot is a place for a stream with commands. When the stream has its full length, another one
// takes its place. The status page keeps the stream's number when the process dies.
type slot struct {
	number int
	known  bool // next comes from the database or from an ack
	next   int
}

// issue issues the commands of this worker's slots.
func (p *producer) issue(ctx context.Context, worker int) {
	rnd := rand.New(rand.NewPCG(p.Seed+uint64(p.Life), uint64(worker)))
	var slots []*slot
	for n := worker; n < p.Streams; n += p.Workers {
		slots = append(slots, &slot{number: n})
	}
	for len(slots) > 0 && ctx.Err() == nil {
		if p.status.get(wordGate) == 0 {
			pause(ctx, time.Millisecond)
			continue
		}
		s := slots[rnd.IntN(len(slots))]
		if worker < p.Hot && rnd.IntN(10) < 8 {
			s = slots[0]
		}
		if !p.locate(ctx, s) {
			pause(ctx, time.Millisecond)
			continue
		}
		begin := time.Now()
		p.command(ctx, s, rnd)
		if p.Rate > 0 {
			pause(ctx, time.Duration(p.Workers)*time.Second/time.Duration(p.Rate)-time.Since(begin))
		}
	}
}

func (p *producer) stream(s *slot) string {
	return fmt.Sprintf("%d.%d", s.number, p.status.get(wordStreams+s.number))
}

// locate reads the next command number of a slot's stream.
func (p *producer) locate(ctx context.Context, s *slot) bool {
	if !s.known {
		var n int
		err := p.db.Pool().QueryRow(ctx, `select coalesce(max((data->>'n')::int), 0) from kinora.events where stream = $1`,
			eventstore.StreamName(category, p.stream(s))).Scan(&n)
		if err != nil {
			pause(ctx, 20*time.Millisecond)
			return false
		}
		s.known, s.next = true, n+1
	}
	if s.next > p.Length { // another producer may have reached it already
		p.status.add(wordStreams+s.number, 1)
		s.next, s.known = 1, p.Alone
	}
	return s.known
}

// command issues the slot's next command. It completes the command even if ctx ends meanwhile.
func (p *producer) command(ctx context.Context, s *slot, rnd *rand.Rand) {
	p.status.add(wordOpen, 1)
	defer p.status.add(wordOpen, -1)
	if p.status.get(wordGate) == 0 { // the gate closed while this worker located the stream
		return
	}
	id := p.stream(s)
	c := command{ID: uuid.NewString(), Stream: eventstore.StreamName(category, id), N: s.next, Amount: 1 + rnd.Int64N(1000)}
	p.ledger.intend(c)
	p.status.add(wordIssued, 1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	var at eventstore.Appended
	var err error
	if rnd.IntN(10) == 0 && p.More["release"] == "" {
		at, err = p.update(ctx, id, c)
	} else {
		at, err = p.append(ctx, c)
	}
	if err == nil && (at.Version != int64(c.N) || at.Count != 1) {
		// The oracle will find it.
		p.trace.printf("wrong %s %s %d appended at %d", c.ID, c.Stream, c.N, at.Version)
	}
	switch {
	case err == nil:
		p.ledger.outcome(c, acked)
		p.status.add(wordAcked, 1)
		s.next++
		return
	case errors.Is(err, eventstore.ErrConflict), errors.Is(err, eventstore.ErrInvalid), errors.Is(err, errStale):
		p.ledger.outcome(c, rejected)
	default:
		p.ledger.outcome(c, ambiguous)
	}
	p.trace.printf("failed %s %s %d %v", c.ID, c.Stream, c.N, err)
	s.known = false
}

func (c command) event() moved { return moved{c.ID, c.Stream, c.N, c.Amount} }

// append appends at exactly the version that the command expects.
func (p *producer) append(ctx context.Context, c command) (eventstore.Appended, error) {
	draft, err := p.draft(c)
	if err != nil {
		return eventstore.Appended{}, err
	}
	return p.db.Append(ctx, c.Stream, eventstore.Expected(c.N-1), []eventstore.Draft{draft})
}

// update appends through a repository.
func (p *producer) update(ctx context.Context, id string, c command) (eventstore.Appended, error) {
	return p.repo.Update(ctx, id, func(a *account) ([]any, error) {
		if a.n != c.N-1 {
			return nil, errStale
		}
		return []any{c.event()}, nil
	})
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
