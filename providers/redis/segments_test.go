package redis_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// The positions of segments are next to the read model, and go back with it. Redis is killed while three
// runners share segments, and starts again with an old snapshot, or empty. The log brings back what was
// lost, each event once.
// Promise: G7.8
func TestSegmentsGoBackWithTheReadModel(t *testing.T) {
	t.Parallel()
	for name, snapshot := range map[string]bool{"old snapshot": true, "empty": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 12
			server := redistest.Private(t)
			s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
			w, p := newWriter(t, db), define(projector.Options{Segments: 4}, s.list)
			u := provider.Combine(s.own(t), db)
			for range 3 {
				fromLog(t, u, db, projector.RunnerConfig{Lease: time.Second, Batch: 5}, p)
			}
			write := func(count int) {
				require.NoError(t, p.Wait(t.Context(), projector.StateOf(u, db), w.write(count, streams(n)...)))
			}
			has := func(count int) func() bool {
				return func() bool {
					return !slices.ContainsFunc(streams(n), func(name string) bool { return len(s.listed(t, name)) < count })
				}
			}
			write(20)
			eventually(t, "it is split", func() bool {
				c, err := u.Checkpoint(t.Context(), provider.Build{Projector: "stars"})
				return err == nil && c.Split().Count == 4 && len(c.Segments) == 4
			})
			if snapshot {
				require.NoError(t, s.client.Save(t.Context()).Err())
			}
			write(15)
			eventually(t, "all is applied", has(35))
			require.NoError(t, server.End("KILL"))
			require.NoError(t, server.Begin())
			eventually(t, "what was lost is there again", has(35))
			write(10)
			eventually(t, "all is applied again", has(45))
			s.requireLists(t, w.n)
			eventually(t, "it is split again, and the checkpoint is at the end", func() bool {
				c, err := u.Checkpoint(t.Context(), provider.Build{Projector: "stars"})
				head, _ := db.LogPosition(t.Context(), eventstore.From{Now: true})
				return err == nil && c.Split().Count == 4 && c.Place.Position == head
			})
			s.requireLists(t, w.n)
		})
	}
}

// Without OwnMarkers, the positions of segments are in the second store. Nothing is lost or doubled while the
// processes run, also if the number of segments changes.
func TestSegmentsWithoutOwnMarkers(t *testing.T) {
	t.Parallel()
	const n = 12
	s, db := sharedSpace(t), newRouted(t)
	w, u := newWriter(t, db), provider.Combine(s.units(t), db)
	var stops []func()
	for _, count := range []int{4, 3} {
		w.write(20, streams(n)...)
		p := define(projector.Options{Segments: count}, s.list)
		for _, stop := range stops {
			stop()
		}
		stops = nil
		for range 2 {
			stops = append(stops, fromLog(t, u, db, projector.RunnerConfig{Lease: time.Second, Batch: 5}, p))
		}
		at := w.write(20, streams(n)...)
		require.NoError(t, p.Wait(t.Context(), projector.StateOf(u, db), at))
		eventually(t, "it is split", func() bool {
			c, err := u.Checkpoint(t.Context(), provider.Build{Projector: "stars"})
			return err == nil && c.Split().Count == count && c.Place.Position == at.Position
		})
		s.requireLists(t, w.n)
	}
}
