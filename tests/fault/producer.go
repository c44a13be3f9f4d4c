package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// producer issues commands. Each stream has one goroutine, which knows the number of its next command, and after
// anything but an ack asks plain SQL for it.
type producer struct {
	*work
	ledger *ledger
	repo   *eventstore.Repository[*account]
}

// account is the aggregate of those commands that go through a repository.
type account struct{ n int }

// Apply implements eventstore.Aggregate.
func (a *account) Apply(event any) {
	if m, ok := event.(moved); ok {
		a.n = m.N
	}
}

var errStale = errors.New("the stream is not where the producer thinks")

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

// slot is a stream with commands; when it has its length, another one takes its place. Which one it is survives the
// process in its status.
type slot struct {
	number int
	known  bool // next is what the database said, or was told
	next   int
}

// issue issues the commands of those slots that are worker's.
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
		p.command(ctx, s, rnd)
	}
}

func (p *producer) stream(s *slot) string {
	return fmt.Sprintf("%d.%d", s.number, p.status.get(wordStreams+s.number))
}

// locate finds out the next number of a slot's stream.
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
	if s.next > p.Length { // another producer may be there already
		p.status.add(wordStreams+s.number, 1)
		s.next, s.known = 1, p.Alone
	}
	return s.known
}

// command issues the slot's next one. It is finished also when ctx ends meanwhile.
func (p *producer) command(ctx context.Context, s *slot, rnd *rand.Rand) {
	p.status.add(wordOpen, 1)
	defer p.status.add(wordOpen, -1)
	if p.status.get(wordGate) == 0 { // closed while this was looking for its place
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
	if rnd.IntN(10) == 0 {
		at, err = p.update(ctx, id, c)
	} else {
		at, err = p.append(ctx, c)
	}
	if err == nil && (at.Version != int64(c.N) || at.Count != 1) {
		p.trace.printf("wrong %s %s %d appended at %d", c.ID, c.Stream, c.N, at.Version) // the oracle will see
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

// append appends at exactly the version that the command wants.
func (p *producer) append(ctx context.Context, c command) (eventstore.Appended, error) {
	data, err := json.Marshal(c.event())
	if err != nil {
		return eventstore.Appended{}, err
	}
	return p.db.Append(ctx, c.Stream, eventstore.Expected(c.N-1), []eventstore.Draft{{ID: c.ID, Type: movedAs, Schema: 1, Data: data}})
}

// update is append through a repository.
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
