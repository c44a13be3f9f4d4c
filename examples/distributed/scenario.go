package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/outbox"
)

// scenario appends events while relays and runners are killed, messages are published and delivered
// again, and the broker is away.
type scenario struct {
	*processes
	*ledger
	options
	accounts int
	services int                         // relays, and as many runners
	outage   func(context.Context) error // restarts the broker or one of its servers; nil means none
	out      io.Writer

	relays, runners []*process
}

// phases is the number of phases of a scenario. Each appends a share of the events.
const phases = 10

// run appends about so many events, and waits until both read models have all of them.
func (s *scenario) run(ctx context.Context, events int) error {
	b, err := brokers.Open(brokers.Config{Address: s.broker, Takeover: s.takeover})
	if err != nil {
		return err
	}
	if err := b.Prepare(ctx, topic); err != nil {
		return err
	}
	for range s.services { // runners first: a broker may keep nothing for a group that does not exist
		if err := s.add(ctx, runnerRole, &s.runners); err != nil {
			return err
		}
	}
	for range s.services {
		if err := s.add(ctx, relayRole, &s.relays); err != nil {
			return err
		}
	}
	for phase := range phases {
		if err := s.appendTo(ctx, s.accounts, max(events/phases/s.accounts, 1)); err != nil {
			return err
		}
		if err := s.disturb(ctx, phase, b); err != nil {
			return err
		}
	}
	return s.await(ctx)
}

// disturb does what a phase is for. The services are busy with the events of the phase.
func (s *scenario) disturb(ctx context.Context, phase int, b brokers.Broker) error {
	switch phase {
	case 1, 6:
		return s.replace(ctx, relayRole, s.relays)
	case 2, 7:
		return s.replace(ctx, runnerRole, s.runners)
	case 3, 8:
		if s.outage == nil {
			return nil
		}
		say(s.out, "the broker fails and comes back")
		return s.outage(ctx)
	case 4:
		n, err := republish(ctx, s.ledger, b)
		say(s.out, "%d messages are published again", n)
		return err
	}
	return nil
}

// add starts a relay or runner.
func (s *scenario) add(ctx context.Context, role string, all *[]*process) error {
	p, err := s.start(ctx, role, s.args()...)
	*all = append(*all, p)
	return err
}

// replace kills a relay or runner and starts another one.
func (s *scenario) replace(ctx context.Context, role string, all []*process) (err error) {
	i := s.started[role] % len(all)
	if role == relayRole {
		if i, err = s.claiming(ctx, all); err != nil {
			return err
		}
	}
	say(s.out, "a %s is killed, and another one started", role)
	all[i].kill()
	all[i], err = s.start(ctx, role, s.args()...)
	return err
}

// claiming returns a relay that has claimed entries and is suspended, so that it keeps them. If all
// entries are published, it appends more events.
func (s *scenario) claiming(ctx context.Context, all []*process) (int, error) {
	for {
		open, err := s.db.Entries(ctx, outbox.Filter{Status: []outbox.Status{outbox.Claimed, outbox.Pending, outbox.Failed}, Limit: 1})
		if err != nil {
			return 0, err
		}
		if len(open) == 0 {
			if err := s.appendTo(ctx, s.accounts, 2); err != nil {
				return 0, err
			}
		}
		entries, err := s.db.Entries(ctx, outbox.Filter{Status: []outbox.Status{outbox.Claimed}, Limit: 1})
		if err != nil {
			return 0, err
		}
		if len(entries) == 0 {
			time.Sleep(time.Millisecond)
			continue
		}
		for i, p := range all {
			if !strings.HasSuffix(entries[0].ClaimedBy, fmt.Sprintf("/%d", p.cmd.Process.Pid)) {
				continue
			}
			p.signal(syscall.SIGSTOP)
			time.Sleep(50 * time.Millisecond) // a statement of this relay that has been sent begins meanwhile
			if err := s.awaitIdle(ctx, p); err != nil {
				return 0, err
			}
			left, err := s.db.Entries(ctx, outbox.Filter{Status: []outbox.Status{outbox.Claimed}, Seqs: []int64{entries[0].Seq}})
			if err != nil || len(left) == 1 && left[0].Token == entries[0].Token {
				return i, err
			}
			p.signal(syscall.SIGCONT)
		}
	}
}

// awaitIdle waits until the database executes no statement of a process.
func (s *scenario) awaitIdle(ctx context.Context, p *process) error {
	for {
		var active bool
		err := s.db.Pool().QueryRow(ctx, `select exists (select from pg_stat_activity
			where application_name = $1 and state = 'active' and wait_event is distinct from 'ClientWrite')`, p.name).Scan(&active)
		if err != nil || !active {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// republish publishes the oldest 100 messages again that were published before.
func republish(ctx context.Context, l *ledger, b brokers.Broker) (n int, err error) {
	entries, err := l.db.Entries(ctx, outbox.Filter{Status: []outbox.Status{outbox.Published}})
	if err != nil {
		return 0, err
	}
	p, err := b.Publisher()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	var again []*message.Message
	for _, e := range entries {
		again = append(again, outbox.ToWatermill(e))
	}
	for {
		err := p.Publish(topic, again...)
		if err == nil || ctx.Err() != nil {
			return len(again), err
		}
		time.Sleep(100 * time.Millisecond) // the broker may be away
	}
}

// await waits until both read models have as many events as the ledger.
func (s *scenario) await(ctx context.Context) error {
	for {
		done := 0
		var last string
		for _, table := range []string{"deliveries", "balances"} {
			c, err := s.compare(ctx, table)
			if err != nil {
				return err
			}
			if c.applied >= s.events {
				done++
			}
			last += fmt.Sprintf("; %s has %d of %d events", table, c.applied, s.events)
		}
		if done == 2 {
			return nil
		}
		for _, p := range append(append([]*process{}, s.relays...), s.runners...) {
			if p.ended() {
				return fmt.Errorf("a %s ended: %w", p.role, errors.Join(p.err, errors.New("see its log")))
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not all events are applied: %w%s", ctx.Err(), last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// options are the flags of relays and runners.
type options struct {
	dsn, broker string
	takeover    time.Duration
	redeliver   int
}

func (o options) args() []string {
	return []string{"-db", o.dsn, "-broker", o.broker, "-takeover", o.takeover.String(), "-redeliver", strconv.Itoa(o.redeliver)}
}
