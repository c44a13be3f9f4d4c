package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// ErrNotMigrated: the file does not have all of Kinora's tables.
var ErrNotMigrated = errors.New("the file does not have Kinora's tables: call Migrate")

// explain returns ErrNotMigrated if a statement failed because one of Kinora's tables is missing.
func explain(err error) error {
	if codeOf(err) == sqlite3.SQLITE_ERROR && strings.Contains(err.Error(), "no such table: kinora_") {
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return err
}

// codeOf is SQLite's extended result code, or 0.
func codeOf(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code()
	}
	return 0
}

func primary(code int) int { return code & 0xff }

func isBusy(err error) bool { return primary(codeOf(err)) == sqlite3.SQLITE_BUSY }

// commitError is an error of COMMIT.
type commitError struct{ err error }

func (e *commitError) Error() string { return "commit: " + e.err.Error() }

func (e *commitError) Unwrap() error { return e.err }

// isAmbiguous reports whether the transaction may be committed although its commit failed with err. If the write-ahead
// log could not be synced, this process sees the transaction rolled back, but a recovery after a crash may find it.
func isAmbiguous(err error) bool {
	c, ok := errors.AsType[*commitError](err)
	return ok && primary(codeOf(c.err)) == sqlite3.SQLITE_IOERR
}

// beginError says why a transaction could not begin.
type beginError struct{ err error }

func (e *beginError) Error() string { return "begin: " + e.err.Error() }

func (e *beginError) Unwrap() error { return e.err }

// ownError is an error of a statement of Kinora's own, in the opening or the closing of a unit.
type ownError struct{ err error }

func (e *ownError) Error() string { return e.err.Error() }

func (e *ownError) Unwrap() error { return e.err }

// own is an ownError that says what was done, or nil.
func own(what string, err error) error {
	if err == nil {
		return nil
	}
	return &ownError{doing(what, err)}
}

