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

// ErrEnded means that a handler tried to send or discard its commands, or queued a command that
// ends the transaction or changes the connection.
var ErrEnded = errors.New("redis: a handler must only queue commands: the unit sends them")

// transaction is the pipeliner that handlers get. Only end sends the commands.
type transaction struct {
	goredis.Pipeliner
	client goredis.UniversalClient
	starts []start // in order of commands
	ended  bool    // a handler called Exec, Discard, Pipelined or TxPipelined

	marked  *marked        // nil: the commands are sent in one MULTI/EXEC
	watches map[int]*watch // by message
}

// start records that the commands from this index on belong to a message.
type start struct{ command, message int }

// Exec returns ErrEnded and makes the unit fail.
func (t *transaction) Exec(context.Context) ([]goredis.Cmder, error) {
	t.ended = true
	return nil, ErrEnded
}

// Discard makes the unit fail.
func (t *transaction) Discard() { t.ended = true }

// Pipelined is like Exec.
func (t *transaction) Pipelined(ctx context.Context, _ func(goredis.Pipeliner) error) ([]goredis.Cmder, error) {
	return t.Exec(ctx)
}

// TxPipelined is like Exec.
func (t *transaction) TxPipelined(ctx context.Context, _ func(goredis.Pipeliner) error) ([]goredis.Cmder, error) {
	return t.Exec(ctx)
}

// Pipeline returns t.
func (t *transaction) Pipeline() goredis.Pipeliner { return t }

// TxPipeline returns t.
func (t *transaction) TxPipeline() goredis.Pipeliner { return t }

// begin records that the next commands belong to a message.
func (t *transaction) begin(message int) {
	t.starts = append(t.starts, start{t.Len(), message})
}

// reserved lists commands that would end the transaction, or change the connection for others.
var reserved = setOf([]string{"multi", "exec", "discard", "watch", "unwatch", "select", "auth", "hello", "reset", "quit", "client",
	"subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe", "monitor", "asking", "readonly", "readwrite"})

// noScript lists commands that a script cannot run.
var noScript = setOf([]string{"eval", "evalsha", "eval_ro", "evalsha_ro", "fcall", "fcall_ro", "script", "function", "blpop", "brpop", "blmove",
	"brpoplpush", "bzpopmin", "bzpopmax", "blmpop", "bzmpop", "wait", "waitaof", "xread", "xreadgroup"})

// refused returns an error if a handler has ended the transaction, or queued a command that cannot be part of it.
func (t *transaction) refused() error {
	for _, cmd := range t.Cmds() {
		name := cmd.Name() // in lower case
		if reserved[name] {
			return permanent("tx_ended", fmt.Errorf("%w: %s", ErrEnded, cmd.Name()))
		}
		if t.marked != nil && noScript[name] {
			return permanent("no_script", fmt.Errorf("redis: with OwnMarkers, a handler cannot use %s: its commands are run by a script", cmd.Name()))
		}
	}
	if t.ended {
		return permanent("tx_ended", ErrEnded)
	}
	return nil
}

// end sends the commands, unless the unit has failed. It returns an *Error.
func (t *transaction) end(ctx context.Context, failed error) error {
	if failed != nil {
		return t.ofRun(ctx, failed)
	}
	if err := t.refused(); err != nil {
		return err
	}
	_, err := await(ctx, "EXEC", func() (any, error) { return nil, t.result(t.Pipeliner.Exec(ctx)) })
	return err
}

// result returns the error of the commands that were sent, or nil.
func (t *transaction) result(cmds []goredis.Cmder, err error) error {
	if _, isReply := replyOf(err); err != nil && !isReply { // all commands without a reply have this error
		return ofExec(err, true)
	}
	if errors.Is(err, goredis.Nil) {
		err = nil // a null reply is not an error
	}
	first, applied := -1, map[int]bool{}
	for i, cmd := range cmds {
		switch one := cmd.Err(); {
		case one == nil || errors.Is(one, goredis.Nil):
			applied[t.messageOf(i)] = true
		case first < 0 && !goredis.IsExecAbortError(one):
			first = i
		}
	}
	if first < 0 {
		if err == nil {
			return nil
		}
		return ofExec(err, len(applied) > 0)
	}
	e := ofExec(fmt.Errorf("%s: %w", cmds[first].Name(), cmds[first].Err()), len(applied) > 0)
	m := t.messageOf(first)
	if m < 0 {
		return e
	}
	if applied[m] {
		e = permanent(provider.CodePartly, e)
	}
	others := len(applied) > 1 || len(applied) == 1 && !applied[m]
	e.Err = &provider.MessageError{Message: m, Others: others, Err: e.Err}
	return e
}

// messageOf returns the message of a command, or -1.
func (t *transaction) messageOf(command int) int {
	message := -1
	for _, s := range t.starts {
		if s.command <= command {
			message = s.message
		}
	}
	return message
}

