//go:build kinora_fault

package crash

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Env names the point at which the process kills itself, and optionally when: "commit: after#3".
const Env = "KINORA_CRASH_POINT"

// EnvStops, if not empty, makes the process stop there with SIGSTOP. It continues after SIGCONT.
const EnvStops = "KINORA_CRASH_STOPS"

var (
	armed, last = split(os.Getenv(Env))
	passed      atomic.Int64
	watch       atomic.Pointer[func(string)]
	stops       = os.Getenv(EnvStops) != ""
)

func split(text string) (name string, n int64) {
	name, count, _ := strings.Cut(text, "#")
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		n = 1
	}
	return name, n
}

// Point kills the process with SIGKILL, or stops it with EnvStops, if Env names this point and this is its turn.
func Point(name string) {
	if f := watch.Load(); f != nil {
		(*f)(name)
	}
	if name == armed && passed.Add(1) == last {
		if stops {
			_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			return
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// Watch sets a function that is called at each point, before the process dies there.
func Watch(f func(name string)) { watch.Store(&f) }
