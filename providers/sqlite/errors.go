package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// ErrNotMigrated means that the file lacks some of Kinora's tables.
var ErrNotMigrated = errors.New("the file does not have Kinora's tables: call Migrate")

// ErrEncoding: the file is not encoded as UTF-8.
var ErrEncoding = errors.New("the file must have the encoding UTF-8, which is that of a new file: copy its tables into one")

// NewerError is the error of Migrate and Ready if a newer program has migrated the file.
type NewerError = provider.NewerError

// explain returns ErrNotMigrated if a statement failed because one of Kinora's tables is missing.
func explain(err error) error {
	if codeOf(err) == sqlite3.SQLITE_ERROR && strings.Contains(err.Error(), "no such table: kinora_") {
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return err
}

// codeOf returns SQLite's extended result code, or 0.
func codeOf(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code()
	}
	return 0
}

func primary(code int) int { return code & 0xff }

func isBusy(err error) bool { return primary(codeOf(err)) == sqlite3.SQLITE_BUSY }

// step is part of the error of Kinora's own steps in a unit.
type step string

const beginning, committing step = "begin", "commit"

func (s step) Error() string { return string(s) }

// inStep adds the step to err. It returns nil for nil.
func inStep(s step, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", s, err)
}

// isAmbiguous reports whether the transaction may be committed although its commit failed with
// err. If the write-ahead log could not be synced, this process sees the transaction rolled back,
// but a recovery after a crash may find it committed.
func isAmbiguous(err error) bool {
	s, _ := errors.AsType[step](err)
	return s == committing && primary(codeOf(err)) == sqlite3.SQLITE_IOERR
}

// wrap adds the failed action to err. It returns nil for nil.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// result returns v, or the wrapped error.
func result[T any](v T, what string, err error) (T, error) {
	if err != nil {
		var none T
		return none, wrap(what, err)
	}
	return v, nil
}

// update runs change in a write transaction and returns its result, unless the input is invalid. doing is the prefix of an error.
func update[R any](ctx context.Context, d *Provider, doing string, invalid error, change func(u *unit) (R, error)) (r R, err error) {
	if err = invalid; err == nil {
		err = d.writeTx(ctx, func(u *unit) error {
			r, err = change(u)
			return err
		})
	}
	return result(r, doing, err)
}

// unitError returns err as Do does, with its class. ctx is the unit's context.
func unitError(ctx context.Context, err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok || err == nil {
		return err
	}
	e, code := provider.HandlerError(err), primary(codeOf(err))
	at, isOwn := errors.AsType[step](err)
	e.Code = cmp.Or(e.Code, codeName(codeOf(err)))
	switch {
	case at == beginning: // no message is to blame
		e.Class = provider.ClassTransient
		if errors.Is(err, ErrNotMigrated) {
			e.Code = "not_migrated"
		} else if e.Code == "" && ctx.Err() != nil {
			e.Code = "SQLITE_BUSY"
		}
		e.Code = cmp.Or(e.Code, string(beginning))
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		if e.Code = ""; errors.Is(ctx.Err(), context.Canceled) {
			e.Class = provider.ClassShutdown
		} else {
			e.Code = provider.CodeDeadline
		}
	// the handler set an earlier deadline
	case errors.Is(err, context.DeadlineExceeded):
		e.Code = provider.CodeDeadline
	case isTxEnded(err):
		e.Class, e.Code = provider.ClassPermanent, "tx_ended"
	case e.Class == provider.ClassPermanent:
	case isAmbiguous(err):
		e.Class = provider.ClassAmbiguous
	// a statement that is too big is the message's fault
	case transient[code], isOwn && at != committing && code != sqlite3.SQLITE_TOOBIG:
		e.Class = provider.ClassTransient
	}
	return e
}

// isTxEnded reports whether err says that the handler tried to end the transaction.
func isTxEnded(err error) bool {
	return errors.Is(err, sql.ErrTxDone) || codeOf(err) == sqlite3.SQLITE_CONSTRAINT_COMMITHOOK ||
		codeOf(err) == sqlite3.SQLITE_ERROR && strings.Contains(err.Error(), "no transaction is active")
}

// transient lists the primary codes that are not the fault of a message.
var transient = map[int]bool{
	sqlite3.SQLITE_BUSY: true, sqlite3.SQLITE_LOCKED: true, sqlite3.SQLITE_IOERR: true, sqlite3.SQLITE_FULL: true,
	sqlite3.SQLITE_CANTOPEN: true, sqlite3.SQLITE_NOMEM: true, sqlite3.SQLITE_PROTOCOL: true,
}

// codeName returns SQLite's name of a constraint, or of the primary code.
func codeName(code int) string {
	kind := code >> 8
	// The driver has texts such as "The database file is locked (SQLITE_BUSY)".
	_, family, known := strings.Cut(sqlite.ErrorCodeString[primary(code)], "(SQLITE_")
	switch {
	case code == 0:
		return ""
	case !known:
		return fmt.Sprintf("SQLITE_%d", code)
	case primary(code) == sqlite3.SQLITE_CONSTRAINT && kind < len(constraints) && constraints[kind] != "":
		return "SQLITE_CONSTRAINT_" + constraints[kind]
	}
	return "SQLITE_" + strings.TrimSuffix(family, ")")
}

var constraints = [...]string{1: "CHECK", 2: "COMMITHOOK", 3: "FOREIGNKEY", 5: "NOTNULL", 6: "PRIMARYKEY", 7: "TRIGGER", 8: "UNIQUE",
	10: "ROWID", 12: "DATATYPE"}
