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

// cpuTimes has the CPU time of this process, and of each process of the server by its id.
type cpuTimes struct {
	own    time.Duration
	server map[string]time.Duration
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
		ran, _, _ := strings.Cut(read("/proc/"+id+"/schedstat"), " ")
		n, _ := strconv.ParseInt(ran, 10, 64)
		c.server[id] = time.Duration(n)
	}
	return c
}

func read(file string) string {
	text, _ := os.ReadFile(file)
	return string(text)
}

// since returns the CPU times of this process and of the server since before, in µs per unit of work.
func (c cpuTimes) since(before cpuTimes, done int64) (own, server float64) {
	var total time.Duration
	for id, t := range c.server {
		total += t - before.server[id]
	}
	per := func(t time.Duration) float64 { return float64(t.Nanoseconds()) / 1000 / float64(max(done, 1)) }
	return per(c.own - before.own), per(total)
}
