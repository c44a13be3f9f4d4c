package redis

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// A table is a set of keys: its name with the hash tag, and all keys that begin with that and a colon.
// A generation has its own tables, with its suffix in their names. Which of them readers see is in one
// hash, shown, by the plain names.

// Shown returns the names of the tables of the live generation for names in projector.Options.Tables. Pass them
// to Key. Readers of several keys or tables call it once, so that they see one generation. If events must never
// vanish, they call it again after they have read, and read again if the names have changed: the tables before may
// already have later events.
func (u *Units) Shown(ctx context.Context, tables ...string) (names []string, err error) {
	return u.namesIn(ctx, "shown", tables)
}

// namesIn returns other names of tables from a hash, and those that are not in it as they are.
func (u *Units) namesIn(ctx context.Context, hash string, tables []string) (names []string, err error) {
	others, err := u.client.HMGet(ctx, u.own(hash), tables...).Result()
	for i := range others {
		name, _ := others[i].(string)
		names = append(names, cmp.Or(name, tables[i]))
	}
	return names, wrapped("look up the names of tables", err)
}

// finishSwitch shows and compares tables.
func (m *marked) finishSwitch(ctx context.Context) error {
	s := m.unit.Switch
	if s.Compare != nil {
		if err := m.compare(ctx, s.Compare); err != nil {
			return err
		}
	}
	if len(s.Show)+len(s.Rename) == 0 {
		return nil
	}
	_, err := m.client.TxPipelined(ctx, func(p goredis.Pipeliner) error {
		for _, pair := range s.Rename { // its keys stay: readers do not look for it under its plain name
			p.HSet(ctx, m.own("renamed"), pair.Other, pair.Table)
		}
		for _, pair := range s.Show {
			p.HSet(ctx, m.own("shown"), pair.Other, pair.Table)
		}
		return nil
	})
	return wrapped("show tables", err)
}

// Shows implements provider.MarkerUnits.
func (u *Units) Shows(ctx context.Context, pairs []provider.TablePair) (bool, error) {
	if len(pairs) == 0 {
		return true, nil
	}
	tables := make([]string, len(pairs))
	for i, p := range pairs {
		tables[i] = p.Other
	}
	names, err := u.Shown(ctx, tables...)
	for i, p := range pairs {
		if err == nil && names[i] != p.Table {
			return false, nil
		}
	}
	return err == nil, err
}

// SetState implements provider.MarkerUnits.
func (u *Units) SetState(ctx context.Context, g provider.Generation) error {
	mode, changes := map[provider.GenerationState]provider.Mode{
		provider.GenerationStandby: provider.ModeCatchUp, provider.GenerationRetired: provider.ModeEnded,
	}[g.State]
	if !changes {
		return nil
	}
	_, err := u.run(ctx, stateScript, u.keysOf(g.Build).list[:1], []any{modeText(mode)})
	return err
}

// ClearGeneration implements provider.MarkerUnits. The keys of tables are found by a scan of all keys of
// the server.
func (u *Units) ClearGeneration(
	ctx context.Context, b provider.Build, handlers []string, tables []provider.TablePair, limit int,
) (n int, err error) {
	k, limit := u.keysOf(b), max(limit, 1)
	for _, h := range append([]string{noHandler}, handlers...) {
		for _, set := range []string{k.events(h), k.others(h)} {
			some, err := u.client.ZRange(ctx, set, 0, int64(limit-n)-1).Result()
			if err != nil {
				return n, ofExec(err, false)
			}
			if len(some) == 0 {
				continue
			}
			if err := u.client.ZRem(ctx, set, anys(some)...).Err(); err != nil {
				return n, ofExec(err, false)
			}
			if n += len(some); n >= limit {
				return n, nil
			}
		}
	}
	if err := unlink(ctx, u.client, k.list[1:2]); err != nil {
		return n, err
	}
	if len(tables) == 0 {
		return n, nil
	}
	var all []string
	for _, t := range tables {
		all = append(all, t.Table)
		if shown, err := u.client.HGet(ctx, u.own("shown"), t.Other).Result(); err == nil && shown == t.Table {
			if err := u.client.HDel(ctx, u.own("shown"), t.Other).Err(); err != nil {
				return n, wrapped("drop views", err)
			}
		} else if err != nil && !errors.Is(err, goredis.Nil) {
			return n, wrapped("drop views", err)
		}
	}
	names, err := u.namesIn(ctx, "renamed", all) // as they were before a switch has renamed them
	for i := 0; err == nil && i < len(names) && n < limit; i++ {
		var some int
		some, err = u.unlinkTable(ctx, b, names[i], limit-n)
		n += some
	}
	return n, err
}