// watch is a connection on which keys are watched for a message.
type watch struct {
	conn *goredis.Conn // nil: it was given back
}

// end gives the connection back. watches: EXEC was not called.
func (w *watch) end(watches bool) {
	if w.conn == nil {
		return
	}
	if watches {
		w.conn.Do(context.Background(), "unwatch") // or EXEC of another user of the connection fails
	}
	_ = w.conn.Close()
	w.conn = nil
}

// Watch calls read with a client that reads keys in the middle of a handler. If another client changes
// one of the keys before the handler's commands are applied, nothing is applied, and the handler runs
// again. So a handler can compute a value from the one that it reads. tx is the handler's transaction.
//   - read sees the effects of all earlier messages, but not the commands that the handler has queued. It
//     must only read. A message that reads so runs in a unit without other messages before it.
//   - The handler must return the error of Watch.
//   - Watch requires Config.OwnMarkers. In a cluster, keys must be in the hash slot of the unit's.
func Watch(ctx context.Context, tx goredis.Pipeliner, read func(ctx context.Context, c goredis.Cmdable) error, keys ...string) error {
	t, ok := tx.(*transaction)
	if !ok || t.marked == nil {
		return permanent("no_watch", errors.New("redis: Watch requires the transaction of a handler, and Config.OwnMarkers"))
	}
	if len(keys) == 0 || len(t.starts) == 0 {
		return permanent("no_watch", errors.New("redis: Watch requires keys, and a message"))
	}
	if err := t.marked.checkKeys("watch", keys); err != nil {
		return err
	}
	message := t.starts[len(t.starts)-1].message
	w := t.watches[message]
	if w == nil {
		if len(t.starts) > 1 { // what they have queued is not visible yet
			return &provider.Error{Class: provider.ClassUnknown, Code: "watch", Err: &provider.MessageError{
				Message: message, Err: errors.New("a message that reads with Watch runs without others before it"),
			}}
		}
		node, err := t.marked.nodeOf(ctx, t.marked.keys.list[0])
		client, is := node.(*goredis.Client)
		if err == nil && !is {
			err = fmt.Errorf("redis: Watch does not support a client of type %T", node)
		}
		if err != nil {
			return ofExec(err, false)
		}
		w = &watch{conn: client.Conn()}
		t.watches = map[int]*watch{message: w}
	}
	if err := w.conn.Do(ctx, append([]any{"watch"}, anys(keys)...)...).Err(); err != nil {
		return ofExec(err, false)
	}
	return read(ctx, w.conn)
}

func anys(keys []string) []any {
	all := make([]any, len(keys))
	for i, k := range keys {
		all[i] = k
	}
	return all
}

// unwatch gives back the connections of the unit's watches.
func (t *transaction) unwatch() {
	for _, w := range t.watches {
		w.end(true)
	}
	t.watches = nil
}

// execWatched runs the script of a message in a transaction that fails if a watched key has changed.
func (m *marked) execWatched(ctx context.Context, w *watch, args []any) (answer, error) {
	var cmd *goredis.Cmd
	_, err := w.conn.TxPipelined(ctx, func(p goredis.Pipeliner) error {
		cmd = unitScript.Eval(ctx, p, m.keys.list, args...)
		return nil
	})
	w.end(false)
	if errors.Is(err, goredis.TxFailedErr) {
		return nil, errChanged
	}
	if err != nil {
		return nil, ofExec(err, false)
	}
	return answerOf(cmd)
}

// notReady lists the replies of a server that temporarily refuses all commands.
var notReady = []string{"LOADING", "READONLY", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "OOM", "MISCONF", "NOREPLICAS",
	"MOVED", "ASK", "NOAUTH", "WRONGPASS"}

const (
	codeNetwork   = "network"
	codeCrossSlot = "CROSSSLOT"
)

// replyOf returns the error reply of Redis in err, also of an EXEC that the server refuses because of it.
func replyOf(err error) (string, bool) {
	e, ok := errors.AsType[goredis.Error](err)
	if !ok {
		return "", false
	}
	return strings.TrimPrefix(e.Error(), "EXECABORT Transaction discarded because of: "), true
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
		if applied && e.Class == provider.ClassTransient { // a retry without limit would apply the others each time
			e.Class = provider.ClassUnknown
		}
		return e
	}
	switch {
	case isUnsent(err):
		return transient(codeNetwork, err)
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

// ofRun gives a handler's error its class, unless it has one. It may come from Redis, if the handler reads
// through the client. A network error may have any source: it is transient if Redis does not reply either.
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
		return transient(codeNetwork, err)
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

// isUnsent reports whether EXEC was not completely sent: there was no connection, or a write failed.
func isUnsent(err error) bool {
	e, ok := errors.AsType[*net.OpError](err)
	return isOfPool(err) || ok && (e.Op == "dial" || e.Op == "write")
}

func isNetwork(err error) bool {
	_, ok := errors.AsType[net.Error](err)
	return ok || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}
