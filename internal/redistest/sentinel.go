package redistest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"
)

// MasterName is the name under which Sentinels know the master.
const MasterName = "kinora"

// sentinelConfig has the port and directory of a Sentinel, the port of the master and down-after.
const sentinelConfig = `bind 127.0.0.1
port %d
dir %s
sentinel monitor ` + MasterName + ` 127.0.0.1 %d 2
sentinel down-after-milliseconds ` + MasterName + ` %d
sentinel failover-timeout ` + MasterName + ` 2000
`

// Sentinels are three Sentinels that watch a pair. If its master does not answer for three seconds, which no
// busy machine takes for pings every 250 ms, they promote the replica, within about two seconds more. When the old master answers again, they make
// it the replica, after about two seconds. Until then it accepts writes, which are lost.
//
// They do not promote a replica whose link broke more than thirty seconds before the master failed:
// after Cut, a test must end the master soon. They promote an empty replica: a master that is
// started without its data in less than three seconds is still the master, and empties its replica.
type Sentinels struct {
	Pair
	Addrs []string
}

// NewSentinels starts a pair and three Sentinels for one test, and returns when they are able to
// fail over. Settings hold for the servers of the pair.
func NewSentinels(t testing.TB, settings ...string) *Sentinels {
	t.Helper()
	s := &Sentinels{Pair: *NewPair(t, settings...)}
	// The last one is late: if all three were candidates, each would vote for itself, and they would
	// try again four seconds later.
	for _, downAfter := range []int{3000, 3000, 4000} {
		sentinel, err := startSentinel(s.Master, downAfter)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(sentinel.Stop)
		s.Addrs = append(s.Addrs, sentinel.Addr)
	}
	if err := s.Await(); err != nil {
		t.Fatal(err)
	}
	return s
}

// startSentinel starts a Sentinel that considers the master down after this number of milliseconds.
func startSentinel(master *Server, downAfter int) (*Server, error) {
	s, err := prepare()
	if err != nil {
		return nil, err
	}
	config := s.file("sentinel.conf")
	text := fmt.Appendf(nil, sentinelConfig, s.port, s.dir, master.port, downAfter)
	if err := os.WriteFile(config, text, 0o600); err != nil {
		_ = os.RemoveAll(s.dir)
		return nil, err
	}
	if err := s.run(config, "--sentinel"); err != nil {
		return nil, err
	}
	// With pings every 250 ms, a busy machine causes no failover. Sentinel ignores replicas whose state
	// is older than five pings, and asks for it every second.
	c := s.admin()
	defer func() { _ = c.Close() }()
	if err := c.Do(context.Background(), "sentinel", "debug", "ping-period", 250, "ask-period", 100, "info-period", 500,
		"publish-period", 500, "tilt-period", 2000).Err(); err != nil {
		s.Stop()
		return nil, fmt.Errorf("set the periods of a Sentinel: %w", err)
	}
	return s, nil
}

// Client returns a client that asks the Sentinels for the master. It is closed when t ends.
// configure may change its options.
func (s *Sentinels) Client(t testing.TB, configure ...func(*goredis.FailoverOptions)) *goredis.Client {
	t.Helper()
	o := &goredis.FailoverOptions{MasterName: MasterName, SentinelAddrs: s.Addrs}
	for _, f := range configure {
		f(o)
	}
	c := goredis.NewFailoverClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Await waits until the Sentinels are able to fail over: the pair has a master and a replica with a
// link. After a failover, this needs Begin of the old master, and takes about three seconds.
func (s *Sentinels) Await() error { return s.each(ready) }

// AwaitMaster waits until all Sentinels report that master is the master.
func (s *Sentinels) AwaitMaster(master *Server) error {
	return s.each(func(ctx context.Context, c *goredis.SentinelClient) error {
		addr, err := c.GetMasterAddrByName(ctx, MasterName).Result()
		if is := strings.Join(addr, ":"); err == nil && is != master.Addr {
			err = fmt.Errorf("the master is %s", is)
		}
		return err
	})
}

// each calls try for a client of each Sentinel until it returns nil.
func (s *Sentinels) each(try func(context.Context, *goredis.SentinelClient) error) error {
	for _, addr := range s.Addrs {
		c := goredis.NewSentinelClient(&goredis.Options{Addr: addr, MaxRetries: -1, PoolSize: 1})
		err := until(func(ctx context.Context) error { return try(ctx, c) })
		_ = c.Close()
		if err != nil {
			return fmt.Errorf("sentinel %s: %w", addr, err)
		}
	}
	return nil
}

// ready returns nil if a Sentinel knows the replica, and enough other Sentinels for a failover.
func ready(ctx context.Context, c *goredis.SentinelClient) error {
	if err := c.CkQuorum(ctx, MasterName).Err(); err != nil {
		return err
	}
	master, err := c.Master(ctx, MasterName).Result()
	if err != nil {
		return err
	}
	replicas, err := c.Replicas(ctx, MasterName).Result()
	if err != nil {
		return err
	}
	if master["flags"] != "master" || master["num-other-sentinels"] != "2" ||
		len(replicas) != 1 || replicas[0]["flags"] != "slave" || replicas[0]["master-link-status"] != "ok" {
		return errors.Join(fmt.Errorf("the master is %v", master), fmt.Errorf("its replicas are %v", replicas))
	}
	return nil
}
