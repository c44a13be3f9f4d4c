package redis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// notReady lists the replies of a server that temporarily refuses all commands.
var notReady = []string{"LOADING", "READONLY", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "OOM", "MISCONF", "NOREPLICAS",
	"MOVED", "ASK", "NOAUTH", "WRONGPASS"}

const (
	codeNetwork   = "network"
	codeCrossSlot = "CROSSSLOT"
)

// discarded is the prefix of the reply to an EXEC that the server refuses.
const discarded = "EXECABORT Transaction discarded because of: "

// replyOf returns the error reply of Redis in err.
func replyOf(err error) (string, bool) {
	e, ok := errors.AsType[goredis.Error](err)
	if !ok {
		return "", false
	}
	return strings.TrimPrefix(e.Error(), discarded), true
}

func isReply(err error) bool {
	_, ok := replyOf(err)
	return ok
}

// ofReply gives an error reply its class, and its first word as the code if that is in capitals.
func ofReply(reply string, err error) *provider.Error {
	code, _, _ := strings.Cut(reply, " ")
	if code != strings.ToUpper(code) {
		code = ""
	}
	e := &provider.Error{Class: provider.ClassUnknown, Code: code, Err: err}
	switch {
	case code == codeCrossSlot:
		e.Class = provider.ClassPermanent
		e.Err = fmt.Errorf("the keys of a message must be in one hash slot: give them a common {hash tag}: %w", err)
	case slices.Contains(notReady, code), goredis.IsMaxClientsError(err), errors.Is(err, goredis.TxFailedErr):
		e.Class = provider.ClassTransient
	}
	return e
}

// ofExec gives an error of MULTI/EXEC its class. applied: some of its commands have taken effect.
func ofExec(err error, applied bool) *provider.Error {
	err = fmt.Errorf("exec: %w", err)
	if reply, ok := replyOf(err); ok {
		e := ofReply(reply, err)
		if applied && e.Class == provider.ClassTransient {
			// a retry without limit would apply the other commands each time
			e.Class = provider.ClassUnknown
		}
		return e
	}
	switch {
	case isUnsent(err):
		return &provider.Error{Class: provider.ClassTransient, Code: codeNetwork, Err: err}
	case errors.Is(err, context.Canceled):
		return &provider.Error{Class: provider.ClassShutdown, Err: err}
	case errors.Is(err, context.DeadlineExceeded): // while waiting for a connection
		return transient(provider.CodeDeadline, err)
	case isNetwork(err):
		return &provider.Error{Class: provider.ClassAmbiguous, Code: codeNetwork, Err: err}
	}
	return &provider.Error{Class: provider.ClassUnknown, Err: err}
}

// ofContext returns the error of a context that ended before a command was sent.
func ofContext(err error) *provider.Error {
	if errors.Is(err, context.Canceled) {
		return &provider.Error{Class: provider.ClassShutdown, Err: err}
	}
	return &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline, Err: err}
}

// ofRun gives a handler's error its class, unless it has one. The error may come from Redis, if
// the handler reads through the client. A network error may have any source: it is transient if
// Redis does not reply either.
func (t *transaction) ofRun(ctx context.Context, err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok {
		return err
	}
	switch reply, isReply := replyOf(err); {
	case t.ended:
		return permanent("tx_ended", err)
	case errors.Is(err, eventstore.ErrInvalid):
		return permanent("invalid", err)
	case errors.Is(err, eventstore.ErrEventIDReused):
		return permanent("event_id_reused", err)
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return ofContext(err)
	case isReply:
		return ofReply(reply, err)
	case isOfPool(err), isNetwork(err) && !t.answers(ctx):
		return &provider.Error{Class: provider.ClassTransient, Code: codeNetwork, Err: err}
	}
	return &provider.Error{Class: provider.ClassUnknown, Err: err}
}

// answers reports whether Redis replies within a second.
func (t *transaction) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return t.client.Ping(ctx).Err() == nil
}

// isOfPool reports whether the client provided no connection.
func isOfPool(err error) bool {
	return errors.Is(err, goredis.ErrPoolTimeout) || errors.Is(err, goredis.ErrPoolExhausted) || errors.Is(err, goredis.ErrClosed)
}

// isUnsent reports whether EXEC, the last command, was not completely sent: there was no
// connection, or a write failed.
func isUnsent(err error) bool {
	e, ok := errors.AsType[*net.OpError](err)
	return isOfPool(err) || ok && (e.Op == "dial" || e.Op == "write")
}

func isNetwork(err error) bool {
	_, ok := errors.AsType[net.Error](err)
	return ok || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}
