package main

import (
	"fmt"
	"time"
)

var taskKillersCell = &cell{
	// Promise: T11.1
	name: "task-killers", number: 37,
	summary: "three tasks that end their process, among a thousand at 16 at a time: they are abandoned, and no other is",
	full:    20 * time.Second, short: time.Second, redelivers: true, requires: []string{"deaths"}, run: runTaskKillers,
}

const killerTasks = 3

func runTaskKillers(r *run) {
	r.server(brokerConfig{})
	o := r.systems()
	each, n := 1000, 0
	if r.suite.short {
		each = 300
	}
	isKiller := func(i int) bool { return i%(each/killerTasks) == 40 }
	r.prove(func() {
		for range each {
			r.enqueue(taskDraft("killers/call", fmt.Sprintf("call-%04d", n), isKiller(n)))
			n++
		}
		for range 2 - len(r.of(laboring)) {
			p := r.worker(o, "killers", func(s *settings) { s.Concurrency, s.Attempts = 16, 3 })
			p.onEnd(func(int) bool {
				r.inject("deaths", 1)
				go p.revive()
				return true
			})
		}
		r.settleTasks()
	})
	for _, p := range r.of(laboring) {
		p.onEnd(nil)
	}
	r.stopWorkers()
	var v verdict
	tasks := r.taskRows()
	o.mu.Lock()
	for i := range n {
		id := fmt.Sprintf("call-%04d", i)
		switch status := tasks[id].Status; {
		case isKiller(i) && status != "abandoned":
			v.find(&v.Phantom, id, "a killer is %q", status)
		case !isKiller(i) && status != "done":
			v.find(&v.Lost, id, "an innocent is %q", status)
		case !isKiller(i) && o.done[id] == 0:
			v.find(&v.Lost, id, "it was not called")
		}
	}
	if got := r.countOf(`select count(*) from kinora.tasks where status = 'abandoned' and code = 'vanished'`); got != killerTasks*n/each {
		v.find(&v.Lost, "killers", "%d are abandoned as vanished", got)
	}
	o.mu.Unlock()
	r.endTasks(o, &v, n)
}
