// Package kinora starts and stops the services of an event-sourced application in order.
//
// The parts are in the packages below: events in streams (eventstore), messages beside them and the relay
// that publishes them (outbox), read models that see each event exactly once (projector), and the databases
// (providers). Start starts relays and runners; what each promises is in docs/guarantees.md.
package kinora

import (
	"context"
	"errors"
	"sync"
)

// Service is a relay, a runner, or anything that blocks in Run until its ctx ends, then drains and returns.
type Service interface {
	Run(ctx context.Context) error
	Running() <-chan struct{} // closed once Run works
}

// Group is a set of started services.
type Group struct {
	started []*started
	ended   chan struct{} // closed once a service has ended that nobody stopped
	first   sync.Once     // to close it
	once    sync.Once
	err     error
}

type started struct {
	stop context.CancelFunc
	done chan struct{}
	err  error
}

// Start starts services in order, each once the one before it is running. Name consumers first and the relay
// last, so that nothing is published before somebody listens. If one fails, or ctx ends meanwhile, those
// before it are stopped and the error is returned. The values of ctx live on in the services; its end does not
// stop them: Stop does.
func Start(ctx context.Context, services ...Service) (*Group, error) {
	g, err := start(ctx, services...)
	if g == nil && err == nil {
		return nil, ctx.Err()
	}
	return g, err
}

// start is Start, but for the end of ctx it returns neither a group nor an error, unless stopping made one.
func start(ctx context.Context, services ...Service) (*Group, error) {
	g := &Group{ended: make(chan struct{})}
	for _, s := range services {
		if s == nil {
			return nil, errors.Join(errors.New("start: a service is nil"), g.Stop())
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

// Ended is closed once a service has ended by itself. Stop then returns its error, which is nil where the service
// thought that it was done.
func (g *Group) Ended() <-chan struct{} { return g.ended }

// Stop stops in reverse order, each once the one after it has drained, so that nothing is published to a
// subscriber that has gone. It returns the joined errors of all services; a second call returns the same.
func (g *Group) Stop() error {
	g.once.Do(func() {
		for i := len(g.started) - 1; i >= 0; i-- {
			one := g.started[i]
			one.stop()
			<-one.done
			g.err = errors.Join(g.err, one.err)
		}
	})
	return g.err
}

// Run is Start, waiting for the end of ctx or of any service, and Stop. The end of ctx is a clean stop, also
// while services start.
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
