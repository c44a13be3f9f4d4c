package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsNode is a NATS server with JetStream, alone or in a cluster.
type natsNode struct {
	name, listen, dir string
	cluster           string // the address for other servers; empty for a server alone
	routes            string // those of all servers
}

func (n *natsNode) flags(f *flag.FlagSet) {
	f.StringVar(&n.name, "name", "n0", "name of the server")
	f.StringVar(&n.listen, "listen", "", "address for clients")
	f.StringVar(&n.dir, "dir", "", "directory of the streams")
	f.StringVar(&n.cluster, "cluster", "", "address for other servers")
	f.StringVar(&n.routes, "routes", "", "addresses of all servers, for other servers")
}

func (n *natsNode) args() []string {
	return []string{"-name", n.name, "-listen", n.listen, "-dir", n.dir, "-cluster", n.cluster, "-routes", n.routes}
}

// serve runs the server until ctx ends.
func (n *natsNode) serve(ctx context.Context, out io.Writer) error {
	host, port, err := address(n.listen)
	if err != nil {
		return err
	}
	// A server alone that must survive a power failure needs SyncAlways too: by default it syncs
	// every two minutes. A killed process loses nothing.
	o := &server.Options{ServerName: n.name, Host: host, Port: port, JetStream: true, StoreDir: n.dir, NoSigs: true, NoLog: true}
	if n.cluster != "" {
		o.Cluster.Name = "example"
		if o.Cluster.Host, o.Cluster.Port, err = address(n.cluster); err != nil {
			return err
		}
		for route := range strings.SplitSeq(n.routes, ",") {
			o.Routes = append(o.Routes, &url.URL{Scheme: "nats", Host: route})
		}
	}
	s, err := server.NewServer(o)
	if err != nil {
		return err
	}
	s.Start()
	defer func() {
		s.Shutdown()
		s.WaitForShutdown()
	}()
	if !s.ReadyForConnections(hanging) {
		return errors.New("the NATS server does not accept connections")
	}
	say(out, isReady)
	<-ctx.Done()
	return nil
}

// cluster is some NATS servers.
type cluster struct {
	*processes
	dir   string
	nodes []*natsNode
	run   []*process
	next  int // which one is killed next
}

// startCluster starts servers, and returns when JetStream answers.
func startCluster(ctx context.Context, ps *processes, servers int) (_ *cluster, err error) {
	dir, err := os.MkdirTemp("", "kinora-nats-")
	if err != nil {
		return nil, err
	}
	c := &cluster{processes: ps, dir: dir}
	defer func() {
		if err != nil {
			_ = ps.stopAll()
			c.remove()
		}
	}()
	addresses, err := freeAddresses(2 * servers)
	if err != nil {
		return nil, err
	}
	for i := range servers {
		n := &natsNode{name: fmt.Sprintf("n%d", i), listen: addresses[i], dir: filepath.Join(dir, fmt.Sprint(i))}
		if servers > 1 {
			n.cluster, n.routes = addresses[servers+i], strings.Join(addresses[servers:], ",")
		}
		c.nodes = append(c.nodes, n)
		p, err := ps.start(ctx, natsRole, n.args()...)
		if err != nil {
			return nil, err
		}
		c.run = append(c.run, p)
	}
	return c, c.await(ctx)
}

// await waits until the cluster has a leader.
func (c *cluster) await(ctx context.Context) error {
	conn, err := nats.Connect(c.address(), nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond))
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	for {
		try, cancel := context.WithTimeout(ctx, time.Second)
		_, err := js.AccountInfo(try)
		cancel()
		if err == nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// killOne kills a server, and starts it again. It returns before the server has caught up.
func (c *cluster) killOne(ctx context.Context) (err error) {
	i := c.next % len(c.run)
	c.next++
	c.run[i].kill()
	c.run[i], err = c.start(ctx, natsRole, c.nodes[i].args()...)
	return err
}

func (c *cluster) address() string {
	var hosts []string
	for _, n := range c.nodes {
		hosts = append(hosts, n.listen)
	}
	return "nats://" + strings.Join(hosts, ",")
}

// remove removes the streams. The servers must have ended.
func (c *cluster) remove() { _ = os.RemoveAll(c.dir) }

// freeAddresses returns addresses that no server listens on. Their ports are below those of outgoing connections, so none of
// them takes a port while its server is ended.
func freeAddresses(n int) (all []string, err error) {
	for tries := 0; len(all) < n; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(22000)))
		switch {
		case err == nil:
			defer func() { _ = l.Close() }()
			all = append(all, l.Addr().String())
		case tries > 100*n:
			return nil, err
		}
	}
	return all, nil
}

func address(hostPort string) (host string, port int, err error) {
	a, err := net.ResolveTCPAddr("tcp", hostPort)
	if err != nil {
		return "", 0, err
	}
	return a.IP.String(), a.Port, nil
}
