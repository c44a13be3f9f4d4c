package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// asked is a store that calls then after the first question about many events of the live generation.
type asked struct {
	unit
	then func()
}

func (a *asked) Unapplied(ctx context.Context, b provider.Build, messages []provider.Message) ([]bool, error) {
	is, err := a.unit.Unapplied(ctx, b, messages)
	if then := a.then; b.Number() == 1 && len(messages) == 1000 && then != nil {
		a.then = nil
		then()
	}
	return is, err
}

// The new generation has many events to apply above the live checkpoint. The live one applies two
// events of a stream after the new one has asked for the first of them, and before it asks for the
// second.
// Promise: R1.1
func TestARebuildKeepsTheOrderOfStreamsNextToTheLiveGeneration(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		store := &asked{unit: db}
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, store, projector.Subscribe(f, "review"), projector.RunnerConfig{Grace: time.Hour, Log: db}, p)
		stop := start(t, r)
		time.Sleep(time.Minute)
		require.Equal(t, provider.ModeLive, checkpoint(t, db).Mode)
		write(t, db, "k-1", 1)
		write(t, db, "k-2", upTo(1200)...)
		write(t, db, "k-1", 2)
		f.deliver(t, publishedAfter(t, db, "k-2", 0)...)
		asked := false
		store.then = func() {
			asked = true
			f.deliver(t, publishedAfter(t, db, "k-1", 0)...)
		}
		require.NoError(t, rebuild(t, r, request(projector.BlueGreen)))
		require.True(t, asked)
		require.Equal(t, upTo(2), noted(db, "notes_g1", "k-1"))
		require.Equal(t, upTo(2), noted(db, "notes_g2", "k-1"))
		require.Equal(t, upTo(1200), noted(db, "notes", "k-2"))
		require.NoError(t, stop())
	})
}