// doing says what was done when err happened, or is nil.
func doing(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// result is v, or else the error with what was done when it happened.
func result[T any](v T, what string, err error) (T, error) {
	if err != nil {
		var none T
		return none, doing(what, err)
	}
	return v, nil
}

// isOwn reports whether no message is to blame for err. A value that is too big is the message's fault.
func isOwn(err error) bool {
	_, own := errors.AsType[*ownError](err)
	return own && primary(codeOf(err)) != sqlite3.SQLITE_TOOBIG
}

// unitError is err as Do returns it: with its class. ctx is that of the unit.
func unitError(ctx context.Context, err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok || err == nil {
		return err
	}
	e := &provider.Error{Class: provider.ClassUnknown, Code: codeName(codeOf(err)), Err: err}
	_, atBegin := errors.AsType[*beginError](err)
	switch {
	case atBegin: // no message is to blame
		e.Class = provider.ClassTransient
		if e.Code == "" || errors.Is(err, ErrNotMigrated) {
			e.Code = beginCode(err)
		}
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		if e.Code = ""; errors.Is(ctx.Err(), context.Canceled) {
			e.Class = provider.ClassShutdown
		} else {
			e.Code = provider.CodeDeadline
		}
	case errors.Is(err, context.DeadlineExceeded): // a nearer one, of the handler's
		e.Code = provider.CodeDeadline
	case endedWith(err):
		e.Class, e.Code = provider.ClassPermanent, "tx_ended"
	case errors.Is(err, eventstore.ErrInvalid):
		e.Class, e.Code = provider.ClassPermanent, "invalid"
	case errors.Is(err, eventstore.ErrEventIDReused):
		e.Class, e.Code = provider.ClassPermanent, "event_id_reused"
	case isAmbiguous(err):
		e.Class = provider.ClassAmbiguous
	case transient[primary(codeOf(err))] || isOwn(err):
		e.Class = provider.ClassTransient
	}
	return e
}

// beginCode is a word for why a transaction could not begin.
func beginCode(err error) string {
	switch {
	case errors.Is(err, ErrNotMigrated):
		return "not_migrated"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return "SQLITE_BUSY"
	default:
		return "begin"
	}
}

// endedWith reports whether err says that the handler tried to end the transaction.
func endedWith(err error) bool {
	return errors.Is(err, sql.ErrTxDone) || codeOf(err) == sqlite3.SQLITE_CONSTRAINT_COMMITHOOK ||
		codeOf(err) == sqlite3.SQLITE_ERROR && strings.Contains(err.Error(), "no transaction is active")
}

// transient are the primary codes that are not the fault of a message.
var transient = map[int]bool{
	sqlite3.SQLITE_BUSY: true, sqlite3.SQLITE_LOCKED: true, sqlite3.SQLITE_IOERR: true, sqlite3.SQLITE_FULL: true,
	sqlite3.SQLITE_CANTOPEN: true, sqlite3.SQLITE_NOMEM: true, sqlite3.SQLITE_PROTOCOL: true,
}

// codeName is the name of an extended code if it says more than that of its family, else the family's.
func codeName(code int) string {
	if name, ok := codeNames[code]; ok {
		return name
	}
	if name, ok := codeNames[primary(code)]; ok {
		return name
	}
	if code == 0 {
		return ""
	}
	return fmt.Sprintf("SQLITE_%d", code)
}

var codeNames = map[int]string{
	sqlite3.SQLITE_ERROR: "SQLITE_ERROR", sqlite3.SQLITE_INTERNAL: "SQLITE_INTERNAL", sqlite3.SQLITE_PERM: "SQLITE_PERM",
	sqlite3.SQLITE_ABORT: "SQLITE_ABORT", sqlite3.SQLITE_BUSY: "SQLITE_BUSY", sqlite3.SQLITE_LOCKED: "SQLITE_LOCKED",
	sqlite3.SQLITE_NOMEM: "SQLITE_NOMEM", sqlite3.SQLITE_READONLY: "SQLITE_READONLY",
	sqlite3.SQLITE_INTERRUPT: "SQLITE_INTERRUPT", sqlite3.SQLITE_IOERR: "SQLITE_IOERR",
	sqlite3.SQLITE_CORRUPT: "SQLITE_CORRUPT", sqlite3.SQLITE_FULL: "SQLITE_FULL",
	sqlite3.SQLITE_CANTOPEN: "SQLITE_CANTOPEN", sqlite3.SQLITE_PROTOCOL: "SQLITE_PROTOCOL",
	sqlite3.SQLITE_SCHEMA: "SQLITE_SCHEMA", sqlite3.SQLITE_TOOBIG: "SQLITE_TOOBIG",
	sqlite3.SQLITE_CONSTRAINT: "SQLITE_CONSTRAINT", sqlite3.SQLITE_MISMATCH: "SQLITE_MISMATCH",
	sqlite3.SQLITE_MISUSE: "SQLITE_MISUSE", sqlite3.SQLITE_AUTH: "SQLITE_AUTH", sqlite3.SQLITE_RANGE: "SQLITE_RANGE",
	sqlite3.SQLITE_NOTADB: "SQLITE_NOTADB",

	sqlite3.SQLITE_CONSTRAINT_CHECK:      "SQLITE_CONSTRAINT_CHECK",
	sqlite3.SQLITE_CONSTRAINT_COMMITHOOK: "SQLITE_CONSTRAINT_COMMITHOOK",
	sqlite3.SQLITE_CONSTRAINT_DATATYPE:   "SQLITE_CONSTRAINT_DATATYPE",
	sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY: "SQLITE_CONSTRAINT_FOREIGNKEY",
	sqlite3.SQLITE_CONSTRAINT_NOTNULL:    "SQLITE_CONSTRAINT_NOTNULL",
	sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY: "SQLITE_CONSTRAINT_PRIMARYKEY",
	sqlite3.SQLITE_CONSTRAINT_ROWID:      "SQLITE_CONSTRAINT_ROWID",
	sqlite3.SQLITE_CONSTRAINT_TRIGGER:    "SQLITE_CONSTRAINT_TRIGGER",
	sqlite3.SQLITE_CONSTRAINT_UNIQUE:     "SQLITE_CONSTRAINT_UNIQUE",
}
