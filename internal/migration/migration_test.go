package migration_test

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/migration"
	"github.com/kinora-go/kinora/provider"
)

func TestOldest(t *testing.T) {
	t.Parallel()
	for script, oldest := range map[string]int64{
		"-- Migration 7.\n--\n-- Oldest program: 5\ncreate table t (id int);": 5,
		"-- Migration 7.\n":                         math.MaxInt64,
		"--  Oldest program: 5\n":                   math.MaxInt64,
		"-- Oldest program: 99999999999999999999\n": math.MaxInt64,
	} {
		require.Equal(t, oldest, migration.Oldest(script), script)
	}
}

func TestFits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		database, known, oldest int64
		older, newer            bool
	}{
		{database: 0, known: 1, older: true},
		{database: 1, known: 1},
		{database: 0, known: 6, older: true},
		{database: 4, known: 6, older: true},
		{database: 5, known: 6},
		{database: 6, known: 6},
		{database: 7, known: 6, oldest: 6},
		{database: 9, known: 6, oldest: 5},
		{database: 9, known: 6, oldest: 7, newer: true},
		{database: 7, known: 6, oldest: math.MaxInt64, newer: true},
	} {
		older := errors.New("older")
		err := migration.Fits(c.database, c.known, c.oldest, older)
		var newer *provider.NewerError
		if c.newer {
			require.ErrorAs(t, err, &newer, c)
			require.Equal(t, provider.NewerError{Database: c.database, Program: c.known}, *newer)
		} else if c.older {
			require.ErrorIs(t, err, older, c)
		} else {
			require.NoError(t, err, c)
		}
	}
}

func TestBefore(t *testing.T) {
	t.Parallel()
	for statement, before := range map[string]string{
		"select 1": "select 1",
		"select id, /*+*/needs/*-''*/ from parked":            "select id, '' from parked",
		"set a = 1/*+*/,\n\tb = 2/*-*/, c = 3/*+*/,d=4/*- */": "set a = 1, c = 3 ",
		"select /* of all */ id":                              "select /* of all */ id",
	} {
		require.Equal(t, before, migration.Before(statement))
	}
}
