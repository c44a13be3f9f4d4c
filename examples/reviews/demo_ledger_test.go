package main

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

// TestStepsTravel: what a worker writes down is read as it was, also where its last line was cut off.
func TestStepsTravel(t *testing.T) {
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

// TestLedger: a kill and a concurrent duplicate count only where the trace shows them.
func TestLedger(t *testing.T) {
	t.Parallel()
	l := newLedger()
	enter := func(kind stepKind, delivery int64, what string) {
		l.enter("w", step{kind: kind, delivery: delivery, what: what})
	}

	enter(received, 1, "m1")
	require.False(t, l.underway("w"), "nothing has started")
	enter(begun, 1, "p")
	require.False(t, l.underway("w"), "the unit has, its handler has not")
	enter(running, 1, "p")
	require.True(t, l.underway("w"))
	enter(ended, 1, "p")
	require.True(t, l.underway("w"), "committed, perhaps, and not acked")
	enter(acking, 1, "")
	require.False(t, l.underway("w"))
	require.Equal(t, 1, l.ackedMessages())

	enter(received, 2, "m2")
	enter(received, 3, "m3")
	enter(begun, 2, "p")
	enter(begun, 3, "p")
	require.Zero(t, l.total().Concurrent, "another message")
	l.enter("w", step{received, 4, "m2", twinCopy})
	enter(begun, 4, "q")
	require.Zero(t, l.total().Concurrent, "another projector")
	enter(ended, 4, "q")
	enter(begun, 4, "p")
	require.Equal(t, 1, l.total().Concurrent)
	enter(ended, 4, "p")
	enter(begun, 4, "p")
	require.Equal(t, 1, l.total().Concurrent, "once a delivery")
	enter(ended, 2, "p")
	l.enter("w", step{received, 5, "m2", laterCopy})
	enter(ended, 4, "p")
	enter(begun, 5, "p")
	require.Equal(t, 1, l.total().Concurrent, "the others are over")

	enter(running, 5, "p")
	require.True(t, l.underway("w"))
	l.died("w")
	require.False(t, l.underway("w"), "of the next worker nothing is known yet")
	require.Equal(t, counts{Deliveries: 5, Duplicates: 2, Injected: 2, Concurrent: 1}, l.total())
	require.Equal(t, 1, l.ackedMessages())
}

// TestLedgerOfSeveral: each worker has its own account, and only its own end closes it.
func TestLedgerOfSeveral(t *testing.T) {
	t.Parallel()
	l := newLedger()
	for _, w := range []string{"project 0", "project 1"} {
		l.enter(w, step{kind: received, delivery: 1, what: "m1"})
		l.enter(w, step{kind: begun, delivery: 1, what: "p"})
	}
	require.Zero(t, l.total().Concurrent, "two pipes have no common order")
	l.enter("project 0", step{kind: running, delivery: 1, what: "p"})
	require.True(t, l.underway("project 0"))
	require.False(t, l.underway("project 1"))
	l.enter("project 1", step{kind: running, delivery: 1, what: "p"})
	l.died("project 0")
	require.False(t, l.underway("project 0"))
	require.True(t, l.underway("project 1"))
	l.enter("project 1", step{kind: acking, delivery: 1})
	require.False(t, l.underway("project 1"))

	l.enter("relay 0", step{kind: claimed, delivery: 1})
	l.enter("relay 0", step{kind: claimed, delivery: 2})
	l.enter("relay 1", step{kind: claimed, delivery: 3})
	l.enter("relay 0", step{kind: marking, delivery: 1})
	require.True(t, l.relaying("relay 0"))
	l.enter("relay 0", step{kind: marking, delivery: 2})
	require.False(t, l.relaying("relay 0"))
	require.True(t, l.relaying("relay 1"))
	l.died("relay 1")
	require.False(t, l.relaying("relay 1"))
	require.Equal(t, 2, l.publishedEntries())
}
