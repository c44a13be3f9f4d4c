package main

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

// TestStepsRoundTrip: steps are read as written, also if the last line is incomplete.
func TestStepsRoundTrip(t *testing.T) {
	t.Parallel()
	steps := []step{
		{received, 1, "0190-id", firstCopy},
		{received, 2, "an id with \"quotes\"\nand more", twinCopy},
		{kind: begun, delivery: 1, what: "demo-control"},
		{kind: running, delivery: 1, what: "demo-control"},
		{kind: ended, delivery: 1, what: "demo-control"},
		{kind: acking, delivery: 1},
	}
	var pipe bytes.Buffer
	write := writeSteps(&pipe)
	for _, s := range steps {
		require.NoError(t, write(s))
	}
	_, err := io.WriteString(&pipe, "acking 2")
	require.NoError(t, err)
	var got []step
	require.NoError(t, readSteps(iotest.HalfReader(&pipe), func(s step) { got = append(got, s) }))
	require.Equal(t, steps, got)

	require.Error(t, readSteps(bytes.NewBufferString("panic: something\n"), func(step) {}))
}

// TestLedger: a kill or a concurrent duplicate counts only if the trace shows it.
func TestLedger(t *testing.T) {
	t.Parallel()
	l := newLedger()
	enter := func(kind stepKind, delivery int64, what string) {
		l.record("w", step{kind: kind, delivery: delivery, what: what})
	}

	enter(received, 1, "m1")
	require.False(t, l.inFlight("w"), "no unit has begun")
	enter(begun, 1, "p")
	require.False(t, l.inFlight("w"), "the unit has begun, its handler has not started")
	enter(running, 1, "p")
	require.True(t, l.inFlight("w"))
	enter(ended, 1, "p")
	require.True(t, l.inFlight("w"), "the unit has ended and the message is not acked")
	enter(acking, 1, "")
	require.False(t, l.inFlight("w"))
	require.Equal(t, 1, l.ackedMessages())

	enter(received, 2, "m2")
	enter(received, 3, "m3")
	enter(begun, 2, "p")
	enter(begun, 3, "p")
	require.Zero(t, l.total().Concurrent, "other messages do not count")
	l.record("w", step{received, 4, "m2", twinCopy})
	enter(begun, 4, "q")
	require.Zero(t, l.total().Concurrent, "other projectors do not count")
	enter(ended, 4, "q")
	enter(begun, 4, "p")
	require.Equal(t, 1, l.total().Concurrent)
	enter(ended, 4, "p")
	enter(begun, 4, "p")
	require.Equal(t, 1, l.total().Concurrent, "a delivery counts once")
	enter(ended, 2, "p")
	l.record("w", step{received, 5, "m2", laterCopy})
	enter(ended, 4, "p")
	enter(begun, 5, "p")
	require.Equal(t, 1, l.total().Concurrent, "the other units have ended")

	enter(running, 5, "p")
	require.True(t, l.inFlight("w"))
	l.workerDied("w")
	require.False(t, l.inFlight("w"), "the next process has no steps yet")
	require.Equal(t, counts{Deliveries: 5, Duplicates: 2, Injected: 2, Concurrent: 1}, l.total())
	require.Equal(t, 1, l.ackedMessages())
}

// TestLedgerOfSeveralWorkers: the deliveries of each worker are separate, and only its own end
// removes them.
func TestLedgerOfSeveralWorkers(t *testing.T) {
	t.Parallel()
	l := newLedger()
	for _, w := range []string{"project 0", "project 1"} {
		l.record(w, step{kind: received, delivery: 1, what: "m1"})
		l.record(w, step{kind: begun, delivery: 1, what: "p"})
	}
	require.Zero(t, l.total().Concurrent, "the traces of two workers have no common order")
	l.record("project 0", step{kind: running, delivery: 1, what: "p"})
	require.True(t, l.inFlight("project 0"))
	require.False(t, l.inFlight("project 1"))
	l.record("project 1", step{kind: running, delivery: 1, what: "p"})
	l.workerDied("project 0")
	require.False(t, l.inFlight("project 0"))
	require.True(t, l.inFlight("project 1"))
	l.record("project 1", step{kind: acking, delivery: 1})
	require.False(t, l.inFlight("project 1"))

	l.record("relay 0", step{kind: claimed, delivery: 1})
	l.record("relay 0", step{kind: claimed, delivery: 2})
	l.record("relay 1", step{kind: claimed, delivery: 3})
	l.record("relay 0", step{kind: marking, delivery: 1})
	require.True(t, l.hasClaim("relay 0"))
	l.record("relay 0", step{kind: marking, delivery: 2})
	require.False(t, l.hasClaim("relay 0"))
	require.True(t, l.hasClaim("relay 1"))
	l.workerDied("relay 1")
	require.False(t, l.hasClaim("relay 1"))
	require.Equal(t, 2, l.publishedEntries())
}
