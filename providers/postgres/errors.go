package postgres

import (
	"context"
	"errors"
	"hash/fnv"
	"io"
	"net"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
)

// SQLSTATEs that are read one by one.
const (
	uniqueViolation     = "23505"
	undefinedTable      = "42P01"
	invalidSchemaName   = "3F000"
	lockNotAvailable    = "55P03"
	inFailedTransaction = "25P02"
	deadlockDetected    = "40P01"
	serializationFailed = "40001"
	queryCanceled       = "57014"
	syntaxError         = "42601"

	// The session was ended for that, or for its transaction's length: nothing was committed, but that the latter may come in the
	// microseconds in which a commit ends. Then the marker decides, when the message is tried again.
	idleInTransaction  = "25P03"
	transactionTooLong = "25P04"
)

// copyFailed is the server's routine that says 57014 where the client broke off a COPY: its rows could not be read, or encoded.
const copyFailed = "CopyGetData"

// Advisory locks: a class for each use, and a key of a fixed hash (FNV-1a), never hashtext, which may change
// from version to version. A collision only makes two names share a lock.
const (
	lockClassMigrate = 1802661486
	lockClassFence   = 1802661488 // 1802661487 is the gap lock's, in migration 1
	lockClassHold    = 1802661489
	lockClassAttempt = 1802661490
)

func lockKey(name string) int32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return int32(h.Sum32())
}

// orderedKey is the lock of a key that wants the order of commits: one of 64 bits, which is none of the above.
func orderedKey(schema, topic, key string) int64 {
	h := fnv.New64a()
	for _, part := range []string{schema, topic, key} {
		_, _ = h.Write([]byte(part))
		_, _ = h.Write([]byte{0}) // no part holds one
	}
	return int64(h.Sum64())
}

func pgError(err error) *pgconn.PgError {
	e, _ := errors.AsType[*pgconn.PgError](err)
	return e
}

// violates tells whether err is a breach of this unique constraint.
func violates(err error, constraint string) bool {
	e := pgError(err)
	return e != nil && e.Code == uniqueViolation && e.ConstraintName == constraint
}

// ours is how the server names one of Kinora's tables that is not there, or its schema.
var ours = regexp.MustCompile(`\.(streams|events|outbox|markers|floors|generations|parked|attempts|inflight|runners|migrations)"`)

// clear makes what a missing schema says plain.
func clear(err error) error {
	if e := pgError(err); e != nil && (e.Code == undefinedTable || e.Code == invalidSchemaName) && ours.MatchString(e.Message) {
		return errors.Join(ErrNotMigrated, err)
	}
	return err
}

// class says what to do about an error of a statement. Errors that are classed already keep their class.
func class(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*projector.Error](err); ok {
		return err
	}
	c, code := projector.UnknownClass, ""
	switch e := pgError(err); {
	case errors.Is(err, eventstore.ErrEventIDReused) && !violates(err, "events_id_key"): // which is of this moment alone
		c, code = projector.PermanentClass, "event_id_reused"
	case e != nil:
		c, code = classOfState(e.Code), e.Code
		if e.Code == queryCanceled && e.Routine == copyFailed {
			c = projector.UnknownClass
		}
	case errors.Is(err, eventstore.ErrInvalid):
		c, code = projector.PermanentClass, "invalid"
	case isNetwork(err):
		c, code = projector.Transient, "network"
	}
	return &projector.Error{Class: c, Code: code, Err: clear(err)}
}

// classOfState follows docs/architecture.md: 40 (rollback), 55P03 (lock timeout), 53 (resources), 08
// (connection) and 57 (operator) are the world's fault; 22 (data) never gets better.
func classOfState(state string) projector.Class {
	switch {
	case state == lockNotAvailable:
		return projector.Transient
	case len(state) != 5:
		return projector.UnknownClass
	}
	switch state[:2] {
	case "40", "53", "08", "57":
		return projector.Transient
	case "22":
		return projector.PermanentClass
	}
	return projector.UnknownClass
}

// isNetwork tells whether the connection failed, not the statement. A caller's own deadline is neither, but
// connecting has one of its own.
func isNetwork(err error) bool {
	if isConnect(err) {
		return true
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	_, network := errors.AsType[net.Error](err)
	return network || errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed)
}

// ofHandler is an error of a handler's, whose unit's connection is in order: what looks like that of a network is of something else,
// unless only PostgreSQL has it, as where the handler reads through a pool. A break that such a pool meets as it is (an unexpected EOF, a
// reset), and that the unit's connection has not, is not told from that, and counts once.
func ofHandler(err error) error {
	if _, ok := errors.AsType[*projector.Error](err); ok || err == nil || pgError(err) != nil || !isNetwork(err) ||
		isConnect(err) || errors.Is(err, pgconn.ErrConnClosed) {
		return err
	}
	return &projector.Error{Class: projector.UnknownClass, Err: err}
}

// unbegun is the class of an error from before a unit was under way: no message's fault.
func unbegun(ctx context.Context, err error) error {
	err = class(err)
	if e, ok := errors.AsType[*projector.Error](err); ok && ctx.Err() == nil && e.Class != projector.Transient {
		return &projector.Error{Class: projector.Transient, Code: e.Code, Err: e.Err}
	}
	return err
}

// isOwnTrouble tells whether the server refused statements of Kinora's own whatever the message, as err is that of one: only what
// class 22 (data) says, and 54 (limits), may be the message's.
func isOwnTrouble(err error) bool {
	e := pgError(err)
	return e != nil && !strings.HasPrefix(e.Code, "22") && !strings.HasPrefix(e.Code, "54")
}

func isConnect(err error) bool {
	_, ok := errors.AsType[*pgconn.ConnectError](err)
	return ok && !errors.Is(err, context.Canceled)
}

// maybeDone tells whether a statement may have been carried out although its reply is this error: it was sent,
// and nobody who knows said that it failed. A FATAL error, or one of class 08, may be a pooler's, whose
// connection to the server broke. SafeToRetry is not believed of a closed connection: see docs/adr/0005.
func maybeDone(err error) bool {
	if err == nil || isConnect(err) {
		return false
	}
	if e := pgError(err); e != nil {
		return e.Severity == "FATAL" || e.Severity == "PANIC" || strings.HasPrefix(e.Code, "08")
	}
	return errors.Is(err, pgconn.ErrConnClosed) || !pgconn.SafeToRetry(err)
}

// inDoubt tells whether a unit may have been committed although err is what its commit met.
func inDoubt(err error) bool { return !endedIdle(err) && maybeDone(err) }

// endedIdle tells whether the server ended the session before the commit.
func endedIdle(err error) bool {
	e := pgError(err)
	return e != nil && (e.Code == idleInTransaction || e.Code == transactionTooLong)
}
