// Package migration says which programs run on which versions of a database's schema.
//
// A program runs on the newest version that it knows, and on the one before, so that it may be started before the
// migration. It runs on newer versions if their migrations say so, so that it need not be stopped before the migration, and
// may be started again after it. Each migration has the line "-- Oldest program: N": programs that know version N run on it.
package migration

import (
	"math"
	"regexp"
	"strconv"

	"github.com/kinora-go/kinora/provider"
)

var oldestLine = regexp.MustCompile(`(?m)^-- Oldest program: (\d+)$`)

// Oldest returns the version that a program must know to run on the schema after a migration. Without a line that says so, no
// older program does.
func Oldest(script string) int64 {
	m := oldestLine.FindStringSubmatch(script)
	if m == nil {
		return math.MaxInt64
	}
	n, _ := strconv.ParseInt(m[1], 10, 64) // digits; one that is too large is the largest
	return n
}

// Fits returns an error if a program that knows versions up to known does not run on a database: older, or a
// *provider.NewerError. oldest is the highest Oldest of the migrations that the program does not know.
func Fits(database, known, oldest int64, older error) error {
	switch {
	case database < max(known-1, 1):
		return older
	case database > known && oldest > known:
		return &provider.NewerError{Database: database, Program: known}
	}
	return nil
}

var sinceLast = regexp.MustCompile(`(?s)/\*\+\*/.*?/\*-(.*?)\*/`)

// Before returns a statement as it is to be on the version before the last. What the last migration brought stands between
// the comments "+" and "-". What stands there before it is in the second comment:
//
//	select id, /*+*/needs/*-''*/ from parked
func Before(statement string) string { return sinceLast.ReplaceAllString(statement, "$1") }
