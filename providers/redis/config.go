package redis

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"

	goredis "github.com/redis/go-redis/v9"
)

// Config configures Units. The zero value is the default.
type Config struct {
	// OwnMarkers: markers and checkpoints are kept in Redis, and each message is applied by a script
	// that checks and sets its markers. Then a message takes effect once. See the package
	// documentation for what is lost with Redis' data, and what the log brings back.
	OwnMarkers bool
	// HashTag is in the keys of Kinora, and in those that Units.Key returns: "{shop}". In a cluster it
	// is required, because a script can use the keys of one hash slot only. At most 40 letters,
	// digits, "-" and "_".
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
