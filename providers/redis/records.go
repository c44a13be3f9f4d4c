package redis

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Outcomes implements provider.MarkerUnits.
func (u *Units) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	if err := provider.CheckQuestions(questions); err != nil {
		return nil, fmt.Errorf("look up outcomes: %w", err)
	}
	outcomes, asked := make([]provider.Outcome, len(questions)), map[provider.Build][]int{}
	for i := range questions {
		q := &questions[i]
		b := provider.Build{Projector: q.Projector(), Generation: q.Generation}
		asked[b] = append(asked[b], i)
	}
	for b, all := range asked {
		m := &marked{Units: u, unit: provider.Unit{Projector: b.Projector, Generation: b.Generation}, keys: u.keysOf(b)}
		for _, i := range all {
			q := &questions[i]
			m.unit.Messages = append(m.unit.Messages, provider.Message{ID: q.MessageID, Handlers: []provider.Handler{{Name: q.Handler, Was: q.Was}}})
		}
		is, err := m.lookUp(ctx)
		if err != nil {
			return nil, fmt.Errorf("look up outcomes: %w", err)
		}
		pruned, err := u.client.HGetAll(ctx, u.own(b.String(), "pruned")).Result()
		if err != nil {
			return nil, fmt.Errorf("look up outcomes: %w", ofExec(err, false))
		}
		for n, i := range all {
			f := provider.Facts{
				Checkpoint: is.checkpoint,
				Marked: func(handler string) bool {
					return is.marked[provider.Marker{Handler: handler, MessageID: questions[i].MessageID}]
				},
				Pruned: func(handler string) (before time.Time) {
					if ms, err := strconv.ParseInt(pruned[handler], 10, 64); err == nil {
						before = time.UnixMilli(ms)
					}
					return before
				},
			}
			if outcomes[i] = questions[i].Outcome(f); is.records[n] != "" {
				outcomes[i] = provider.OutcomeWaiting
			}
		}
	}
	return outcomes, nil
}

// Prune implements provider.MarkerUnits. Markers of events are left to PruneApplied: their age is not
// known.
func (u *Units) Prune(ctx context.Context, b provider.Build, handlers []string, window time.Duration, limit int) (n int, err error) {
	if err := provider.CheckPrune(b.Projector, handlers); err != nil {
		return 0, fmt.Errorf("prune: %w", err)
	}
	before, k := time.Now().Add(-window).UnixMilli(), u.keysOf(b) //nolint:forbidigo // markers have times of this process' clock
	for _, h := range append([]string{noHandler}, handlers...) {
		old, err := u.client.ZRangeByScoreWithScores(ctx, k.others(h), &goredis.ZRangeBy{Min: "-inf", Max: strconv.FormatInt(before, 10), Count: int64(limit)}).Result()
		if err != nil {
			return n, fmt.Errorf("prune: %w", ofExec(err, false))
		}
		if len(old) == 0 {
			continue
		}
		members := make([]any, len(old))
		for i, z := range old {
			members[i] = z.Member
		}
		_, err = u.client.TxPipelined(ctx, func(p goredis.Pipeliner) error {
			p.HSet(ctx, u.own(b.String(), "pruned"), h, int64(old[len(old)-1].Score))
			p.ZRem(ctx, k.others(h), members...)
			return nil
		})
		if err != nil {
			return n, fmt.Errorf("prune: %w", ofExec(err, false))
		}
		n += len(old)
	}
	return n, nil
}

// Asides implements provider.MarkerUnits.
func (u *Units) Asides(ctx context.Context, b provider.Build) (map[string]int64, error) {
	all, err := u.client.HGetAll(ctx, u.keysOf(b).list[1]).Result()
	if err != nil {
		return nil, fmt.Errorf("list records of parked messages: %w", ofExec(err, false))
	}
	asides := make(map[string]int64, len(all))
	for m, record := range all {
		position, _ := strconv.ParseInt(strings.TrimPrefix(record, "partly "), 10, 64)
		asides[idOf(m)] = position
	}
	return asides, nil
}

// Forget implements provider.MarkerUnits.
func (u *Units) Forget(ctx context.Context, b provider.Build, ids []string) error {
	members := make([]string, len(ids))
	for i, id := range ids {
		members[i] = member(id)
	}
	return wrapped("delete records of parked messages", u.client.HDel(ctx, u.keysOf(b).list[1], members...).Err())
}

// Unlogged implements provider.MarkerUnits.
func (u *Units) Unlogged(ctx context.Context, b provider.Build, handlers []string) (bool, error) {
	if err := provider.CheckPrune(b.Projector, handlers); err != nil {
		return false, fmt.Errorf("look up markers: %w", err)
	}
	k := u.keysOf(b)
	for _, h := range handlers {
		n, err := u.client.Exists(ctx, k.others(h)).Result()
		if n > 0 || err != nil {
			return n > 0, wrapped("look up markers", err)
		}
	}
	return false, nil
}

// wrapped returns err with its class, after a verb.
func wrapped(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, ofExec(err, false))
}
