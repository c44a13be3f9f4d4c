package redis

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// differingMost is the most differences that Differing returns.
const differingMost = 100_000

// Differing implements provider.MarkerUnits. A row is a key of a table. Its columns are the type of the
// key, and the value of a string, or the fields, members or items that differ. Members of a sorted
// set have their scores, those of a set are true, and items of a list are numbered from 0. Fields and
// members of c.Ignore, and expiry, are not compared.
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
					if differs && len(found) < differingMost {
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
