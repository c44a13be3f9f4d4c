package bolt

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const crashing = "KINORA_BOLT_FILE" // the environment variable of a process that is killed

// work appends events and applies each in a unit of its own, until the process is killed.
func work(t *testing.T, db *DB) {
	for n := 1; ; n++ {
		id := fmt.Sprintf("0198a6b4-7c52-7d11-9a2e-%012d", n)
		_, err := db.Append(t.Context(), "review-1", eventstore.Any, []eventstore.Draft{{ID: id, Type: "review.posted", Schema: 1, Data: []byte("{}")}})
		require.NoError(t, err)
		u := provider.Unit{Projector: "ratings", Messages: []provider.Message{{ID: id, Mark: true, Handlers: []provider.Handler{{Name: "ratings/posted"}}}}}
		require.NoError(t, db.Do(t.Context(), u, func(ctx context.Context, tx *Tx, found provider.Found) (provider.Closing, error) {
			if !found.Fresh[0][0] {
				return provider.Closing{}, nil
			}
			return provider.Closing{Output: []outbox.Message{{ID: "of " + id, Topic: "rated"}}}, add(ctx, tx, "applied", 1)
		}))
		_, _ = fmt.Println(n)
	}
}

// A process that is killed leaves whole transactions only, and another one goes on with the file.
func TestAKilledProcess(t *testing.T) {
	if path := os.Getenv(crashing); path != "" {
		db, err := Open(path, Config{Route: outbox.ByCategory})
		require.NoError(t, err)
		work(t, db)
	}
	t.Parallel()
	path := filepath.Join(t.TempDir(), "events.db")
	for life := range 3 {
		process := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestAKilledProcess$")
		process.Env = append(os.Environ(), crashing+"="+path)
		out, err := process.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, process.Start())
		for range 5 + 3*life {
			_, err = fmt.Fscanln(out, new(int))
			require.NoError(t, err)
		}
		require.NoError(t, process.Process.Kill())
		_ = process.Wait() // it was killed

		db, err := Open(path, Config{})
		require.NoError(t, err)
		events := 0
		for e, err := range db.ReadStream(t.Context(), "review-1", 0) {
			require.NoError(t, err)
			require.Equal(t, []int64{int64(events + 1), int64(events + 1)}, []int64{e.Version, e.Position})
			events++
		}
		applied, err := db.Get(t.Context(), "applied")
		require.NoError(t, err)
		all, err := db.Entries(t.Context(), outbox.Filter{Topic: "review", Limit: 1_000_000})
		require.NoError(t, err)
		require.Len(t, all, events, "each event has its entry")
		rated, err := db.Entries(t.Context(), outbox.Filter{Topic: "rated", Limit: 1_000_000})
		require.NoError(t, err)
		require.Len(t, rated, total(applied), "each effect has its output")
		require.Contains(t, []int{events - 1, events}, total(applied))
		require.NoError(t, db.Close())
	}
}
