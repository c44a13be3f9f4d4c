package redistest_test

import (
	"fmt"
	"testing"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/redistest"
)

func TestAClusterHasKeysInAllMasters(t *testing.T) {
	t.Parallel()
	c := redistest.NewCluster(t)
	client := c.Client(t)
	keys := map[string]string{} // by the address of their master
	for i := 0; len(keys) < 3; i++ {
		key := fmt.Sprintf("key-%d", i)
		set(t, client, key, "1")
		owner, err := c.Owner(key)
		require.NoError(t, err)
		keys[owner.Addr] = key
	}
	for _, s := range c.Masters {
		require.Equal(t, "1", value(t, redistest.Client(t, s.URL), keys[s.Addr]))
	}
	all := []string{keys[c.Addrs[0]], keys[c.Addrs[1]], keys[c.Addrs[2]]}
	script := goredis.NewScript(`for i, key in ipairs(KEYS) do redis.call("incrby", key, i) end return #KEYS`)
	require.ErrorContains(t, script.Run(t.Context(), client, all).Err(), "CROSSSLOT")

	tagged := []string{"{review}:a", "{review}:b", "{review}:c"}
	n, err := script.Run(t.Context(), client, tagged).Int()
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Equal(t, "3", value(t, client, tagged[2]))
}

func TestAClusterWorksAgainAfterAMasterIsKilledAndStarted(t *testing.T) {
	t.Parallel()
	c := redistest.NewCluster(t, "--cluster-require-full-coverage", "no")
	client := c.Client(t)
	set(t, client, "key", "1")
	owner, err := c.Owner("key")
	require.NoError(t, err)
	require.NoError(t, redistest.Client(t, owner.URL).Save(t.Context()).Err())
	require.NoError(t, owner.End("KILL"))
	require.NoError(t, owner.Begin())
	require.NoError(t, c.Await())
	require.Equal(t, "1", value(t, client, "key"))

	require.NoError(t, owner.End("KILL"))
	require.NoError(t, owner.DeleteData())
	require.NoError(t, owner.Begin())
	require.NoError(t, c.Await())
	require.Equal(t, "none", value(t, client, "key"))
}
