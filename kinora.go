// Package kinora starts and stops the services of an event-sourced application in order.
//
// The parts are in other packages:
//
//   - eventstore: events in streams.
//   - outbox: messages that commit with the events, and the relay that publishes them.
//   - projector: read models to which each event is applied exactly once.
//   - providers: the databases.
//
// Start starts runners and relays. docs/guarantees.md states what each of them guarantees.
package kinora

import (
	"context"
	"errors"
	"sync"
)

// Service is a relay, a runner, or another long-running part of a program.
type Service interface {
	// Run blocks until ctx ends, then finishes its work in flight and returns nil. It returns an
	// error if it fails, before or after that.
	Run(ctx context.Context) error
	// Running returns a channel that is closed once Run has started its work.
	Running() <-chan struct{}
}

// Group is a set of started services.
type Group struct {
	started []*started
	ended   chan struct{} // closed once a service has ended by itself
	first   sync.Once     // closes ended
	stop    sync.Once
	err     error // set by Stop
}

type started struct {
	stop context.CancelFunc
	done chan struct{}
	err  error
}

// Start starts services in order, each one after the one before it is running. Pass consumers
// first and the relay last, so that nothing is published before there is a subscriber.
//   - If a service fails, or ctx ends before all are running, Start stops the services that it
//     has started, and returns the error.
//   - Start compares what relays publish with what runners subscribe to. ErrNoRoute: a relay's store has
//     no Route, and a runner subscribes to the topics of its publisher. Warnings list categories that are
//     routed to topics and that no projector takes, and subscribed topics that nothing is routed to.
//   - The services see the values of ctx. Its end does not stop them: call Stop.
func Start(ctx context.Context, services ...Service) (*Group, error) {
	g, err := start(ctx, services...)
	if g == nil && err == nil {
		return nil, ctx.Err()
	}
	return g, err
}

// start does what Start does. If ctx ends, it returns no group, and an error only if stopping failed.
func start(ctx context.Context, services ...Service) (*Group, error) {
	g := &Group{ended: make(chan struct{})}
	if err := checkWiring(ctx, services); err != nil {
		return nil, err
	}
	for _, s := range services {
		if s == nil {
			return nil, errors.Join(errors.New("start: a service is nil: leave it out"), g.Stop())
		}
		sctx, stop := context.WithCancel(context.WithoutCancel(ctx))
		one := &started{stop: stop, done: make(chan struct{})}
		g.started = append(g.started, one)
		go func() {
			defer close(one.done)
			one.err = s.Run(sctx)
			if sctx.Err() == nil {
				g.first.Do(func() { close(g.ended) })
			}
		}()
		select {
		case <-s.Running():
		case <-one.done:
			if one.err != nil {
				return nil, g.Stop()
			}
		case <-ctx.Done():
			return nil, g.Stop()
		}
	}
	return g, nil
}

// Ended returns a channel that is closed once a service has ended by itself. Then Stop returns its error.
func (g *Group) Ended() <-chan struct{} { return g.ended }

// Stop stops the services in reverse order, each one after the one started later has drained, so that nothing is published
// to a subscriber that has stopped. It returns the joined errors of all services. A second call returns the same.
func (g *Group) Stop() error {
	g.stop.Do(func() {
		for i := len(g.started) - 1; i >= 0; i-- {
			one := g.started[i]
			one.stop()
			<-one.done
			g.err = errors.Join(g.err, one.err)
		}
	})
	return g.err
}

// Run calls Start, waits until ctx or any service ends, and calls Stop. The end of ctx is a clean stop.
func Run(ctx context.Context, services ...Service) error {
	g, err := start(ctx, services...)
	if err != nil {
		return err
	}
	if g == nil {
		return nil
	}
	select {
	case <-ctx.Done():
	case <-g.Ended():
	}
	return g.Stop()
}
