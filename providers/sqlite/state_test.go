package sqlite_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
)

func TestMarkersOfTheLiveGeneration(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	old := projector.Work{Projector: "totals", Marks: []marker.Key{{Handler: "totals/created", MessageID: "m1"}}}
	renamed := projector.Work{Projector: "totals", Marks: []marker.Key{
		{Handler: handler, Was: []string{"totals/made", "totals/created"}, MessageID: "m1"},
	}}
	require.NoError(t, db.Do(ctx, old, adds("p1")))
	require.NoError(t, db.Do(ctx, renamed, adds("p1")))
	require.Equal(t, 1, total(t, db.SQL(), "p1"), "a marker under an earlier name counts")
	outcomes := func() []projector.Outcome {
		o, err := db.Outcomes(ctx, renamed.Marks)
		require.NoError(t, err)
		return o
	}
	require.Equal(t, []projector.Outcome{projector.Applied}, outcomes())

	_, err := db.SQL().Exec(`insert into kinora_generations values ('totals', 2)`)
	require.NoError(t, err)
	require.Equal(t, []projector.Outcome{projector.Unseen}, outcomes())
	for range 2 {
		require.NoError(t, db.Do(ctx, renamed, adds("p1")))
	}
	require.Equal(t, 2, total(t, db.SQL(), "p1"), "another build of the read model starts afresh")
	require.Equal(t, []projector.Outcome{projector.Applied}, outcomes())
}

func TestOutcomesOfParkedMessages(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	park := func(p projector.Parked) {
		require.NoError(t, db.Do(ctx, projector.Work{Projector: p.Projector, Park: []projector.Parked{p}}, nil))
	}
	park(projector.Parked{Projector: "totals", Handler: handler, MessageID: "at the handler"})
	park(projector.Parked{Projector: "totals", Handler: "totals/created", MessageID: "at its old name"})
	park(projector.Parked{Projector: "totals", MessageID: "before any handler"})
	park(projector.Parked{Projector: "others", MessageID: "elsewhere"})
	park(projector.Parked{Projector: "totals", Handler: handler, MessageID: "parked, then applied"})
	require.NoError(t, db.Do(ctx, marks("parked, then applied"), adds("p1")))

	var keys []marker.Key
	for _, id := range []string{"at the handler", "at its old name", "before any handler", "elsewhere", "parked, then applied", "unknown"} {
		keys = append(keys, marker.Key{Handler: handler, Was: []string{"totals/created"}, MessageID: id})
	}
	got, err := db.Outcomes(ctx, keys)
	require.NoError(t, err)
	require.Equal(t, []projector.Outcome{
		projector.IsParked, projector.IsParked, projector.IsParked, projector.Unseen, projector.Applied, projector.Unseen,
	}, got)
}

// Waiting for a message costs the same however many are parked.
func TestOutcomePlan(t *testing.T) {
	t.Parallel()
	db, tr := traced(t, 1, nil)
	statements := tr.during(func() {
		_, err := db.Outcomes(context.Background(), marks("m1").Marks)
		require.NoError(t, err)
	})
	require.Len(t, statements, 1)
	lines := plan(t, db.SQL(), statements[0])
	require.Contains(t, lines, "SEARCH kinora_markers USING PRIMARY KEY (handler=? AND generation=? AND message_id=?)")
	require.Contains(t, lines, "SEARCH kinora_parked USING INDEX kinora_parked_message (message_id=?)")
}

// What is wrong with a message must not keep it from being set aside.
func TestAnythingCanBeParked(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	bad := "\x00\xff'; drop table kinora_parked; --" + strings.Repeat("long", 1000)
	p := projector.Parked{
		Projector: "totals", MessageID: bad, Topic: bad, Key: bad, Type: bad, Version: bad, Holds: true, Payload: []byte(bad),
		Headers: map[string]string{"valid": "\x00 é ' ☂"}, Class: projector.PermanentClass, Code: "malformed", Attempts: 1,
	}
	require.NoError(t, db.Do(context.Background(), projector.Work{Projector: "totals", Park: []projector.Parked{p}}, nil))
	got, err := db.ParkedMessages(context.Background(), projector.ParkedFilter{Projector: "totals"})
	require.NoError(t, err)
	require.Len(t, got, 1)
	require.False(t, got[0].At.IsZero())
	p.Seq, p.At = 1, got[0].At
	require.Equal(t, p, got[0])
}