// unlinkTable deletes at most limit keys of a table. Zero: none is left. It continues where the last call
// has stopped.
func (u *Units) unlinkTable(ctx context.Context, b provider.Build, table string, limit int) (n int, err error) {
	scan := b.String() + "/" + table
	last, _ := u.scans.LoadAndDelete(scan)
	cursor, _ := last.(uint64)
	cursor, err = u.scanTable(ctx, table, cursor, func(node goredis.Cmdable, keys []string) (more bool, err error) {
		n += len(keys)
		return n < limit, unlink(ctx, node, keys)
	})
	if err == nil && cursor != 0 {
		u.scans.Store(scan, cursor)
		n = max(n, 1)
	}
	return n, err
}

func unlink(ctx context.Context, node goredis.Cmdable, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	return wrapped("delete keys", node.Unlink(ctx, keys...).Err())
}

// page is called with some keys of a server. It returns false to end a scan.
type page = func(node goredis.Cmdable, keys []string) (more bool, err error)

// scanTable is scan for the keys of a table.
func (u *Units) scanTable(ctx context.Context, table string, cursor uint64, fn page) (uint64, error) {
	return u.scan(ctx, u.Key(table), cursor, func(node goredis.Cmdable, keys []string) (more bool, err error) {
		return fn(node, slices.DeleteFunc(keys, func(key string) bool {
			rest, ok := strings.CutPrefix(key, u.Key(table))
			return !ok || rest != "" && rest[0] != ':'
		}))
	})
}

