package redistest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"
)

const slots = 16384 // of every cluster

// Cluster has three masters without replicas. Each has a third of the slots.
type Cluster struct {
	Masters []*Server
	Addrs   []string // of Masters
}

// NewCluster starts a cluster for one test, and returns when it accepts commands. Settings hold for
// all masters. If a master is down for five seconds, the others reject commands, unless a setting
// says otherwise ("--cluster-require-full-coverage", "no").
func NewCluster(t testing.TB, settings ...string) *Cluster {
	t.Helper()
	c := &Cluster{}
	for range 3 {
		m := Private(t, slices.Concat([]string{"--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1",
			"--cluster-node-timeout", "5000"}, settings)...)
		c.Masters, c.Addrs = append(c.Masters, m), append(c.Addrs, m.Addr)
		if err := c.join(len(c.Masters) - 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Await(); err != nil {
		t.Fatal(err)
	}
	return c
}

// join gives master i its slots, and introduces it to the first master.
func (c *Cluster) join(i int) error {
	ctx := context.Background()
	m, first := c.Masters[i].admin(), c.Masters[0].admin()
	defer func() { _ = m.Close(); _ = first.Close() }()
	if err := m.ClusterAddSlotsRange(ctx, i*slots/3, (i+1)*slots/3-1).Err(); err != nil {
		return fmt.Errorf("assign slots: %w", err)
	}
	if i == 0 {
		return nil
	}
	// go-redis has no parameter for the port of the bus
	if err := first.Do(ctx, "cluster", "meet", "127.0.0.1", c.Masters[i].port, c.Masters[i].bus).Err(); err != nil {
		return fmt.Errorf("join the cluster: %w", err)
	}
	return nil
}

// Await waits until all masters report that the cluster accepts commands. After Begin of a master,
// this takes some seconds.
func (c *Cluster) Await() error {
	for _, s := range c.Masters {
		m := s.admin()
		err := until(func(ctx context.Context) error {
			info, err := m.ClusterInfo(ctx).Result()
			if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_size:3") {
				err = errors.Join(fmt.Errorf("the cluster accepts no commands: %s", info), err)
			}
			return err
		})
		_ = m.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// Client returns a client of the cluster, closed when t ends. configure may change its options.
func (c *Cluster) Client(t testing.TB, configure ...func(*goredis.ClusterOptions)) *goredis.ClusterClient {
	t.Helper()
	o := &goredis.ClusterOptions{Addrs: c.Addrs}
	for _, f := range configure {
		f(o)
	}
	client := goredis.NewClusterClient(o)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// Owner returns the master that has a key. At least one master must answer.
func (c *Cluster) Owner(key string) (*Server, error) {
	var errs error
	for _, s := range c.Masters {
		m := s.admin()
		slot, err := m.ClusterKeySlot(context.Background(), key).Result()
		_ = m.Close()
		if err == nil {
			return c.Masters[slices.IndexFunc([]int64{1, 2, 3}, func(n int64) bool { return slot < n*slots/3 })], nil
		}
		errs = errors.Join(errs, err)
	}
	return nil, fmt.Errorf("slot of %s: %w", key, errs)
}
