package redis

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Checkpoint implements provider.Progress. b has a number. On another server than the one that the
// checkpoint was stored on, ModeClosing and ModeLive become ModeCatchUp, and Restored is set.
func (u *Units) Checkpoint(ctx context.Context, b provider.Build) (c provider.Checkpoint, err error) {
	a, err := u.try(ctx, "read the checkpoint", provider.CheckStorable("projector", b.Projector), getCheckpointScript, u.keysOf(b).list[:1])
	if err != nil {
		return c, err
	}
	c.Generation = b.Number()
	var fields answer
	if len(a) == 3 {
		fields, _ = a[2].([]any)
	}
	is := map[string]string{}
	for i := 0; i+1 < len(fields); i += 2 {
		is[fields.text(i)] = fields.text(i + 1)
	}
	if c.Mode = modeOf(a.text(0)); c.Mode == 0 {
		return c, nil
	}
	c.Restored, c.Restoring, c.Lineage = a.number(1) == 1, is["restoring"] == "1", is["lineage"]
	_, _ = fmt.Sscan(is["lost"], &c.Lost)
	s, _ := readSegment(is, "")
	c.Place, c.Token = s.Place, s.Token
	if err := json.Unmarshal([]byte(is["handlers"]), &c.Handlers); err != nil {
		return c, fmt.Errorf("read the checkpoint of %s: its handlers: %w", b, err)
	}
	if splits := is["splits"]; splits != "" && splits != "[]" {
		if err := json.Unmarshal([]byte(splits), &c.Splits); err != nil {
			return c, fmt.Errorf("read the checkpoint of %s: its segments: %w", b, err)
		}
	}
	for _, split := range slices.Backward(c.Splits) { // the oldest one first
		for number := split.First; number < split.First+split.Count; number++ {
			if s, exists := readSegment(is, fmt.Sprintf("segment:%d:", number)); exists {
				s.Number = number
				c.Segments = append(c.Segments, s)
			}
		}
	}
	return c, u.checkServer(ctx)
}

// readSegment returns the place and the token in the fields with a prefix. Of the whole checkpoint, it is "".
func readSegment(is map[string]string, prefix string) (s provider.Segment, exists bool) {
	_, err := fmt.Sscan(is[prefix+"position"], &s.Place.Position)
	s.Place.ID, s.Place.RecordedAt = is[prefix+"id"], timeOf(is[prefix+"recorded"])
	token, _ := hex.DecodeString(is[prefix+"token"]) // what a foreign hand wrote is no token of a reader
	copy(s.Token[:], token)
	return s, err == nil
}

// move runs a script on a checkpoint, unless there is an error already or the server does not keep markers.
func (u *Units) move(ctx context.Context, doing string, err error, s *goredis.Script, b provider.Build, args ...any) (answer, error) {
	if err == nil {
		err = u.checkServer(ctx)
	}
	return u.try(ctx, doing, err, s, u.keysOf(b).list[:1], args...)
}

// try runs a script, unless there is an error already.
func (u *Units) try(ctx context.Context, doing string, err error, s *goredis.Script, keys []string, args ...any) (a answer, _ error) {
	if err == nil {
		a, err = u.run(ctx, s, keys, args)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	return a, nil
}

func listText[T any](all []T) string {
	text, _ := json.Marshal(append([]T{}, all...)) // always has a JSON form
	return string(text)
}

// TakeSegment implements provider.Progress. b has a number.
func (u *Units) TakeSegment(ctx context.Context, b provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	a, err := u.move(ctx, "take a segment", provider.CheckStorable("projector", b.Projector), takeSegmentScript, b, number, token.String())
	was = provider.Segment{Number: number, Place: provider.LogPlace{Position: a.number(1), ID: a.text(2), RecordedAt: timeOf(a.text(3))}}
	return was, a.number(0) == 1, err
}

// SetCheckpoint implements provider.Progress. b has a number.
func (u *Units) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	err := provider.CheckSetCheckpoint(b.Projector, to)
	if err == nil && from.Mode == 0 {
		err = u.unlinkEmptied(ctx, b)
	}
	a, err := u.move(ctx, "set the checkpoint", err, setCheckpointScript, b,
		modeText(from.Mode), from.Place.Position, from.Token.String(), bit(from.Restored), listText(from.Splits), to.Oldest(), bit(provider.KeepsHandlers(from, to)), listText(to.Handlers),
		"mode", modeText(to.Mode), "position", to.Place.Position, "id", to.Place.ID, "recorded", timeText(to.Place.RecordedAt),
		"lineage", to.Lineage, "token", to.Token.String(), "lost", to.Lost,
		"restoring", bit(to.Restoring), "splits", listText(to.Splits))
	return a.number(0) == 1, err
}

