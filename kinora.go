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
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
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

// ErrNoRoute: a relay has a store without a Route, so nothing is published to a topic that a runner
// started with it subscribes to. Start returns it before any service runs.
var ErrNoRoute = errors.New("events of this store are not published: its Config has no Route: set outbox.ByCategory, " +
	"or the Route of the processes that append, or let the runner read FromLog")

// wiring is how services started together are connected.
type wiring struct {
	relays  []provider.RelayWiring
	runners []provider.RunnerWiring
}

// checkWiring returns ErrNoRoute, or warns of what is not connected.
func checkWiring(ctx context.Context, services []Service) error {
	var w wiring
	for _, s := range services {
		switch s := s.(type) {
		case interface{ Wiring() provider.RelayWiring }:
			w.relays = append(w.relays, s.Wiring())
		case interface{ Wiring() provider.RunnerWiring }:
			w.runners = append(w.runners, s.Wiring())
		}
	}
	if len(w.relays) == 0 || len(w.runners) == 0 {
		return nil
	}
	for _, runner := range w.runners {
		missing, err := w.withoutRoute(ctx, runner)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			runner.Logger.Warn("nothing is routed to topics that this runner subscribes to: compare them with the Route of the store. "+
				"Ignore this if another process publishes to them", "topics", missing)
		}
	}
	for _, relay := range w.relays {
		if untaken := w.untaken(relay); len(untaken) > 0 {
			relay.Logger.Warn("events of these categories are published, but no projector started with this relay takes them from their "+
				"topics. Ignore this if another process does", "categories", untaken)
		}
	}
	return nil
}

// withoutRoute returns the topics of a runner that nothing is routed to. Only topics of these are
// looked at:
//   - The runner has no Decoder, and no service has OnEmit: their messages have any topics.
//   - The runner subscribes to what a relay publishes, as far as this process knows it: the
//     subscriber is the publisher, or a repository appends events that the projectors take.
func (w wiring) withoutRoute(ctx context.Context, runner provider.RunnerWiring) (missing []string, err error) {
	if runner.Decodes || slices.ContainsFunc(w.runners, func(r provider.RunnerWiring) bool { return r.Emits }) {
		return nil, nil
	}
	for _, topic := range runner.Topics {
		is := unknown
		for _, relay := range w.relays {
			is = max(is, routed(ctx, relay, runner, topic))
		}
		switch is {
		case never:
			return nil, fmt.Errorf("start: topic %q: %w", topic, ErrNoRoute)
		case no:
			missing = append(missing, topic)
		}
	}
	return missing, nil
}

// routing says whether a relay publishes to a topic. Of several relays the greatest one counts.
type routing int

const (
	unknown routing = iota
	no
	never // and the runner requires it: the store has no route
	yes
)

func routed(ctx context.Context, relay provider.RelayWiring, runner provider.RunnerWiring, topic string) routing {
	routes := provider.RoutesOf(relay.Store)
	if routes == nil || isPattern(topic) {
		return unknown
	}
	categories := routes.Categories()
	isPublishers, takesOwn := isSame(relay.Publisher, runner.Subscriber), false
	for category, types := range categories {
		topics, ok := routes.TopicsOf(category)
		switch {
		case !ok:
			return unknown
		case slices.Contains(topics, topic):
			return yes
		case intersect(types, runner.Takes):
			takesOwn, isPublishers = true, isPublishers || category == topic
		}
	}
	canTell := takesOwn || isPublishers && (len(categories) > 0 || !routes.HasRoute())
	switch {
	case !canTell || hasEntries(ctx, relay.Store, topic):
		return unknown
	case isPublishers && !routes.HasRoute():
		return never
	}
	return no
}

// hasEntries reports whether the outbox has entries of a topic, or cannot be read.
func hasEntries(ctx context.Context, store provider.Outbox, topic string) bool {
	s, ok := store.(outbox.Inspector)
	if !ok {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	found, err := s.Entries(ctx, provider.EntryFilter{Topic: topic, Limit: 1})
	return err != nil || len(found) > 0
}

// untaken returns the categories with a route of a relay's store whose events no runner takes.
func (w wiring) untaken(relay provider.RelayWiring) (categories []string) {
	routes := provider.RoutesOf(relay.Store)
	if routes == nil || !routes.HasRoute() {
		return nil
	}
	for category, types := range routes.Categories() {
		topics, _ := routes.TopicsOf(category)
		topics = slices.DeleteFunc(topics, func(topic string) bool { return relay.Topics != nil && !slices.Contains(relay.Topics, topic) })
		isTaken := slices.ContainsFunc(w.runners, func(r provider.RunnerWiring) bool {
			if !intersect(types, r.Takes) {
				return false
			}
			return r.FromLog || r.Topics == nil || intersect(topics, r.Topics) || slices.ContainsFunc(r.Topics, isPattern)
		})
		if len(topics) > 0 && !isTaken {
			categories = append(categories, category)
		}
	}
	slices.Sort(categories)
	return categories
}

// isPattern reports whether a subscribed topic may stand for several, in the way of some broker.
func isPattern(topic string) bool { return strings.ContainsAny(topic, "*#>^+") }

func intersect(a, b []string) bool {
	return slices.ContainsFunc(a, func(s string) bool { return slices.Contains(b, s) })
}

// isSame reports whether a publisher is also the subscriber.
func isSame(a, b any) bool {
	return a != nil && b != nil && reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}
