package eventstore_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/stretchr/testify/require"
)

func FuzzJoinID(f *testing.F) {
	f.Add("42-a", "b")
	f.Add("42", "a-b")
	f.Add("~", "-~")
	f.Add("", "")
	f.Fuzz(func(t *testing.T, a, b string) {
		parts, err := eventstore.SplitID(eventstore.JoinID(a, b))
		require.NoError(t, err)
		require.Equal(t, []string{a, b}, parts)
	})
}

func TestJoinID(t *testing.T) {
	t.Parallel()
	require.Equal(t, "42-ann", eventstore.JoinID("42", "ann"))
	require.NotEqual(t, eventstore.JoinID("42-a", "b"), eventstore.JoinID("42", "a-b"))
	require.NotEqual(t, eventstore.JoinID("-~"), eventstore.JoinID("~-"))
	for _, bad := range []string{"a~", "a~b"} {
		_, err := eventstore.SplitID(bad)
		require.Error(t, err, bad)
	}
}
