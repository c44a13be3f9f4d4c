package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// lease is how long the work of a relay or runner that was killed waits for another one. It is short
// so that a kill is over soon. The defaults of Kinora and of package brokers are longer.
const lease = 2 * time.Second

// drain is how long a service may work on after it was told to end. Zero means Kinora's default; tests set it, for slow machines.
var drain time.Duration

// openDB opens the database. Each event is published to the topic of its category.
func openDB(ctx context.Context, dsn string) (*postgres.DB, error) {
	return postgres.Open(ctx, dsn, &postgres.Config{Route: outbox.ByCategory})
}

// newRelay returns a relay. It prints a word for each entry that it takes over from another relay.
func newRelay(db *postgres.DB, p message.Publisher, holder string, log *slog.Logger, out io.Writer) (*outbox.Relay, error) {
	return outbox.NewRelay(db, p, &outbox.RelayConfig{
		Lease:            lease,
		Drain:            drain,
		Poll:             100 * time.Millisecond,
		OrderedPublisher: true, // true for all publishers of package brokers
		Keep:             outbox.EntryRetention{Published: time.Hour},
		// While a cluster of brokers changes its leader, some messages fail and others pass. With the
		// default their keys would wait for 30 seconds.
		Backoff: claim.Backoff{Base: 250 * time.Millisecond, Max: time.Minute, Attempts: 20},
		Holder:  holder, Logger: log,
		Observer: outbox.RelayObserver{Claimed: func(entries []outbox.Entry, _ time.Duration, _ error) {
			for _, e := range entries {
				if e.Suspect {
					say(out, takenOver)
				}
			}
		}},
	})
}

// each returns a source in which each projector has its own consumer group.
func each(b brokers.Broker, redeliver int) projector.Source {
	return projector.SubscribeEach(func(name string) (message.Subscriber, error) {
		sub, err := b.Subscriber(name)
		return redelivering{sub, redeliver}, err
	}, topic)
}

// newRunner returns a runner of both projectors. It prints a word for each delivery that was applied
// before, and for each event that came from the log.
func newRunner(db *postgres.DB, from projector.Source, log *slog.Logger, out io.Writer) (*projector.Runner, error) {
	return projector.NewRunner(db, from, projector.RunnerConfig{
		Lease: lease, Drain: drain, Logger: log,
		Grace: 2 * lease, // more than a takeover takes
		Observer: projector.RunnerObserver{
			Handled: func(_ string, skipped bool, _, _ time.Duration, _ error) {
				if skipped {
					say(out, skippedTwice)
				}
			},
			Completed: func(string, string) { say(out, fromLog) },
		},
	}, deliveries, balances)
}

// Words that a process prints.
const (
	isReady      = "ready"
	takenOver    = "taken over" // an entry whose relay was killed
	skippedTwice = "skipped"    // a delivery whose marker existed
	fromLog      = "from the log"
)

// say prints a line. Its error does not matter: the reader is a test, a person or the parent.
func say(out io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(out, format+"\n", args...) }

// serve runs a relay or a runner until ctx ends.
func serve(ctx context.Context, role string, o options, out io.Writer) (err error) {
	db, err := openDB(ctx, o.dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	log := slog.Default()
	b, err := brokers.Open(brokers.Config{Address: o.broker, Takeover: o.takeover, Logger: log})
	if err != nil {
		return err
	}
	var service kinora.Service
	if role == relayRole {
		p, err := b.Publisher()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Close()) }() // after the relay has ended
		service, err = newRelay(db, p, "", log, out)
		if err != nil {
			return err
		}
	} else if service, err = newRunner(db, each(b, o.redeliver), log, out); err != nil {
		return err
	}
	group, err := kinora.Start(ctx, service)
	if err != nil {
		return err
	}
	say(out, isReady)
	select {
	case <-ctx.Done():
	case <-group.Ended():
	}
	return group.Stop()
}
