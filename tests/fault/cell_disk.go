package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

var diskCell = &cell{
	// Promise: G6.1
	name: "disk", number: 20, summary: "the disk of all tables (a small tmpfs) fills up repeatedly",
	full: 45 * time.Second, short: 3 * time.Second, requires: []string{"full", "disk_full"}, run: runDisk,
}

// toSmall moves all tables and indexes. The server's WAL stays in place, because the server stops
// if it is full.
const toSmall = `
alter table all in tablespace pg_default set tablespace small;
alter index all in tablespace pg_default set tablespace small`

func runDisk(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	dir, err := r.tmpfs()
	if err != nil {
		r.note, r.result.Judged = fmt.Sprintf("skipped: cannot mount a tmpfs: %v", err), true
		return
	}
	for _, sql := range []string{"create tablespace small location '" + dir + "/tables'", toSmall} {
		_, err := r.pool.Exec(r.suite.ctx, sql)
		r.must(err)
	}
	r.startAll(1, 2, limitAttempts(3))
	r.gauge("disk_full", func() (refused int) {
		for _, p := range r.all {
			for _, of := range []string{"trace-", "log-"} {
				text, err := os.ReadFile(filepath.Join(r.dir, of+p.Name))
				r.must(err)
				refused += bytes.Count(text, []byte("SQLSTATE 53100"))
			}
		}
		return refused
	})
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(500*time.Millisecond, 1500*time.Millisecond))
			filler := filepath.Join(dir, "filler")
			if err := os.WriteFile(filler, make([]byte, 128<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
				r.fail("the disk is not full: %v", err)
			}
			r.inject("full", 1)
			r.sleep(r.between(time.Second, 3*time.Second))
			r.must(os.Remove(filler))
		})
		r.waitDrained(2 * lease)
	})
	r.judge()
}

// tmpfs mounts a small file system for the server's user. It is unmounted when the cell ends.
func (r *run) tmpfs() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "kinora-disk-"); err != nil {
		return "", err
	}
	if err = syscall.Mount("kinora", dir, "tmpfs", 0, "size=64m,mode=755"); err != nil {
		return "", fmt.Errorf("mount: %w", err)
	}
	r.last = append(r.last, func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH); _ = os.Remove(dir) })
	owner, err := os.Stat(r.pg.Dir)
	if err != nil {
		return "", err
	}
	of := owner.Sys().(*syscall.Stat_t)
	tables := filepath.Join(dir, "tables")
	if err = os.Mkdir(tables, 0o700); err == nil {
		err = os.Chown(tables, int(of.Uid), int(of.Gid))
	}
	return dir, err
}
