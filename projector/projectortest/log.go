package projectortest

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// fixedLog is a log that shows the events of a test with the same times in every pass.
type fixedLog struct {
	provider.Log
	times  map[string]time.Time // by event id
	record *record
}

func (l *fixedLog) fix(events []eventstore.Raw) []eventstore.Raw {
	events = slices.Clone(events)
	for i := range events {
		if at, ok := l.times[events[i].ID]; ok {
			events[i].RecordedAt = at
		}
	}
	return events
}

// LogPage implements provider.Log.
func (l *fixedLog) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	page, err := l.Log.LogPage(ctx, q)
	page.Events = l.fix(page.Events)
	return page, err
}

// LogStreams implements provider.Log.
func (l *fixedLog) LogStreams(ctx context.Context, versions map[string]int64, after int64) ([]eventstore.Raw, error) {
	events, err := l.Log.LogStreams(ctx, versions, after)
	return l.fix(events), err
}

// Appended implements provider.LogWaker, also for a Store of several parts, which hides the capability. Events are
// appended by the kit and by handlers.
func (l *fixedLog) Appended() <-chan struct{} {
	_, _, changed := l.record.is("")
	return changed
}

// ReadyFor implements provider.ReadyChecker.
func (l *fixedLog) ReadyFor(ctx context.Context, s provider.Service) error {
	if c, ok := l.Log.(provider.ReadyChecker); ok {
		return c.ReadyFor(ctx, s)
	}
	return nil
}
