package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
)

type importCmd struct {
	DB     database `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"Where the data is: sqlite:PATH or postgres://…; created if it is not there."`
	File   string   `arg:"" help:"JSON lines like those of the public Amazon review sets, plain or gzip."`
	Strict bool     `help:"Exit with status 2 if any line was bad."`

	pipelineFlags `embed:""`
}

// Validate is called by kong.
func (c *importCmd) Validate() error { return c.check(c.DB) }

// badLinesError makes the exit status 2.
type badLinesError struct{ n int64 }

func (e badLinesError) Error() string { return fmt.Sprintf("%d bad lines", e.n) }
func (e badLinesError) ExitCode() int { return 2 }

// Run imports a file: each line is a command, and the read model follows in the same process meanwhile. It
// may be killed at any moment and run again: lines that were imported change nothing.
func (c *importCmd) Run(ctx context.Context) (err error) {
	file, err := os.Open(c.File)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	im := &importer{file: file}
	if info, err := file.Stat(); err == nil {
		im.size.Store(info.Size())
	}
	if im.lines, err = newLines(im); err != nil {
		return fmt.Errorf("read %s: %w", c.File, err)
	}
	db, err := c.DB.create(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := im.importAll(ctx, c.DB, c.pipelineFlags, db); err != nil {
		return err
	}
	fmt.Println(im)
	if err := troubled(ctx, db); err != nil {
		return err
	}
	if n := im.bad.Load(); c.Strict && n > 0 {
		return badLinesError{n}
	}
	return nil
}

// importer reads lines and carries them out.
type importer struct {
	progress
	file  io.Reader
	lines *lines
}

// Read counts what is read of the file, before it is unzipped.
func (im *importer) Read(p []byte) (int, error) {
	n, err := im.file.Read(p)
	im.read.Add(int64(n))
	return n, err
}

func (im *importer) importAll(ctx context.Context, d database, how pipelineFlags, db serviceStore) (err error) {
	pipe, err := how.start(ctx, d, db)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pipe.Stop()) }()
	defer im.show()()
	if err = im.commandAll(ctx, db); err == nil {
		err = caughtUp(ctx, db, pipe, pipe.done, im.open.Store)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.New("interrupted: run the same import again to go on")
	default:
		return fmt.Errorf("up to line %d: %w", im.line.Load(), err)
	}
}

// What shares a transaction, and with it one write to the disk: not much, as the read model's units of work
// wait for their turn meanwhile.
const (
	linesPerTx = 100
	bytesPerTx = 1 << 20 // no further line once these are reached
)

// commandAll carries out line after line. Only a database that fails, or a file that cannot be read, stops it.
func (im *importer) commandAll(ctx context.Context, db serviceStore) error {
	for {
		some, end, err := im.readSome()
		if err != nil {
			return err
		}
		if err := im.commandSome(ctx, db, some); err != nil {
			return err
		}
		if end {
			return nil
		}
	}
}

// item is a line on its way.
type item struct {
	line   int64
	record record
	bad    error // why it is a bad line; nil for a good one
}

// readSome reads the lines of one transaction.
func (im *importer) readSome() (some []item, end bool, err error) {
	for size := 0; len(some) < linesPerTx && size < bytesPerTx; {
		text, err := im.lines.next()
		if errors.Is(err, io.EOF) {
			return some, true, nil
		}
		it := item{line: im.line.Add(1)}
		switch {
		case errors.Is(err, errLongLine):
			it.bad = err
		case err != nil:
			return nil, false, err
		case len(bytes.TrimSpace(text)) == 0:
			continue
		default:
			it.record, it.bad = parseRecord(text)
		}
		size += len(text)
		some = append(some, it)
	}
	return some, false, nil
}

// commandSome carries out lines in one transaction, and counts and reports when that has committed.
func (im *importer) commandSome(ctx context.Context, db serviceStore, some []item) error {
	if len(some) == 0 {
		return nil
	}
	var changed int64
	err := db.inTx(ctx, func(tx eventstore.TxStore) error {
		commands, err := review.NewCommands(tx)
		changed = 0
		for i := 0; i < len(some) && err == nil; i++ {
			var events int
			events, err = some[i].command(ctx, commands)
			changed += int64(events)
		}
		return err
	})
	if err != nil {
		return err
	}
	im.changed.Add(changed)
	for _, it := range some {
		if it.bad != nil {
			im.reportBad(it)
		}
	}
	return nil
}

// command carries out a good line, which may turn out to be a bad one. It returns how many events it made.
func (it *item) command(ctx context.Context, commands *review.Commands) (events int, err error) {
	if it.bad != nil {
		return 0, nil
	}
	r := it.record
	at, err := commands.PostAsOf(ctx, r.Product, r.Author, r.content(), r.at())
	if errors.Is(err, review.ErrRejected) || errors.Is(err, eventstore.ErrInvalid) {
		it.bad, err = err, nil
	}
	return at.Count, err
}

const badLinesShown = 20

// reportBad says where and why, never what the line holds: people wrote it.
func (im *importer) reportBad(it item) {
	n := im.bad.Add(1)
	if n > badLinesShown {
		return
	}
	im.clear()
	fmt.Fprintf(os.Stderr, "line %d: %v\n", it.line, it.bad)
	if n == badLinesShown {
		fmt.Fprintln(os.Stderr, "further bad lines are counted and not shown")
	}
}
