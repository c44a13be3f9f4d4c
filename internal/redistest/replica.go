package redistest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
)

// linkUser is the user as which a replica connects to its master.
const linkUser = "replica"

// linkSettings make a server accept the link of a replica and have one itself: both servers of a
// pair can be the master.
var linkSettings = []string{
	"--user", linkUser, "on", ">kinora", "+ping", "+replconf", "+psync",
	"--masteruser", linkUser, "--masterauth", "kinora",
	"--repl-diskless-sync-delay", "0",
}

// Pair is a master and its replica. The fields keep their servers after a failover.
//
// A master that starts without its data empties its replica when that connects again. A replica has
// a snapshot on its disk, of the time when it was last synchronized in full.
type Pair struct {
	Master  *Server
	Replica *Server
}

// NewPair starts a master and a replica for one test, and returns when the replica is in sync.
// Settings ("--appendonly", "yes") hold for both.
func NewPair(t testing.TB, settings ...string) *Pair {
	t.Helper()
	settings = slices.Concat(linkSettings, settings)
	master := Private(t, settings...)
	p := &Pair{Master: master, Replica: Private(t, append(settings, "--replicaof", "127.0.0.1", strconv.Itoa(master.port))...)}
	if err := p.Sync(); err != nil {
		t.Fatal(err)
	}
	return p
}

// Sync waits until the replica has applied all writes that the master has executed when Sync is
// called.
func (p *Pair) Sync() error {
	ctx := context.Background()
	m, r := p.Master.admin(), p.Replica.admin()
	defer func() { _ = m.Close(); _ = r.Close() }()
	info := m.InfoMap(ctx, "replication")
	want, err := strconv.Atoi(info.Item("Replication", "master_repl_offset"))
	if err := errors.Join(info.Err(), err); err != nil {
		return fmt.Errorf("offset of the master: %w", err)
	}
	return until(func(ctx context.Context) error {
		info := r.InfoMap(ctx, "replication")
		if err := info.Err(); err != nil {
			return err
		}
		offset, err := strconv.Atoi(info.Item("Replication", "slave_repl_offset"))
		if link := info.Item("Replication", "master_link_status"); err != nil || offset < want || link != "up" {
			return fmt.Errorf("the replica is at offset %d of %d, its link is %q", offset, want, link)
		}
		return nil
	})
}

// Cut breaks the link between the servers until Mend. The replica has all writes that the master
// has executed when Cut is called, and gets no writes that the master executes after Cut returned.
// Suspend of the replica does not ensure this: after Resume, the replica may find writes in its
// socket that it applies, also if the master has ended.
func (p *Pair) Cut() error {
	if err := p.Sync(); err != nil {
		return err
	}
	ctx := context.Background()
	m, r := p.Master.admin(), p.Replica.admin()
	defer func() { _ = m.Close(); _ = r.Close() }()
	if err := m.ACLSetUser(ctx, linkUser, "off").Err(); err != nil {
		return fmt.Errorf("refuse the replica: %w", err)
	}
	if err := m.ClientKillByFilter(ctx, "USER", linkUser).Err(); err != nil {
		return fmt.Errorf("disconnect the replica: %w", err)
	}
	// the replica applies all that it has received before it notices the end of the connection
	return until(func(ctx context.Context) error {
		info := r.InfoMap(ctx, "replication")
		if link := info.Item("Replication", "master_link_status"); link != "down" {
			return errors.Join(fmt.Errorf("the replica's link is %q", link), info.Err())
		}
		return nil
	})
}

// Mend lets the replica connect again after Cut, and returns when it is in sync.
func (p *Pair) Mend() error {
	m := p.Master.admin()
	defer func() { _ = m.Close() }()
	if err := m.ACLSetUser(context.Background(), linkUser, "on").Err(); err != nil {
		return fmt.Errorf("accept the replica: %w", err)
	}
	return p.Sync()
}

// Promote makes the replica a master. The other server remains one, and is not connected to it.
func (p *Pair) Promote() error {
	r := p.Replica.admin()
	defer func() { _ = r.Close() }()
	if err := r.ReplicaOf(context.Background(), "NO", "ONE").Err(); err != nil {
		return fmt.Errorf("promote the replica: %w", err)
	}
	return nil
}