const modeEmptied = "emptied"

var modeTexts = [...]string{"", "catch_up", "closing", "live", "ended"}

func modeText(m provider.Mode) string { return modeTexts[m] }

// modeOf returns the mode of a checkpoint; zero if there is none, or the read model was emptied.
func modeOf(text string) provider.Mode {
	return provider.Mode(max(slices.Index(modeTexts[:], text), 0))
}

func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return strconv.FormatInt(t.UnixMicro(), 10)
}

func timeOf(text string) (t time.Time) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		t = time.UnixMicro(n).UTC()
	}
	return t
}

// unlinkEmptied deletes the markers and records of a generation whose read model was emptied. Until it has
// a checkpoint again, no unit of it can commit.
func (u *Units) unlinkEmptied(ctx context.Context, b provider.Build) error {
	k := u.keysOf(b)
	mode, err := u.client.HGet(ctx, k.list[0], "mode").Result()
	if mode != modeEmptied {
		if errors.Is(err, goredis.Nil) {
			err = nil
		}
		return wrapped("look for a checkpoint", err)
	}
	_, err = u.scan(ctx, u.own(k.build, ""), 0, func(node goredis.Cmdable, keys []string) (more bool, err error) {
		return true, unlink(ctx, node, slices.DeleteFunc(keys, func(key string) bool { return key == k.list[0] }))
	})
	return err
}

// Unapplied implements provider.Progress. b has a number.
func (u *Units) Unapplied(ctx context.Context, b provider.Build, messages []provider.Message) ([]bool, error) {
	if err := provider.CheckUnapplied(b.Projector, messages); err != nil {
		return nil, fmt.Errorf("look up markers: %w", err)
	}
	unapplied := make([]bool, 0, len(messages))
	for page := range slices.Chunk(messages, 500) { // of one script
		m := &marked{Units: u, unit: provider.Unit{Projector: b.Projector, Generation: b.Generation, Messages: page}, keys: u.keysOf(b)}
		is, err := m.lookUp(ctx)
		if err != nil {
			return nil, fmt.Errorf("look up markers: %w", err)
		}
		unapplied = append(unapplied, is.checkpoint.Unapplied(page, func(m provider.Marker) bool { return is.marked[m] })...)
	}
	return unapplied, nil
}

// PruneApplied implements provider.Progress. b has a number.
func (u *Units) PruneApplied(ctx context.Context, b provider.Build, handlers []string, limit int) (int, error) {
	k := u.keysOf(b)
	sets := k.list[:1]
	for _, h := range append([]string{noHandler}, handlers...) {
		sets = append(sets, k.events(h))
	}
	a, err := u.try(ctx, "prune applied", provider.CheckPrune(b.Projector, handlers), pruneAppliedScript, sets, limit)
	return int(a.number(0)), err
}

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
func (u *Units) Unlogged(ctx context.Context, b provider.Build, handler, after string, limit int) ([]string, error) {
	if err := provider.CheckPrune(b.Projector, []string{handler}); err != nil {
		return nil, fmt.Errorf("look up markers: %w", err)
	}
	k := u.keysOf(b)
	others := k.others(handler)
	first := int64(0)
	if after != "" {
		rank, err := u.client.ZRank(ctx, others, member(after)).Result()
		if err != nil && !errors.Is(err, goredis.Nil) { // it may have been pruned: from the beginning then
			return nil, wrapped("look up markers", err)
		}
		if err == nil {
			first = rank + 1
		}
	}
	ids, err := u.client.ZRange(ctx, others, first, first+int64(limit)-1).Result()
	for i := range ids {
		ids[i] = idOf(ids[i])
	}
	return ids, wrapped("look up markers", err)
}

// wrapped returns err with its class, after a verb.
func wrapped(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, ofExec(err, false))
}
