package redistest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/redistest"
)

func TestSentinelsPromoteTheReplicaOfAKilledMaster(t *testing.T) {
	t.Parallel()
	s := redistest.NewSentinels(t)
	client, replica := s.Client(t), redistest.Client(t, s.Replica.URL)
	set(t, client, "before", "1")
	require.NoError(t, s.Cut())
	set(t, client, "after", "1")
	require.NoError(t, s.Master.End("KILL"))
	eventually(t, "the client writes to the new master", func() bool {
		return client.Set(t.Context(), "again", "1", 0).Err() == nil
	})
	require.NoError(t, s.AwaitMaster(s.Replica))
	require.Equal(t, "1", value(t, replica, "again"))
	require.Equal(t, "1", value(t, replica, "before"))
	require.Equal(t, "none", value(t, replica, "after"), "it reached only the old master")

	require.NoError(t, s.Master.Begin())
	require.NoError(t, s.Await())
	old := redistest.Client(t, s.Master.URL)
	require.Equal(t, "1", value(t, old, "again"), "the old master is a replica")
	require.ErrorContains(t, old.Set(t.Context(), "again", "2", 0).Err(), "READONLY")
}

func TestSentinelsPromoteTheReplicaOfASuspendedMaster(t *testing.T) {
	t.Parallel()
	s := redistest.NewSentinels(t)
	require.NoError(t, s.Master.Suspend())
	require.NoError(t, s.AwaitMaster(s.Replica))
	set(t, s.Client(t), "key", "new")
	for _, addr := range s.Addrs { // they would tell it soon
		_ = redistest.Client(t, "redis://"+addr).Shutdown(t.Context())
	}
	require.NoError(t, s.Master.Resume())
	old := redistest.Client(t, s.Master.URL)
	require.Equal(t, "none", value(t, old, "key"), "the old master does not know yet")
}
