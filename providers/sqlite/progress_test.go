package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

// placed returns a delivery of events at these positions.
func placed(positions ...int64) provider.Unit {
	ids := make([]string, len(positions))
	for i, position := range positions {
		ids[i] = fmt.Sprint("e-", position)
	}
	u := delivery(ids...)
	for i, position := range positions {
		u.Messages[i].Position = position
	}
	return u
}

// moving returns a unit of events that moves the checkpoint of totals from a position.
func moving(from, to int64, positions ...int64) provider.Unit {
	u := placed(positions...)
	u.Advance = &provider.Advance{From: from, To: provider.LogPlace{Position: to}, Mode: provider.ModeLive}
	return u
}

// live is a checkpoint of totals at a position.
func live(position int64) provider.Checkpoint {
	return provider.Checkpoint{Generation: 1, Place: provider.LogPlace{Position: position}, Mode: provider.ModeLive}
}

// Units with a checkpoint, and all that reads or changes it, use the indexes, and need no more
// statements for many events than for one.
func TestProgressPlans(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, nil)
	const (
		marked     = "SEARCH kinora_markers EXISTS USING PRIMARY KEY (handler=? AND generation=? AND message_id=?)"
		checkpoint = "SEARCH kinora_checkpoints USING PRIMARY KEY (projector=? AND generation=?)"
		segments   = "SEARCH kinora_segments USING PRIMARY KEY (projector=? AND generation=? AND segment<?)"
		applied    = "SEARCH kinora_markers USING COVERING INDEX kinora_markers_position (handler=? AND position<?)"
		byKey      = "SEARCH kinora_markers USING PRIMARY KEY (handler=? AND generation=? AND message_id=?)"
	)
	ok := func(_ any, err error) {
		t.Helper()
		require.NoError(t, err)
	}
	for _, c := range []struct {
		name  string
		run   func()
		plans [][]string // of the statements, in order; nil: not checked
	}{
		{"set the checkpoint", func() { ok(db.SetCheckpoint(ctx, totals, provider.Checkpoint{}, live(5))) }, [][]string{nil, {checkpoint}, nil, {segments}, nil}},
		{"deliver", func() { ok(nil, db.Do(ctx, placed(6, 7), nil0)) }, [][]string{nil, nil, {checkpoint}, {marked}, nil, nil}},
		{"deliver what the checkpoint covers", func() { ok(nil, db.Do(ctx, placed(4, 5), nil0)) }, [][]string{nil, nil, {checkpoint}, nil}},
		{"move", func() { ok(nil, db.Do(ctx, moving(5, 9, 8, 9), nil0)) }, [][]string{nil, nil, {checkpoint}, {marked}, {checkpoint}, nil}},
		{"move without messages", func() { ok(nil, db.Do(ctx, moving(9, 10), nil0)) }, [][]string{nil, nil, {checkpoint}, {checkpoint}, nil}},
		{"read the checkpoint", func() { ok(db.Checkpoint(ctx, totals)) }, [][]string{{checkpoint}}},
		{"unapplied", func() { ok(db.Unapplied(ctx, totals, placed(1, 6, 7, 8, 9, 10, 11).Messages)) }, [][]string{{marked}, {checkpoint}}},
		{"outcomes", func() {
			ok(db.Outcomes(ctx, []provider.Question{{Handler: handler, MessageID: "e-1", Position: 1}}))
		}, [][]string{{"SEARCH c USING PRIMARY KEY (projector=? AND generation=?)"}}},
		{"prune", func() {
			n, err := db.PruneApplied(ctx, totals, []string{handler}, 10)
			ok(nil, err)
			require.Equal(t, 2, n)
		}, [][]string{{applied, checkpoint}, nil, {applied, checkpoint, byKey}, nil}},
		{"nothing to prune", func() { ok(db.PruneApplied(ctx, totals, []string{handler}, 10)) }, [][]string{nil}},
		{"lease", func() {
			ok(db.AcquireLease(ctx, "reader", claim.Terms{Token: claim.NewToken(), Lease: time.Minute}))
			ok(nil, db.ReleaseLease(ctx, "reader", claim.NewToken()))
		}, [][]string{nil, nil, nil, nil, nil, {"SEARCH kinora_leases USING PRIMARY KEY (name=?)"}, nil}},
	} {
		requirePlans(t, db, c.name, tr.during(c.run), c.plans)
	}
}

func nil0(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
	return provider.Closing{}, nil
}

// Two processes have a file. A reader in one moves the checkpoint and prunes between the opening
// and the commit of a redelivery in the other: transactions of this package are immediate, so the
// move waits, and the event takes effect once. A deferred transaction would fail with
// SQLITE_BUSY_SNAPSHOT.
// Promise: G4.7
func TestMoveWaitsForRedelivery(t *testing.T) {
	t.Parallel()
	ctx := patience.Context(t)
	path := migrated(t)
	one, other := openAt(t, path, nil), openAt(t, path, nil)
	set, err := one.SetCheckpoint(ctx, totals, provider.Checkpoint{}, live(0))
	require.NoError(t, err)
	require.True(t, set)
	require.NoError(t, one.Do(ctx, placed(1), adds("k")))

	moved := make(chan error, 1)
	err = one.Do(ctx, placed(1, 2), func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error) {
		require.Equal(t, [][]bool{{false}, {true}}, found.Fresh)
		go func() {
			err := other.Do(ctx, moving(0, 1), nil0)
			n, pruned := other.PruneApplied(ctx, totals, []string{handler}, 10)
			if n != 1 {
				pruned = errors.Join(pruned, fmt.Errorf("%d markers deleted", n))
			}
			moved <- errors.Join(err, pruned)
		}()
		// a reader does not wait: it sees the checkpoint before the move
		c, err := one.Checkpoint(ctx, totals)
		require.NoError(t, err)
		require.Equal(t, live(0), c)
		select {
		case err := <-moved:
			require.Fail(t, "the checkpoint moved while a unit was open", "%v", err)
		case <-time.After(50 * time.Millisecond): // a longer wait would prove no more
		}
		return adds("k")(ctx, tx, found)
	})
	require.NoError(t, err)
	require.NoError(t, <-moved)
	require.NoError(t, one.Do(ctx, placed(1, 2), adds("k")))
	require.Equal(t, 2, total(t, one.SQL(), "k"))
}
