package main

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/task"
)

// codeSteps are the steps of a kind in two versions of its code. "gate" is a wait.
var codeSteps = map[string]struct {
	old, later []string
	goesOn     bool   // tasks that began with the old steps go on with the later ones
	names      string // both names of the error, if they do not
}{
	"renamed":  {[]string{"pack", "send", "gate", "bill"}, []string{"pack", "ship", "gate", "bill"}, false, `step "send" when it ran, and is "ship" now`},
	"added":    {[]string{"pack", "send", "gate", "bill"}, []string{"check", "pack", "send", "gate", "bill"}, false, `step "pack" when it ran, and is "check" now`},
	"removed":  {[]string{"pack", "send", "gate", "bill"}, []string{"pack", "gate", "bill"}, false, `step "send" when it ran, and is "gate" now`},
	"appended": {[]string{"pack", "send", "gate", "bill"}, []string{"pack", "send", "gate", "bill", "thank"}, true, ""},
}

// code is the program: its later version also has the kind "new".
func (w *work) code() (kinds []task.Kind[pgx.Tx]) {
	for name, c := range codeSteps {
		steps := c.old
		if w.More["later"] != "" {
			steps = c.later
		}
		kinds = append(kinds, task.Define("code/"+name, func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
			defer w.busy()()
			for _, step := range steps {
				if step == "gate" {
					if _, err := task.Wait[string](ctx, r, step, 0); err != nil {
						return "", err
					}
					continue
				}
				_, err := task.Step(ctx, r, step, func(ctx context.Context, key string) (string, error) { return w.call(ctx, "shop", key) }, nil)
				if err != nil {
					return "", err
				}
			}
			return w.Name, nil
		}))
	}
	if w.More["later"] != "" {
		kinds = append(kinds, task.Define("code/new", func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
			return w.call(ctx, "shop", r.Key())
		}))
	}
	return kinds
}

// killers is a program whose tasks call a system. Some of them end their process first.
func (w *work) killers() []task.Kind[pgx.Tx] {
	return []task.Kind[pgx.Tx]{task.Define("killers/call", func(ctx context.Context, r *task.Run[pgx.Tx], kills bool) (string, error) {
		defer w.busy()()
		if kills {
			w.trace.printf("killer %s", r.ID())
			pause(ctx, 10*time.Millisecond)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		ref, err := w.call(ctx, "shop", r.Key())
		pause(ctx, 40*time.Millisecond) // a killer kills at the same time
		return ref, err
	})}
}

func codeID(kind string, n int) string { return fmt.Sprintf("%s-%d", kind, n) }
