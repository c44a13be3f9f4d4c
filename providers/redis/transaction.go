package redis

import (
	"context"
	"errors"
	"fmt"

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

// Pipelined returns ErrEnded and makes the unit fail.
func (t *transaction) Pipelined(ctx context.Context, _ func(goredis.Pipeliner) error) ([]goredis.Cmder, error) {
	return t.Exec(ctx)
}

// TxPipelined returns ErrEnded and makes the unit fail.
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

// reserved lists commands that would end the transaction or change the connection, which others
// use after it.
var reserved = setOf([]string{"multi", "exec", "discard", "watch", "unwatch", "select", "auth", "hello", "reset", "quit", "client",
	"subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe", "monitor", "asking", "readonly", "readwrite"})

// noScript lists commands that a script cannot run.
var noScript = setOf([]string{"eval", "evalsha", "eval_ro", "evalsha_ro", "fcall", "fcall_ro", "script", "function", "blpop", "brpop", "blmove",
	"brpoplpush", "bzpopmin", "bzpopmax", "blmpop", "bzmpop", "wait", "waitaof", "xread", "xreadgroup"})

// refused returns an error if a handler has ended the transaction, or has queued a command that cannot
// be part of it.
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
	if err := ctx.Err(); err != nil {
		return ofContext(fmt.Errorf("before EXEC: %w", err))
	}
	return t.send(ctx)
}

// send runs MULTI/EXEC. The client does not notice that a context is canceled, so send waits for
// the context too.
func (t *transaction) send(ctx context.Context) error {
	type replied struct {
		cmds []goredis.Cmder
		err  error
	}
	done := make(chan replied, 1)
	go func() {
		r := replied{err: errors.New("encoding a command called runtime.Goexit")}
		defer func() {
			// MarshalBinary of a handler's value
			if p := recover(); p != nil {
				r.err = fmt.Errorf("panic while encoding a command: %v", p)
			}
			done <- r
		}()
		r.cmds, r.err = t.Pipeliner.Exec(ctx)
	}()
	select {
	case r := <-done:
		return t.result(r.cmds, r.err)
	case <-ctx.Done():
		return &provider.Error{Class: provider.ClassAmbiguous, Err: fmt.Errorf("EXEC has no reply: %w", ctx.Err())}
	}
}

// result returns the error of the commands that were sent, or nil.
func (t *transaction) result(cmds []goredis.Cmder, err error) error {
	// all commands without a reply have this error
	if err != nil && !isReply(err) {
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
		e = &provider.Error{Class: provider.ClassPermanent, Code: provider.CodePartly, Err: e}
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
