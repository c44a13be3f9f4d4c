package projector_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

func panicking(context.Context, txn, eventstore.Event[posted]) error { panic("no such product") }

// TestAParkedMessageSaysWhy: the row of a parked message has the text of its last error, and the place of a
// panic.
// Promise: G6.7
func TestAParkedMessageSaysWhy(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		handle onEvent
		want   []string
		not    string
	}{
		"error": {func(context.Context, txn, eventstore.Event[posted]) error { return errNever }, []string{"never"}, "cause_test.go"},
		"panic": {panicking, []string{"panic: no such product\n", "projector_test.panicking", "cause_test.go:18"}, "debug.Stack"},
		"long error": {func(context.Context, txn, eventstore.Event[posted]) error {
			return projector.Permanent(errors.New(strings.Repeat("ü", 5000)))
		}, []string{"üüü"}, "stack"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			f := make(subscription)
			stop := run(t, db, f, projector.RunnerConfig{}, define(delivered, c.handle))
			f.deliver(t, keyed("k", 1), keyed("k", 2))
			require.NoError(t, stop())
			list := parked(t, db)
			require.Len(t, list, 2)
			for _, want := range c.want {
				require.Contains(t, list[0].Error, want)
			}
			require.NotContains(t, list[0].Error, c.not)
			require.LessOrEqual(t, len(list[0].Error), provider.MaxParkedError)
			require.Empty(t, list[1].Error, "it only waits")
		})
	}
}

// TestAParkedMessageSaysWhyItFailedLast: another error replaces the text.
// Promise: G6.7
func TestAParkedMessageSaysWhyItFailedLast(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	f := make(subscription)
	tries := 0
	stop := run(t, db, f, projector.RunnerConfig{Retry: claim.Backoff{Base: time.Millisecond}}, define(delivered, func(context.Context, txn, eventstore.Event[posted]) error {
		if tries++; tries == 1 {
			return errNo
		}
		return errNever
	}))
	f.deliver(t, keyed("k", 1))
	patience.Until(t, func() bool { return strings.Contains(parked(t, db)[0].Error, "never") }, "the text of the second error")
	require.NoError(t, stop())
}
