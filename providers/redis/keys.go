package redis

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Key returns the key of a part of the read model: the hash tag of the configuration, the table, and the
// parts, with colons between them. "{shop}ratings_g2:42". All keys of a table must be made so, or be
// the table's own: rebuilds and verifications find them by this form. In a handler, pass the name
// that projector.Table returns.
func (u *Units) Key(table string, parts ...string) string {
	return u.tag + strings.Join(append([]string{table}, parts...), ":")
}

// own returns a key of Kinora's own.
func (u *Units) own(parts ...string) string {
	return u.cfg.Prefix + ":" + u.tag + strings.Join(parts, ":")
}

// keys are the keys of one generation that a script uses, and their indices.
type keys struct {
	u     *Units
	build string
	list  []string       // the checkpoint, the records of parked messages, then two sets for each name
	sets  map[string]int // by the name of a handler: the index of its first set in a script
}

func (u *Units) keysOf(b provider.Build) *keys {
	k := &keys{u: u, build: b.String(), sets: map[string]int{}}
	k.list = []string{u.own(k.build, "checkpoint"), u.own(k.build, "parked")}
	return k
}

// events and others are the sets of markers of a handler: of events, by position, and of other
// messages, by time.
func (k *keys) events(handler string) string { return k.u.own(k.build, "events", handler) }
func (k *keys) others(handler string) string { return k.u.own(k.build, "others", handler) }

// noHandler is the name in the marker of a message that was parked without handlers, for example because
// its type was not registered.
const noHandler = ""

// set returns the index of the sets of a handler's name.
func (k *keys) set(name string) int {
	i, ok := k.sets[name]
	if !ok {
		k.list = append(k.list, k.events(name), k.others(name))
		i = len(k.list) - 1 // scripts count from 1
		k.sets[name] = i
	}
	return i
}

// member returns the form of a message's id in sets: a UUID in 16 bytes.
func member(id string) string {
	if parsed, err := uuid.Parse(id); err == nil && len(id) == 36 && !strings.ContainsAny(id, "ABCDEF") {
		return "u" + string(parsed[:])
	}
	return "t" + id
}

// idOf is the inverse of member.
func idOf(member string) string {
	if id, err := uuid.FromBytes([]byte(strings.TrimPrefix(member, "u"))); err == nil && strings.HasPrefix(member, "u") {
		return id.String()
	}
	return strings.TrimPrefix(member, "t")
}

// checkKeys returns an error if a key is in another hash slot of a cluster than the keys of Kinora.
func (m *marked) checkKeys(what string, keys []string) error {
	if _, is := m.client.(*goredis.ClusterClient); is {
		for _, key := range keys {
			if slotOf(key) != slotOf(m.keys.list[0]) {
				err := fmt.Errorf("%s: key %q is not in the hash slot of %s: make keys with Units.Key, or put %[3]s into them", what, key, m.tag)
				return permanent(codeCrossSlot, err)
			}
		}
	}
	return nil
}

// checkSlots returns an error if a command uses a key of another hash slot. A script could write the
// keys of several slots while one server has them, and would fail later, when they have moved.
func (m *marked) checkSlots(ctx context.Context, cmds []goredis.Cmder) error {
	cluster, is := m.client.(*goredis.ClusterClient)
	for i := 0; is && i < len(cmds); i++ {
		keys, err := m.keysOfCommand(ctx, cluster, cmds[i])
		if err == nil {
			err = m.checkKeys(cmds[i].Name(), keys)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// keysOfCommand returns the keys of a command. The server is asked for those whose place is not fixed.
func (u *Units) keysOfCommand(ctx context.Context, c *goredis.ClusterClient, cmd goredis.Cmder) ([]string, error) {
	infos := u.commands.Load()
	if infos == nil {
		all, err := c.Command(ctx).Result()
		if err != nil {
			return nil, ofExec(err, false)
		}
		infos = &all
		u.commands.Store(infos)
	}
	args := cmd.Args()
	info := (*infos)[strings.ToLower(cmd.Name())]
	if info == nil || slices.Contains(info.Flags, "movablekeys") {
		keys, err := c.Do(ctx, append([]any{"command", "getkeys"}, args...)...).StringSlice()
		if _, isReply := replyOf(err); err != nil && !isReply {
			return nil, ofExec(err, false)
		}
		return keys, nil // without keys, or unknown: Redis refuses it
	}
	last := int(info.LastKeyPos)
	if last < 0 {
		last += len(args)
	}
	var keys []string
	for i := int(info.FirstKeyPos); i > 0 && i <= last && i < len(args); i += max(int(info.StepCount), 1) {
		keys = append(keys, fmt.Sprint(args[i]))
	}
	return keys, nil
}

// slotOf returns the hash slot of a key: CRC16 (XMODEM) of its hash tag, or of the whole key, modulo
// 16384. See the Redis Cluster specification.
func slotOf(key string) uint16 {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			key = tag
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc % 16384
}
