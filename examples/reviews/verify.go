package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// verifyCmd compares the read model with the events.
type verifyCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Repair        bool     `help:"Change the rows that differ to what they should be."`
	Ignore        []string `placeholder:"COLUMN" help:"Columns that are not compared."`
	Limit         int      `default:"1000" help:"Maximum number of differences."`
	Rate          int      `placeholder:"N" help:"The most events per second."`
}

// Validate is called by kong.
func (c *verifyCmd) Validate() error {
	switch {
	case c.Limit < 1 || c.Rate < 0:
		return errors.New("--limit must be at least 1, and --rate at least 0")
	case c.Repair && c.Reason == "":
		return errNoReason
	}
	return nil
}

// differencesError is the error of a read model that differs from the events. The exit status is 1.
type differencesError struct{ n int }

func (e differencesError) Error() string { return fmt.Sprintf("%d rows differ", e.n) }
func (e differencesError) ExitCode() int { return 1 }

// unverifiedError is the error of a verification that has no result. The exit status is 2.
type unverifiedError struct{ error }

func (e unverifiedError) Unwrap() error { return e.error }
func (e unverifiedError) ExitCode() int { return 2 }

// Run applies all events to new tables, and prints the rows that differ from those of the read
// model. A service may run meanwhile.
func (c *verifyCmd) Run(ctx context.Context) error {
	err := c.with(ctx, func(db serviceStore) error { return c.verify(ctx, db) })
	if _, differ := errors.AsType[differencesError](err); err != nil && !differ {
		return unverifiedError{err}
	}
	return err
}

func (c *verifyCmd) verify(ctx context.Context, db serviceStore) error {
	m := meter{what: "verify"}
	v := projector.Verification{Ignore: c.Ignore, Limit: c.Limit, Rate: c.Rate, Progress: m.show}
	if c.Repair {
		v.Repair = c.decision()
	}
	result, err := db.verify(ctx, v)
	m.clear()
	if err != nil {
		return err
	}
	for _, d := range result.Differences {
		text, err := differenceText(d)
		if err != nil {
			return err
		}
		fmt.Println(text)
	}
	found, repaired := len(result.Differences), len(result.Repaired)
	fmt.Fprintf(os.Stderr, "%d events applied, %d of them failed; %d rows differ at position %d", result.Events, result.Parked, found, result.Position)
	if c.Repair {
		fmt.Fprintf(os.Stderr, "; %d were repaired", repaired)
	}
	fmt.Fprintln(os.Stderr)
	// A row that was right before the repair was changed by an event meanwhile. Beyond the limit
	// there may be more differences.
	if found == 0 || c.Repair && found < c.Limit {
		return nil
	}
	return differencesError{found}
}

// differenceText returns a line: the table, the key, and the columns that differ.
func differenceText(d provider.Difference) (string, error) {
	key, err := objectOf(d.Key)
	if err != nil {
		return "", err
	}
	names := make([]string, 0, len(key))
	for name, value := range key {
		names = append(names, name+"="+string(value))
	}
	slices.Sort(names)
	line := d.Table + " " + strings.Join(names, " ") + ": "
	switch {
	case d.Got == nil:
		return printable(line + "missing"), nil
	case d.Want == nil:
		return printable(line + "extra"), nil
	}
	got, err1 := objectOf(d.Got)
	want, err2 := objectOf(d.Want)
	var columns []string
	for name, is := range got {
		if must := want[name]; string(is) != string(must) {
			columns = append(columns, fmt.Sprintf("%s is %s, must be %s", name, is, must))
		}
	}
	slices.Sort(columns)
	return printable(line + strings.Join(columns, "; ")), errors.Join(err1, err2)
}

func objectOf(text []byte) (o map[string]jsontext.Value, err error) {
	if err = json.Unmarshal(text, &o); err != nil {
		err = fmt.Errorf("read a row: %w", err)
	}
	return o, err
}
