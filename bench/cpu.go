package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpuTimes has the CPU time of this process, of each process of the server by its id, and of Redis' main
// thread.
type cpuTimes struct {
	own    time.Duration
	server map[string]time.Duration
	redis  time.Duration
}

// cpu returns the CPU times so far. On systems without /proc, those of the server are missing.
func (b *bed) cpu() cpuTimes {
	c := cpuTimes{server: map[string]time.Duration{}}
	var usage syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &usage) == nil {
		c.own = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	postmaster, _, _ := strings.Cut(read(filepath.Join(b.data, "postmaster.pid")), "\n")
	for _, id := range strings.Fields(read(fmt.Sprintf("/proc/%s/task/%[1]s/children", postmaster))) {
		c.server[id] = ranFor(id)
	}
	if b.redis > 0 {
		c.redis = ranFor(strconv.Itoa(b.redis))
	}
	return c
}

// ranFor returns the CPU time of the main thread of a process.
func ranFor(id string) time.Duration {
	ran, _, _ := strings.Cut(read("/proc/"+id+"/schedstat"), " ")
	n, _ := strconv.ParseInt(ran, 10, 64)
	return time.Duration(n)
}

func read(file string) string {
	text, _ := os.ReadFile(file)
	return string(text)
}

// since returns the CPU times of this process, of the server and of Redis since before, in µs per unit of
// work.
func (c cpuTimes) since(before cpuTimes, done int64) (own, server, redis float64) {
	var total time.Duration
	for id, t := range c.server {
		total += t - before.server[id]
	}
	per := func(t time.Duration) float64 { return float64(t.Nanoseconds()) / 1000 / float64(max(done, 1)) }
	return per(c.own - before.own), per(total), per(c.redis - before.redis)
}
