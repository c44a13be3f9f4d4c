package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// ErrUnsafe means that the server would not keep markers: it evicts keys, or does not show what it is.
var ErrUnsafe = errors.New("redis: the server does not keep markers")

// ReadyFor implements provider.ReadyChecker. With OwnMarkers it returns ErrUnsafe if
//   - maxmemory-policy is one of allkeys-*: Redis may delete markers when its memory is full. With
//     volatile-* it may not, because markers have no expiry;
//   - INFO does not show the id of the server (run_id), by which a restart is noticed.
//
// The server is checked again after each restart.
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
