package redis

import (
	"context"
	"fmt"
	"strings"

	goredis "github.com/redis/go-redis/v9"
)

// errSlot returns the error of a key in another hash slot than those of Kinora.
func (m *marked) errSlot(what, key string) error {
	return permanent(codeCrossSlot, fmt.Errorf("%s: key %q is not in the hash slot of %s: make keys with Units.Key, or put %s into them", what, key, m.tag, m.tag))
}

// checkKeys returns an error if a key is in another hash slot of a cluster than the keys of Kinora.
func (m *marked) checkKeys(keys []string) error {
	if _, is := m.client.(*goredis.ClusterClient); is {
		for _, key := range keys {
			if slotOf(key) != slotOf(m.keys.list[0]) {
				return m.errSlot("watch", key)
			}
		}
	}
	return nil
}

// checkSlots returns an error if a command uses a key of another hash slot. A script could write the
// keys of several slots while one server has them, and would fail later, when they have moved.
func (m *marked) checkSlots(ctx context.Context, cmds []goredis.Cmder) error {
	cluster, is := m.client.(*goredis.ClusterClient)
	if !is || len(cmds) == 0 {
		return nil
	}
	own := slotOf(m.keys.list[0])
	for _, cmd := range cmds {
		keys, err := m.keysOfCommand(ctx, cluster, cmd)
		if err != nil {
			return err
		}
		for _, key := range keys {
			if slotOf(key) != own {
				return m.errSlot(cmd.Name(), key)
			}
		}
	}
	return nil
}

// keysOfCommand returns the keys of a command. The server is asked for those whose place is not fixed.
func (u *Units) keysOfCommand(ctx context.Context, c *goredis.ClusterClient, cmd goredis.Cmder) ([]string, error) {
	u.mu.Lock()
	infos := u.commands
	u.mu.Unlock()
	if infos == nil {
		var err error
		if infos, err = c.Command(ctx).Result(); err != nil {
			return nil, ofExec(err, false)
		}
		u.mu.Lock()
		u.commands = infos
		u.mu.Unlock()
	}
	args := cmd.Args()
	info := infos[strings.ToLower(cmd.Name())]
	if info == nil || hasFlag(info, "movablekeys") {
		keys, err := c.Do(ctx, append([]any{"command", "getkeys"}, args...)...).StringSlice()
		if err != nil && !isReply(err) {
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

func hasFlag(info *goredis.CommandInfo, flag string) bool {
	for _, f := range info.Flags {
		if f == flag {
			return true
		}
	}
	return false
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
