package main

import (
	"fmt"
	"strconv"
	"time"
)

var rebuildDeployCell = &cell{
	name: "rebuild-deploy", number: 41,
	summary: "rolling deployments of handlers of the next version, and their rollback, under 500 commands a second and kill -9: each generation is exact for its own code",
	full:    3 * time.Minute, short: time.Second,
	requires: []string{"deployed", "rolled_back", "versions_side_by_side"}, requiresLong: []string{"kill_builder"}, run: runRebuildDeploy,
}

func runRebuildDeploy(r *run) {
	r.startBuilt(pastStreams)
	names := []string{heardName, readName}
	ps := []*process{r.builder(heardName+","+readName, nil), r.builder(heardName+","+readName, nil)}
	for _, p := range ps {
		p.awaitReady(30 * time.Second)
	}
	r.awaitApplied(names...)
	watches := []*builtWatch{r.watchBuilt(heardName), r.watchBuilt(readName)}
	stop := r.flow()
	for begin, version := time.Now(), 1; ; version++ {
		r.deployNext(ps, names, version)
		if time.Since(begin) > r.length {
			break
		}
		for _, name := range names {
			r.promote(name, version+1)
		}
		r.deploy(ps[0], version+1)
	}
	stop()
	r.waitDrained(10 * lease)
	r.awaitApplied(names...)
	r.judgeBuilt(watches, names...)
}

// deployNext deploys the next version to one process and then to the other one, and rolls it back in the
// first one. The generations have the numbers of their versions.
func (r *run) deployNext(ps []*process, names []string, version int) {
	defer r.limitFlow(builtMost)()
	r.deploy(ps[0], version+1)
	r.killUntilLive(ps, names, version+1)
	r.inject("deployed", 1)
	for _, name := range names {
		r.awaitFed(name, version)
	}
	r.inject("versions_side_by_side", 1)
	r.deploy(ps[1], version+1)
	r.sleep(r.between(300*time.Millisecond, time.Second)) // no process feeds the older generation
	r.deploy(ps[0], version)
	for _, name := range names {
		r.measure("unfed_rollback_ms", r.promote(name, version))
	}
	r.inject("rolled_back", 1)
	ps[r.intn(len(ps))].restart()
	for _, name := range names {
		r.awaitFed(name, version+1)
	}
}

// deploy replaces a process by one of another version.
func (r *run) deploy(p *process, version int) {
	p.stop(r.drain)
	p.More["version"] = strconv.Itoa(version)
	r.must(p.begin())
	p.awaitReady(30 * time.Second)
}

// killUntilLive kills processes, not too often, until generations of all projectors are live.
func (r *run) killUntilLive(ps []*process, names []string, number int) {
	begin := time.Now()
	isLive := func() bool {
		for _, name := range names {
			if r.generation(name, number).State != "live" {
				return false
			}
		}
		return true
	}
	for range 2 + r.intn(2) {
		r.sleep(r.between(50*time.Millisecond, 700*time.Millisecond))
		ps[r.intn(len(ps))].restart()
	}
	r.await(fmt.Sprintf("generation %d of %v", number, names), r.suite.drainLimit(), isLive)
	r.measure("deployments_ms", time.Since(begin))
}
