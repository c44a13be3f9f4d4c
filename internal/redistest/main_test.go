package redistest_test

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/kinora-go/kinora/internal/patience"
	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("KINORA_CHILD") != "" {
		if err := child(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// oneTry makes a client report the first error.
func oneTry(o *goredis.Options) {
	o.MaxRetries, o.DialerRetries, o.ReadTimeout = -1, 1, 200*time.Millisecond
}

// eventually polls until ok is true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	patience.Until(t, ok, "%s", what)
}

// value returns a key's value, or "none".
func value(t testing.TB, c goredis.UniversalClient, key string) string {
	t.Helper()
	v, err := c.Get(t.Context(), key).Result()
	if errors.Is(err, goredis.Nil) {
		return "none"
	}
	require.NoError(t, err)
	return v
}

func set(t testing.TB, c goredis.UniversalClient, key, value string) {
	t.Helper()
	require.NoError(t, c.Set(t.Context(), key, value, 0).Err())
}
