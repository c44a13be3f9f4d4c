package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// demo is a service that has outgrown one database, with three PostgreSQL servers:
//
//	one:    store1
//	two:    store2, topics (the broker), later store3
//	models: totals, charts, billing, directory
//
// A real service uses another broker: see docs/brokers.md.
type demo struct {
	ledger
	fleet          *fleet
	one, two, read *server
	totals, charts *model
	billing        *postgres.DB
	services       *kinora.Group
	closers        []func() error
	out            io.Writer
	logger         *slog.Logger
}

// newDemo starts the servers, and creates the databases.
func newDemo(ctx context.Context, logger *slog.Logger, out io.Writer) (_ *demo, err error) {
	d := &demo{ledger: ledger{ratings: map[product][]int64{}}, out: out, logger: logger}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	for _, s := range []**server{&d.one, &d.two, &d.read} {
		if *s, err = startServer(ctx, nil); err != nil {
			return nil, err
		}
		d.closers = append(d.closers, (*s).stop)
	}
	err = errors.Join(
		d.one.create(ctx, "store1", ""), d.two.create(ctx, "store2", ""), d.two.create(ctx, "topics", ""),
		d.read.create(ctx, "totals", totalsTable), d.read.create(ctx, "charts", chartsTable),
		d.read.create(ctx, "billing", billingTable), d.read.create(ctx, "directory", directoryTables))
	if err != nil {
		return nil, err
	}
	open := map[string]*postgres.DB{}
	for _, name := range []string{"totals", "charts", "billing", "directory"} {
		if open[name], err = d.read.open(ctx, name, nil); err != nil {
			return nil, err
		}
		d.closers = append(d.closers, func() error { open[name].Close(); return nil })
	}
	d.totals, d.charts, d.billing = newTotals(open["totals"]), newCharts(open["charts"]), open["billing"]
	list := &directory{pool: open["directory"].Pool()}
	d.fleet = newFleet(list, logger, d.totals, d.charts)
	return d, errors.Join(list.addStore(ctx, "store1", d.one.dsn("store1")), list.addStore(ctx, "store2", d.two.dsn("store2")))
}

// start starts the service, and the other one that gets its events from the broker.
func (d *demo) start(ctx context.Context) error {
	b, err := brokers.Open(brokers.Config{Address: d.two.dsn("topics"), Logger: d.logger})
	if err != nil {
		return err
	}
	if err := b.Prepare(ctx, category); err != nil {
		return err
	}
	if d.fleet.publisher, err = b.Publisher(); err != nil {
		return err
	}
	d.closers = append(d.closers, d.fleet.publisher.Close)
	other, err := projector.NewRunner(d.billing, projector.SubscribeEach(b.Subscriber, category),
		projector.RunnerConfig{Lease: lease, Logger: d.logger}, billing)
	if err != nil {
		return err
	}
	d.services, err = kinora.Start(ctx, other, d.fleet)
	return err
}

// whileRunning returns a context that ends once a service has ended by itself.
func (d *demo) whileRunning(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-d.services.Ended():
			cancel() // close returns why
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// run appends events in four phases. During each of them something happens.
func (d *demo) run(ctx context.Context, events int) error {
	tenants := []string{"t0", "t1", "t2", "t3", "t4", "t5"}
	for _, phase := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"two stores, two read models, and a service behind a broker", func(context.Context) error { return nil }},
		{"the server of store1 crashes", d.one.crash},
		{"store3 is added", d.grow},
		{"the server of the read models crashes", d.read.crash},
	} {
		d.say("%s", phase.what)
		over, end := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- d.append(ctx, events/4, tenants, over.Done()) }()
		err := phase.do(ctx)
		end()
		if err = errors.Join(err, <-done); err != nil {
			return err
		}
		if phase.what == "store3 is added" {
			tenants = append(tenants, "t6", "t7")
		}
	}
	return nil
}

