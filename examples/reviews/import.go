package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
)

type importCmd struct {
	DB     database `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"The database: sqlite:PATH or postgres://…. Missing files and tables are created."`
	File   string   `arg:"" help:"A file of JSON lines, as in the public Amazon review sets, plain or gzip."`
	Strict bool     `help:"Exit with status 2 if any line is bad."`

	projectionFlags `embed:""`
	pipelineFlags   `embed:""`
}

// Validate is called by kong.
func (c *importCmd) Validate() error { return c.check(c.DB) }

// badLinesError is the error of --strict. Its exit status is 2.
type badLinesError struct{ n int64 }

func (e badLinesError) Error() string { return fmt.Sprintf("%d bad lines", e.n) }
func (e badLinesError) ExitCode() int { return 2 }

// Run imports a file. Each line is a command. After the last line the read model is brought up to
// date. The import may be killed at any moment and run again: imported lines change nothing.
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
	db, err := c.of(c.DB).create(ctx, c.Broker)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	stuck, err := im.importAll(ctx, c.DB, c.pipelineFlags, db)
	if err != nil {
		return err
	}
	fmt.Println(im)
	if stuck > 0 {
		return errStuck(stuck)
	}
	if n := im.bad.Load(); c.Strict && n > 0 {
		return badLinesError{n}
	}
	return nil
}

// importer reads lines and runs them as commands.
type importer struct {
	progress
	file  io.Reader
	lines *lines
}

// Read reads the file and counts the bytes before decompression.
func (im *importer) Read(p []byte) (int, error) {
	n, err := im.file.Read(p)
	im.read.Add(int64(n))
	return n, err
}

func (im *importer) importAll(ctx context.Context, d database, flags pipelineFlags, db serviceStore) (stuck int, err error) {
	defer im.show()()
	if err = im.runAll(ctx, db); err == nil {
		stuck, err = im.apply(ctx, d, flags, db)
	}
	switch {
	case err == nil:
		return stuck, nil
	case ctx.Err() != nil:
		return 0, errors.New("interrupted: run the same import again to continue")
	default:
		return 0, fmt.Errorf("import stopped after line %d: %w", im.line.Load(), err)
	}
}

// apply brings the read model up to date. It starts after the last line: then the runner applies
// large batches, and does not compete with the lines for the disk.
func (im *importer) apply(ctx context.Context, d database, flags pipelineFlags, db serviceStore) (stuck int, err error) {
	pipe, err := flags.start(ctx, d, db)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, pipe.Stop()) }()
	if stuck, err = waitCaughtUp(ctx, db, pipe.Ended(), im.open.Store); err != nil || pipe.broker == nil {
		return stuck, err
	}
	return stuck, waitPublished(ctx, db, pipe.Ended())
}

// Limits of the lines that share a transaction, and so one write to the disk. A service on the same
// file waits for the transaction.
const (
	linesPerTx = 500
	bytesPerTx = 1 << 20 // the last line may exceed this
)

// runAll runs all lines as commands. It returns an error only if the database fails or the file
// cannot be read.
func (im *importer) runAll(ctx context.Context, db serviceStore) error {
	for {
		batch, end, err := im.readBatch()
		if err != nil {
			return err
		}
		if err := im.runBatch(ctx, db, batch); err != nil {
			return err
		}
		if end {
			return nil
		}
	}
}

// item is a line of the file.
type item struct {
	line   int64
	record record
	bad    error // why the line is bad; nil for a good line
}

// readBatch reads the lines of one transaction. end is true after the last line of the file.
func (im *importer) readBatch() (batch []item, end bool, err error) {
	for size := 0; len(batch) < linesPerTx && size < bytesPerTx; {
		text, err := im.lines.next()
		if errors.Is(err, io.EOF) {
			return batch, true, nil
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
		batch = append(batch, it)
	}
	return batch, false, nil
}

// runBatch runs lines as commands in one transaction. It counts and reports them after the commit.
func (im *importer) runBatch(ctx context.Context, db serviceStore, batch []item) error {
	if len(batch) == 0 {
		return nil
	}
	var changed int64
	var done []item
	err := db.inTx(ctx, func(tx eventstore.TxStore) error {
		commands, err := review.NewCommands(tx)
		changed, done = 0, slices.Clone(batch) // without the results of an earlier run
		for i := 0; i < len(done) && err == nil; i++ {
			var events int
			events, err = done[i].command(ctx, commands)
			changed += int64(events)
		}
		return err
	})
	if err != nil {
		return err
	}
	im.changed.Add(changed)
	for _, it := range done {
		if it.bad != nil {
			im.reportBad(it)
		}
	}
	return nil
}

// command runs a good line as a command and returns the number of its events. A rejected command
// makes the line bad.
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

// reportBad prints the number and the error of a bad line, and never its text, which people wrote.
func (im *importer) reportBad(it item) {
	n := im.bad.Add(1)
	if n > badLinesShown {
		return
	}
	im.clear()
	fmt.Fprintf(os.Stderr, "line %d: %v\n", it.line, it.bad)
	if n == badLinesShown {
		fmt.Fprintln(os.Stderr, "more bad lines follow: they are counted and not shown")
	}
}
