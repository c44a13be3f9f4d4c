package main

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/internal/redistest"
)

// TestRedisStreams: Redis is killed and started again, with an append-only file. The broker alone
// delivers every event, but does not keep the order of an account after a runner was killed. With
// everysec it would lose messages while the disk is busy.
func TestRedisStreams(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t, "--appendonly", "yes", "--appendfsync", "always")
	s := newScenario(t, testProcesses(t), server.URL, lease)
	s.outage = func(context.Context) error { return errors.Join(server.End("KILL"), server.Begin()) }
	s.finish(t, false)
}

// TestNATS: a server alone is killed and started again.
func TestNATS(t *testing.T) {
	t.Parallel()
	ps := testProcesses(t)
	c, err := startCluster(t.Context(), ps, 1)
	require.NoError(t, err)
	t.Cleanup(c.remove)
	s := newScenario(t, ps, c.address(), lease)
	s.outage = c.killOne
	s.finish(t, true)
}

// TestSQL: the topics are in PostgreSQL, which is killed and started again.
func TestSQL(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	ps := testProcesses(t)
	db, err := openDB(t.Context(), server.DSN)
	require.NoError(t, err)
	require.NoError(t, prepareDB(t.Context(), db))
	db.Close()
	s := scenarioOn(t, ps, server.DSN, server.DSN, lease)
	s.outage = func(context.Context) error {
		err := server.Restart("QUIT")
		s.db.Pool().Reset()
		return err
	}
	s.finish(t, true)
}
