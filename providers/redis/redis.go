package redis

import (
	"context"
	"errors"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Units is provider.Units over a Pipeliner. Its methods are safe for concurrent use.
type Units struct {
	client goredis.UniversalClient
}

var _ provider.Units[goredis.Pipeliner] = (*Units)(nil)

// New returns units of client: a Client, a ClusterClient or a failover client. It sends no
// command. The caller closes client.
//   - A nil client and a Ring are errors.
func New(client goredis.UniversalClient) (*Units, error) {
	if client == nil {
		return nil, errors.New("redis: no client: New requires one")
	}
	if _, ring := client.(*goredis.Ring); ring {
		return nil, errors.New("redis: a Ring has no transaction over its servers: use a client of one server or of a cluster")
	}
	return &Units{client}, nil
}

// Keeps implements provider.Units. Redis keeps no markers and no output, and a unit that fails
// may have an effect.
func (u *Units) Keeps() provider.Keeps { return provider.Keeps{} }

// Do implements provider.Units. It calls run once, and then sends the commands that run has
// queued in one MULTI/EXEC.
//   - Found says that each message is fresh, because Redis has no markers and no parked messages.
//   - The error of a lost connection or server is transient if EXEC was not sent, and ambiguous
//     if it may have been.
//   - If Redis refuses a command, before or inside EXEC, the error is ClassUnknown with the first
//     word of the reply as its code ("WRONGTYPE"), or transient if the server is not ready
//     (LOADING, OOM, READONLY and others).
//   - Keys of several hash slots are permanent, with the code CROSSSLOT.
//   - Output, parked messages, dry runs and units with Switch are permanent errors: use
//     provider.Combine with a store that keeps them.
func (u *Units) Do(ctx context.Context, unit provider.Unit, run func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)) error {
	if unit.DryRun != nil {
		return permanent("dry_run", errors.New("redis has no dry runs"))
	}
	if unit.Switch != nil {
		return permanent("not_kept", errors.New("redis keeps no generations: use provider.Combine"))
	}
	t := &transaction{Pipeliner: u.client.TxPipeline(), client: u.client}
	found := unit.NewFound(true)
	found.Begin = t.begin
	closing, err := run(ctx, t, found)
	if err == nil && len(closing.Output)+len(closing.Park) > 0 {
		err = permanent("not_kept", errors.New("redis keeps no output and no parked messages: use provider.Combine"))
	}
	return t.end(ctx, err)
}

func permanent(code string, err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}
