package redis

import (
	"strings"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/provider"
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
