package redis

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Units is provider.MarkerUnits over a Pipeliner. Its methods are safe for concurrent use. Pass it
// to provider.Combine.
type Units struct {
	client goredis.UniversalClient
	cfg    Config
	tag    string // "{tag}", or ""

	checked  atomic.Pointer[string]                          // the server whose settings were checked
	scans    sync.Map                                        // cursors by generation and table: where ClearGeneration continues
	commands atomic.Pointer[map[string]*goredis.CommandInfo] // of a cluster; see checkSlots
}

var _ provider.MarkerUnits[goredis.Pipeliner] = (*Units)(nil)

// New returns units of client: a Client, a ClusterClient or a failover client. It sends no
// command. The caller closes client. A nil cfg means the default.
//   - A nil client and a Ring are errors, and so is an invalid cfg.
//   - With OwnMarkers in a cluster, cfg.HashTag is required, and the client must read from masters.
func New(client goredis.UniversalClient, cfg *Config) (*Units, error) {
	u := &Units{client: client}
	if cfg != nil {
		u.cfg = *cfg
	}
	if err := u.cfg.validate(client); err != nil {
		return nil, err
	}
	if u.cfg.HashTag != "" {
		u.tag = "{" + u.cfg.HashTag + "}"
	}
	return u, nil
}

// Keeps implements provider.Units. Redis undoes nothing: a unit that fails may have an effect.
func (u *Units) Keeps() provider.Keeps {
	return provider.Keeps{Markers: u.cfg.OwnMarkers, Tables: u.cfg.OwnMarkers}
}

// Do implements provider.Units. It calls run once, with a Found in which each message is fresh, and sends the
// commands that run has queued in one MULTI/EXEC.
//   - The error of a lost connection or server is transient if EXEC was not sent, and ambiguous if it may have
//     been.
//   - If Redis refuses a command, the error is ClassUnknown with the first word of the reply as its code
//     ("WRONGTYPE"), or transient if the server is not ready (LOADING, OOM, READONLY and others). If other
//     commands of the message took effect, it is permanent with CodePartly.
//   - Keys of several hash slots are permanent, with the code CROSSSLOT.
//   - Output, parked messages, dry runs and units with Switch are permanent errors: use provider.Combine with a
//     store that keeps them. With OwnMarkers, all units are.
func (u *Units) Do(ctx context.Context, unit provider.Unit, run func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)) error {
	if u.cfg.OwnMarkers {
		return permanent("not_kept", errors.New("redis keeps no parked messages: use provider.Combine"))
	}
	return u.exec(ctx, unit, func(ctx context.Context, p goredis.Pipeliner, found provider.Found) (provider.Closing, error) {
		c, err := run(ctx, p, found)
		if err == nil && len(c.Output)+len(c.Park) > 0 {
			err = permanent("not_kept", errors.New("redis keeps no output and no parked messages: use provider.Combine"))
		}
		return c, err
	})
}

// exec runs a unit without markers.
func (u *Units) exec(ctx context.Context, unit provider.Unit, run func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)) error {
	if unit.DryRun != nil {
		return permanent("dry_run", errors.New("redis has no dry runs"))
	}
	if unit.Switch != nil {
		return permanent("not_kept", errors.New("redis keeps no generations: use provider.Combine"))
	}
	t := &transaction{Pipeliner: u.client.TxPipeline(), client: u.client}
	found := unit.NewFound(true)
	found.Begin = t.begin
	_, err := run(ctx, t, found)
	return t.end(ctx, err)
}

func permanent(code string, err error) *provider.Error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}

func transient(code string, err error) *provider.Error {
	return &provider.Error{Class: provider.ClassTransient, Code: code, Err: err}
}

// Config configures Units. The zero value is the default.
type Config struct {
	// OwnMarkers keeps markers and checkpoints in Redis, so that a message takes effect once: see the
	// package documentation.
	OwnMarkers bool
	// HashTag is in the keys of Kinora, and in those that Units.Key returns: "{shop}". Required in a cluster
	// with OwnMarkers. At most 40 letters, digits, "-" and "_", like Prefix.
	HashTag string
	// Prefix begins the keys of Kinora. Empty means "kinora". Units with the same prefix and hash tag
	// share their markers.
	Prefix string
}

var nameRE = regexp.MustCompile(`^[a-zA-Z0-9_-]{0,40}$`)

func (c *Config) validate(client goredis.UniversalClient) error {
	if !nameRE.MatchString(c.HashTag) || !nameRE.MatchString(c.Prefix) {
		return fmt.Errorf("redis: HashTag is %q and Prefix %q: use at most 40 letters, digits, '-' and '_'", c.HashTag, c.Prefix)
	}
	c.Prefix = cmp.Or(c.Prefix, "kinora")
	switch cluster := client.(type) {
	case nil:
		return errors.New("redis: no client: New requires one")
	case *goredis.Ring:
		return errors.New("redis: a Ring has no transaction over its servers: use a client of one server or of a cluster")
	case *goredis.ClusterClient:
		o := cluster.Options()
		switch {
		case !c.OwnMarkers:
		case c.HashTag == "":
			return errors.New("redis: OwnMarkers in a cluster require a HashTag: the keys of a message must be in one hash slot")
		case o.ReadOnly || o.RouteByLatency || o.RouteRandomly:
			return errors.New("redis: OwnMarkers require a client that reads from masters: leave ReadOnly, RouteByLatency and RouteRandomly off")
		}
	}
	return nil
}

// ErrUnsafe means that the server would not keep markers: it evicts keys, or does not show what it is.
var ErrUnsafe = errors.New("redis: the server does not keep markers")

// ReadyFor implements provider.ReadyChecker. With OwnMarkers, after each start of the server, it returns ErrUnsafe if
//   - maxmemory-policy is one of allkeys-*: Redis may evict markers, which have no expiry, unlike with volatile-*;
//   - INFO is not allowed, or does not show the id of the server (run_id), by which a restart is noticed.
func (u *Units) ReadyFor(ctx context.Context, _ provider.Service) error {
	if !u.cfg.OwnMarkers {
		return nil
	}
	err := u.checkServer(ctx)
	if reply, _ := replyOf(err); strings.HasPrefix(reply, "NOPERM") {
		return fmt.Errorf("%w: INFO is not allowed, so a restart could not be noticed: %w", ErrUnsafe, err)
	}
	if errors.Is(err, ErrUnsafe) {
		return err
	}
	return nil // it is only unreachable
}

// checkServer checks the settings of the server, once for each of its lives.
func (u *Units) checkServer(ctx context.Context) error {
	node, err := u.nodeOf(ctx, u.own("shown"))
	if err != nil {
		return wrapped("check the server", err)
	}
	text, err := node.Info(ctx, "server").Result()
	if err != nil {
		return wrapped("check the server", err)
	}
	id := infoOf(text, "run_id")
	if id == "" {
		return fmt.Errorf("%w: INFO has no run_id, so a restart could not be noticed", ErrUnsafe)
	}
	if checked := u.checked.Load(); checked != nil && *checked == id {
		return nil
	}
	if text, err = node.Info(ctx, "memory").Result(); err != nil {
		return wrapped("check the server", err)
	}
	policy := infoOf(text, "maxmemory_policy")
	if policy == "" || strings.HasPrefix(policy, "allkeys-") {
		return fmt.Errorf("%w: maxmemory-policy is %q: set noeviction or one of volatile-*, or use another server for other data", ErrUnsafe, policy)
	}
	u.checked.Store(&id)
	return nil
}

// infoOf returns a field of INFO, or "".
func infoOf(text, field string) string {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

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
