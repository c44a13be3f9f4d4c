package main

import (
	"fmt"
	"strconv"
	"time"
)

var rebuildDeployCell = &cell{
	// Promise: R5.1
	name: "rebuild-deploy", number: 41,
	summary: "rolling deployments of handlers of the next version, and their rollback, under 500 commands a second and kill -9: each generation is exact for its own code",
	full:    100 * time.Second, short: time.Second,
	requires: []string{"deployed", "rolled_back", "versions_side_by_side"}, requiresLong: []string{"kill_builder"}, run: runRebuildDeploy,
}

func runRebuildDeploy(r *run) {
	r.startBuilt(pastStreams)
	names := []string{heardName, readName}
	ps := []*process{r.builder(heardName+","+readName, nil), r.builder(heardName+","+readName, nil)}
	for _, p := range ps {
		p.awaitReady()
	}
	r.awaitApplied(names...)
	watches := []*builtWatch{r.watchBuilt(heardName), r.watchBuilt(readName)}
	version := 1
	r.prove(func() {
		stop := r.flow()
		for begin, first := time.Now(), version; version == first || time.Since(begin) < r.span; version++ {
			if version > 1 { // the next version is the present one again
				for _, name := range names {
					r.promote("promotions_ms", name, version, r.suite.patience())
				}
				r.deploy(ps[0], version)
			}
			r.deployNext(ps, names, version)
		}
		stop()
		r.waitDrained(10 * lease)
		r.awaitApplied(names...)
	})
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
		r.promote("unfed_rollback_ms", name, version, r.suite.patience())
	}
	r.inject("rolled_back", 1)
	ps[r.intn(len(ps))].restart()
	for _, name := range names {
		r.awaitFed(name, version+1)
	}
}

// deploy replaces a process by one of another version.
func (r *run) deploy(p *process, version int) {
	p.stop()
	p.More["version"] = strconv.Itoa(version)
	r.must(p.begin())
	p.awaitReady()
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
	r.await(fmt.Sprintf("generation %d of %v", number, names), isLive)
	r.measure("deployments_ms", time.Since(begin))
}