// append appends events for some tenants, each from a goroutine of its own: at least a number of
// events, and then fewer a second until over is closed.
func (d *demo) append(ctx context.Context, events int, tenants []string, over <-chan struct{}) error {
	for _, tenant := range tenants { // one after the other, so that the stores get the same number
		err := patiently(ctx, func() error { _, err := d.fleet.directory.storeOf(ctx, tenant); return err })
		if err != nil {
			return err
		}
	}
	done := make(chan error, len(tenants))
	for _, tenant := range tenants {
		go func() {
			for n := 0; ; n += 2 {
				if n >= events/len(tenants) {
					select {
					case <-over:
						done <- nil
						return
					case <-time.After(20 * time.Millisecond):
					}
				}
				p := product{tenant, fmt.Sprint("p", n%3)}
				if _, err := d.rate(ctx, d.fleet, p, int64(1+n%5), int64(1+n%4)); err != nil {
					done <- err
					return
				}
			}
		}()
	}
	var err error
	for range tenants {
		err = errors.Join(err, <-done)
	}
	return err
}

// grow adds a store while everything runs. The next new tenants are placed in it, because it has none.
func (d *demo) grow(ctx context.Context) error {
	if err := d.two.create(ctx, "store3", ""); err != nil {
		return err
	}
	return d.fleet.directory.addStore(ctx, "store3", d.two.dsn("store3"))
}

// readOwn appends an event, and reads its effect from a standby of the read model.
func (d *demo) readOwn(ctx context.Context, replica *postgres.DB) error {
	p := product{"t0", "p0"}
	at, err := d.rate(ctx, d.fleet, p, 5)
	if err != nil {
		return err
	}
	if err := d.fleet.wait(ctx, d.totals, replica, p.tenant, at); err != nil {
		return err
	}
	var n int
	err = replica.Pool().QueryRow(ctx, `select ratings from totals where tenant = $1 and product = $2`, p.tenant, p.name).Scan(&n)
	if err != nil {
		return err
	}
	if want := len(d.ratings[p]); n != want {
		return fmt.Errorf("the standby shows %d ratings, and %d were appended", n, want)
	}
	d.say("the standby shows an event that was just appended")
	return nil
}

// settle waits until everything is applied.
func (d *demo) settle(ctx context.Context) error {
	for p, ratings := range d.ratings {
		s, err := d.fleet.of(ctx, p.tenant)
		if err != nil {
			return err
		}
		id, err := s.db.LogID(ctx)
		if err != nil {
			return err
		}
		// All events of the stream.
		at := eventstore.Appended{Stream: p.stream(), Version: int64(len(ratings)), Count: len(ratings), Log: id.Lineage}
		for _, m := range []*model{d.totals, d.charts} {
			if err := d.fleet.wait(ctx, m, m.db, p.tenant, at); err != nil {
				return err
			}
		}
		if err := patiently(ctx, func() error { return billing.Wait(ctx, projector.StateOf(d.billing, s.db), at) }); err != nil {
			return err
		}
	}
	return nil
}

// check stops the services, and compares the read models with what was appended.
func (d *demo) check(ctx context.Context) error {
	if err := d.stopServices(); err != nil {
		return err
	}
	wrong, err := d.differences(ctx, d.totals.db, d.charts.db, d.billing)
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %d differences, such as %s", errWrong, len(wrong), wrong[0])
	}
	d.say("totals, charts and billing are exact: %d events of %d streams, and %d appends that had to be tried again", d.events, len(d.ratings), d.failed.Load())
	return nil
}

var errWrong = errors.New("the read models are wrong")

func (d *demo) stopServices() (err error) {
	if d.services != nil {
		err = d.services.Stop()
	}
	return err
}

// close ends everything.
func (d *demo) close() error {
	err := d.stopServices()
	for i := len(d.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, d.closers[i]())
	}
	return err
}

func (d *demo) say(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format+"\n", args...) }