// scan calls fn with the keys that begin with a prefix. It returns where the next call goes on, or 0.
func (u *Units) scan(ctx context.Context, prefix string, cursor uint64, fn page) (uint64, error) {
	node, err := u.nodeOf(ctx, u.own("shown"))
	if err != nil {
		return 0, wrapped("scan keys", err)
	}
	pattern := strings.NewReplacer("*", `\*`, "?", `\?`, "[", `\[`, "]", `\]`, `\`, `\\`).Replace(prefix) + "*"
	for more := true; more; more = more && cursor != 0 {
		var keys []string
		if keys, cursor, err = node.Scan(ctx, cursor, pattern, 1000).Result(); err != nil {
			return 0, wrapped("scan keys", err)
		}
		if more, err = fn(node, keys); err != nil {
			return 0, err
		}
	}
	return cursor, nil
}

// nodeOf returns a client of the server that has a key.
func (u *Units) nodeOf(ctx context.Context, key string) (goredis.Cmdable, error) {
	if c, is := u.client.(*goredis.ClusterClient); is {
		return c.MasterForKey(ctx, key)
	}
	return u.client, nil
}

func setOf(keys []string) map[string]bool {
	set := make(map[string]bool, len(keys))
	for _, key := range keys {
		set[key] = true
	}
	return set
}

// Differing implements provider.MarkerUnits. It returns at most 100,000 differences. A row is a key of a table. Its
// columns are the type of the key, and the value of a string, or the fields, members or items that differ. Members of
// a sorted set have their scores, those of a set are true, and items of a list are numbered from 0. Fields and members
// of c.Ignore, and expiry, are not compared.
func (u *Units) Differing(ctx context.Context, c provider.Comparison) (found []provider.Difference, err error) {
	for _, pair := range c.Pairs {
		for i, table := range []string{pair.Table, pair.Other} {
			_, err := u.scanTable(ctx, table, 0, func(_ goredis.Cmdable, keys []string) (more bool, err error) {
				slices.Sort(keys)
				for _, key := range slices.Compact(keys) {
					rest := strings.TrimPrefix(key, u.Key(table))
					d, differs, err := u.difference(ctx, pair, c.Ignore, rest, i == 1)
					if err != nil {
						return false, err
					}
					if differs && len(found) < 100_000 {
						found = append(found, d)
					}
				}
				return true, nil
			})
			if err != nil {
				return nil, err
			}
		}
	}
	return found, nil
}

// compare compares the rows of c.Only.
func (m *marked) compare(ctx context.Context, c *provider.Comparison) error {
	found := []provider.Difference{}
	for _, pair := range c.Pairs {
		var keys []string
		for _, d := range c.Only {
			var key struct{ Key string }
			if d.Table == pair.Other && json.Unmarshal(d.Key, &key) == nil {
				keys = append(keys, key.Key)
			}
		}
		slices.Sort(keys)
		for _, key := range slices.Compact(keys) {
			d, differs, err := m.difference(ctx, pair, c.Ignore, key, false)
			if err != nil {
				return err
			}
			if !differs || len(found) == c.Limit {
				continue
			}
			found = append(found, d)
			if !c.Repair {
				continue
			}
			if err := m.copyKey(ctx, m.Key(pair.Table)+key, m.Key(pair.Other)+key); err != nil {
				return err
			}
		}
	}
	slices.SortStableFunc(found, func(a, b provider.Difference) int { return strings.Compare(a.Table, b.Table) })
	c.Found(found)
	return nil
}

// copyKey replaces a key by another one, or deletes it if that does not exist.
func (u *Units) copyKey(ctx context.Context, from, to string) error {
	n, err := u.client.Copy(ctx, from, to, 0, true).Result()
	if err == nil && n == 0 {
		err = u.client.Unlink(ctx, to).Err()
	}
	return wrapped("repair a key", err)
}

// difference compares the key of a row in two tables. rest is the part of the key after the table.
// onlyExtra: if the right table has the key, it was compared already.
func (u *Units) difference(ctx context.Context, pair provider.TablePair, ignore []string, rest string, onlyExtra bool) (d provider.Difference, differs bool, err error) {
	d.Table = pair.Other
	d.Key = encoded(map[string]any{"key": rest})
	want, err := u.value(ctx, u.Key(pair.Table)+rest)
	if err != nil || onlyExtra && want.kind != "none" {
		return d, false, err
	}
	got, err := u.value(ctx, u.Key(pair.Other)+rest)
	if err != nil {
		return d, false, err
	}
	for _, part := range ignore {
		delete(want.parts, part)
		delete(got.parts, part)
	}
	if want.kind == got.kind && maps.Equal(want.parts, got.parts) {
		return d, false, nil
	}
	d.Want, d.Got = want.without(got), got.without(want)
	return d, true, nil
}

// value is the value of a key.
type value struct {
	kind  string            // as TYPE returns it: "none" if there is no key
	parts map[string]string // by field, member or number
}

// value reads a key. Several types are read as a whole: large values take memory.
func (u *Units) value(ctx context.Context, key string) (v value, err error) {
	if v.kind, err = u.client.Type(ctx, key).Result(); err != nil {
		return v, wrapped("compare", err)
	}
	v.parts = map[string]string{}
	switch v.kind {
	case "none":
	case "string":
		v.parts[""], err = u.client.Get(ctx, key).Result()
	case "hash":
		v.parts, err = u.client.HGetAll(ctx, key).Result()
	case "set":
		var members []string
		members, err = u.client.SMembers(ctx, key).Result()
		for _, m := range members {
			v.parts[m] = "true"
		}
	case "zset":
		var members []goredis.Z
		members, err = u.client.ZRangeWithScores(ctx, key, 0, -1).Result()
		for _, z := range members {
			v.parts[fmt.Sprint(z.Member)] = fmt.Sprint(z.Score)
		}
	case "list":
		var items []string
		items, err = u.client.LRange(ctx, key, 0, -1).Result()
		for i, item := range items {
			v.parts[fmt.Sprintf("%09d", i)] = item
		}
	default: // a stream, or the type of a module
		v.parts[""], err = u.client.Dump(ctx, key).Result()
	}
	if err == goredis.Nil { //nolint:errorlint // it was deleted in between
		return value{kind: "none", parts: map[string]string{}}, nil
	}
	return v, wrapped("compare", err)
}

// without returns a row with the parts that another value does not have, or nil if there is no key.
func (v value) without(other value) json.RawMessage {
	if v.kind == "none" {
		return nil
	}
	parts := map[string]string{}
	for name, part := range v.parts {
		if is, has := other.parts[name]; !has || is != part || v.kind != other.kind {
			parts[text(name)] = text(part)
		}
	}
	row := map[string]any{"type": v.kind, "value": parts}
	if whole, is := parts[""]; is && len(parts) == 1 {
		row["value"] = whole
	}
	return encoded(row)
}

func encoded(row map[string]any) json.RawMessage {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(row) // cannot fail
	return bytes.TrimSpace(b.Bytes())
}

// text returns s, or its base64 form if it is not UTF-8.
func text(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return "base64:" + base64.StdEncoding.EncodeToString([]byte(s))
}
