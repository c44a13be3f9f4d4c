package redistest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/redistest"
)

func TestAReplicaLagsBetweenCutAndMend(t *testing.T) {
	t.Parallel()
	p := redistest.NewPair(t)
	master, replica := redistest.Client(t, p.Master.URL), redistest.Client(t, p.Replica.URL)
	set(t, master, "key", "before")
	require.NoError(t, p.Cut())
	set(t, master, "key", "after")
	require.Equal(t, "before", value(t, replica, "key"))
	require.ErrorContains(t, replica.Set(t.Context(), "key", "here", 0).Err(), "READONLY")
	require.NoError(t, p.Mend())
	require.Equal(t, "after", value(t, replica, "key"))
}

// A failover to a replica that lags loses acknowledged writes. The client's address stays the same.
func TestAPromotedReplicaHasTheWritesBeforeTheCut(t *testing.T) {
	t.Parallel()
	p := redistest.NewPair(t)
	address := redistest.NewSwitch(t, p.Master)
	client := redistest.Client(t, address.URL)
	set(t, client, "before", "1")
	require.NoError(t, p.Cut())
	set(t, client, "after", "1")
	require.NoError(t, p.Master.End("KILL"))
	require.Error(t, redistest.Client(t, address.URL, oneTry).Ping(t.Context()).Err())
	require.NoError(t, p.Promote())
	address.To(p.Replica)
	require.Equal(t, "1", value(t, client, "before"))
	require.Equal(t, "none", value(t, client, "after"))
	set(t, client, "again", "1")

	address.To(nil)
	require.Error(t, redistest.Client(t, address.URL, oneTry).Ping(t.Context()).Err())
}

func TestASuspendedReplicaCatchesUpAfterResume(t *testing.T) {
	t.Parallel()
	p := redistest.NewPair(t)
	require.NoError(t, p.Replica.Suspend())
	set(t, redistest.Client(t, p.Master.URL), "key", "during")
	require.NoError(t, p.Replica.Resume())
	require.NoError(t, p.Sync())
	require.Equal(t, "during", value(t, redistest.Client(t, p.Replica.URL), "key"))
}
