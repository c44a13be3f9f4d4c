package main

import (
	"context"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// lease is how long a killed process keeps its work from the others: a relay its entries, and a
// runner the log. It is long enough to publish a batch of 50 in-process.
const lease = 5 * time.Second

// pipelineFlags configure the pipeline from the events to the read models.
type pipelineFlags struct {
	Broker   string `enum:"none,memory,sql,nats,redis,kafka" default:"none" help:"How events reach the read models: none, from the event log; memory, through a broker in this process; sql, through topics in the same PostgreSQL database; nats, redis or kafka, through the server at --broker-url."`
	Pipeline bool   `default:"true" negatable:"" help:"Update the read models in this process. With --no-pipeline 'reviews project' does it in other processes, and with a broker also 'reviews relay'."`

	brokerURL `embed:""`
}

// check checks the flags before anything is opened.
func (f pipelineFlags) check(d database) error {
	if !f.Pipeline && f.Broker == memoryKind {
		return errors.New("--no-pipeline requires events that other processes can reach: use another --broker")
	}
	return f.at(f.Broker).check(d)
}

// pipeline carries events to the read models.
type pipeline struct {
	*kinora.Group
	broker broker // nil without a broker
}

// start starts more services, the runner, and with a broker the relay. With --no-pipeline it starts
// only the first ones. Stop the pipeline before the store is closed.
func (f pipelineFlags) start(ctx context.Context, d database, s serviceStore, more ...kinora.Service) (*pipeline, error) {
	if err := f.check(d); err != nil {
		return nil, err
	}
	p := &pipeline{}
	services, err := p.services(ctx, f, d, s)
	if err == nil {
		p.Group, err = kinora.Start(ctx, append(more, services...)...)
	}
	if err != nil {
		return nil, errors.Join(err, p.closeBroker())
	}
	return p, nil
}

// services returns the services of the pipeline in the order of their start.
func (p *pipeline) services(ctx context.Context, f pipelineFlags, d database, s serviceStore) ([]kinora.Service, error) {
	if !f.Pipeline {
		return nil, nil
	}
	if f.Broker == noneKind {
		runner, err := s.runner(fromLog(s))
		return []kinora.Service{runner}, err
	}
	b, err := f.at(f.Broker).open(ctx, d, 1, review.Category)
	if err != nil {
		return nil, err
	}
	p.broker = b
	runner, err1 := s.runner(projector.Subscribe(b, review.Category))
	relay, err2 := newRelay(s, b)
	// The relay comes last: it must not publish before the runner subscribes.
	return []kinora.Service{runner, relay}, errors.Join(err1, err2)
}

// fromLog returns the source of a runner without a broker. With the category, events of types that
// this program does not know are parked, as over a broker.
func fromLog(s provider.Log) projector.Source { return projector.FromLog(s, review.Category) }

// retention keeps published entries for people who look for them.
var retention = outbox.EntryRetention{Published: 24 * time.Hour}

// newRelay returns a relay to a broker that keeps the order of a batch. All brokers do: one takes
// a batch in one statement, the others take one message after another.
func newRelay(s provider.Outbox, to message.Publisher) (*outbox.Relay, error) {
	return outbox.NewRelay(s, to, &outbox.RelayConfig{
		Lease: lease, OrderedPublisher: true,
		Keep: retention,
		Poll: 50 * time.Millisecond, // appends of another process do not wake the relay
	})
}

// Stop drains and stops the pipeline, and returns its error.
func (p *pipeline) Stop() error { return errors.Join(p.Group.Stop(), p.closeBroker()) }

func (p *pipeline) closeBroker() error {
	if p.broker == nil {
		return nil
	}
	return p.broker.Close()
}
