package redis

import (
	"context"
	"embed"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

//go:embed scripts/*.lua
var scripts embed.FS

var (
	unitScript          = script("unit")
	lookScript          = script("look")
	recordScript        = script("record")
	setCheckpointScript = script("set_checkpoint")
	takeSegmentScript   = script("take_segment")
	getCheckpointScript = script("get_checkpoint")
	pruneAppliedScript  = script("prune_applied")
	stateScript         = script("state")
)

// script returns a script, behind the functions of server.lua.
func script(name string) *goredis.Script {
	shared, _ := scripts.ReadFile("scripts/server.lua") // never fails: the files are part of the program
	own, _ := scripts.ReadFile("scripts/" + name + ".lua")
	return goredis.NewScript(string(shared) + string(own))
}

// answer is the reply of a script that is a list.
type answer []any

func (a answer) text(i int) string {
	if i >= len(a) || a[i] == nil {
		return ""
	}
	return fmt.Sprint(a[i])
}

func (a answer) number(i int) (n int64) {
	_, _ = fmt.Sscan(a.text(i), &n)
	return n
}

// errReply: the reply of a script does not have the form that its script returns.
var errReply = errors.New("a script of Kinora has an unexpected reply")

// run runs a script. An error is a *provider.Error. It is ambiguous if the script may have run.
func (u *Units) run(ctx context.Context, s *goredis.Script, keys []string, args []any) (answer, error) {
	return await(ctx, "a script", func() (answer, error) { return answerOf(s.Run(ctx, u.client, keys, args...)) })
}

// answerOf returns the reply of a script.
func answerOf(cmd *goredis.Cmd) (answer, error) {
	reply, err := cmd.Result()
	if err != nil {
		return nil, ofExec(err, false)
	}
	list, ok := reply.([]any)
	if !ok {
		return nil, &provider.Error{Class: provider.ClassUnknown, Err: errReply}
	}
	return list, nil
}

// await returns the result of send. The client does not notice that a context is canceled, so await waits for the context too:
// then its error is ambiguous.
func await[R any](ctx context.Context, what string, send func() (R, error)) (none R, err error) {
	if err := ctx.Err(); err != nil {
		return none, ofContext(fmt.Errorf("before %s: %w", what, err))
	}
	type replied struct {
		result R
		err    error
	}
	done := make(chan replied, 1)
	go func() {
		r := replied{err: ofExec(errors.New("encoding a command called runtime.Goexit"), false)}
		defer func() {
			if p := recover(); p != nil { // MarshalBinary of a handler's value
				r.err = ofExec(fmt.Errorf("panic while encoding a command: %v", p), false)
			}
			done <- r
		}()
		r.result, r.err = send()
	}()
	select {
	case r := <-done:
		return r.result, r.err
	case <-ctx.Done():
		return none, &provider.Error{Class: provider.ClassAmbiguous, Err: fmt.Errorf("%s has no reply: %w", what, ctx.Err())}
	}
}
