package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/stretchr/testify/require"
)

// TestBrokerLogFilter: the log has no trace records, which contain users' text, and no errors of
// canceled work.
func TestBrokerLogFilter(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	all := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: watermill.LevelTrace}))
	log := filteredLogger{watermill.NewSlogLogger(all)}.With(watermill.LogFields{"topic": "t"})
	log.Trace("insert", watermill.LogFields{"query_args": "secret"})
	require.Empty(t, out.String())
	log.Error("one", fmt.Errorf("commit: %w", context.Canceled), nil)
	log.Error("two", errors.New("conn closed"), watermill.LogFields{"query_err": errors.New("x")})
	require.NotContains(t, out.String(), "level=ERROR")
	log.Error("three", errors.New("conn closed"), nil)
	require.Contains(t, out.String(), "level=ERROR msg=three topic=t")
}
