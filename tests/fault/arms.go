package main

import (
	"slices"

	"github.com/kinora-go/kinora/projector"
)

const (
	unorderedName = "unordered"
	unheardName   = "unheard"
	brokerName    = "broker"
	orderedName   = "ordered"
	tenthName     = "tenth"
	formerName    = "former"
	renamedName   = "renamed"
)

// arm is a projector with tables of its own.
type arm struct {
	name, prefix string
	opts         projector.Options
	loses        bool // it must lose events
	misorders    bool // it must apply events out of order
	wrong        bool // it must be wrong in some way
}

// armKinds are the projectors that settings.Arms may name.
var armKinds = map[string]arm{
	// The exact one brings the events that the broker lost before each delivery.
	orderedName: {name: exactName, opts: projector.Options{Markers: true, Ordered: true}},
	exactName:   {name: exactName, opts: projector.Options{Markers: true}},
	// The topic of this one has no publishers.
	unheardName:   {name: unheardName, prefix: "unheard_", opts: projector.Options{Markers: true}},
	unorderedName: {name: unorderedName, prefix: "unordered_", opts: projector.Options{Markers: true}, misorders: true},
	brokerName:    {name: brokerName, prefix: "broker_", opts: projector.Options{Markers: true, BrokerOnly: true}, loses: true, misorders: true},
	tenthName:     {name: tenthName, prefix: "tenth_", opts: projector.Options{Markers: true}},
	// One projector, before and after it was renamed: see renaming.
	formerName:  {name: formerName, prefix: "former_", opts: projector.Options{Markers: true, BrokerOnly: true}},
	renamedName: {name: renamedName, prefix: "former_", opts: projector.Options{Markers: true, BrokerOnly: true}},
}

// armNumber is the index of an arm's words in a status.
func armNumber(name string) int {
	return slices.Index([]string{exactName, unorderedName, unheardName, brokerName, tenthName, controlName, formerName, renamedName}, name)
}

// completed implements projector.RunnerObserver.Completed.
func (w *work) completed(projector, _ string) { w.status.add(wordCompleted+armNumber(projector), 1) }

// addArms creates the tables of arms, and makes judge judge them.
func (r *run) addArms(names ...string) {
	for _, name := range names {
		a := armKinds[name]
		_, err := r.pool.Exec(r.suite.ctx, `create table `+a.prefix+`sums (like sums including all); create table `+a.prefix+`lists (like lists including all)`)
		r.must(err)
		r.arms = append(r.arms, a)
	}
}

// judgeArm judges a further arm. The violations that it must have are counted as injected.
func (r *run) judgeArm(a arm, h history) {
	v := r.verdictOf(a, h)
	for _, why := range v.reasons {
		r.trace.printf("verdict %s %s", a.name, why)
	}
	if a.wrong {
		r.inject(a.name+"_wrong", v.Lost+v.Doubled+v.Phantom+v.Misordered)
		return
	}
	if a.loses {
		r.inject(a.name+"_lost", v.Lost)
		v.Lost = 0
	}
	if a.misorders {
		r.inject(a.name+"_misordered", v.Misordered)
		v.Misordered = 0
	}
	if !v.ok() {
		r.fail("%s: lost %d, doubled %d, phantom %d, misordered %d: %s", a.name, v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
}

func (r *run) verdictOf(a arm, h history) (v verdict) {
	m, err := readModel(r.suite.ctx, r.pool, a.prefix)
	r.must(err)
	judgeModel(h, m, &v)
	return v
}

// lacksOf returns the kind of violation that an arm must have and does not have.
func (r *run) lacksOf(a arm) string {
	var log verdict
	_, h := r.judgeAppends(&log)
	v := r.verdictOf(a, h)
	switch {
	case a.wrong && v.ok():
		return "lost, doubled or misordered"
	case a.loses && v.Lost == 0:
		return "lost"
	case a.misorders && v.Misordered == 0:
		return "misordered"
	}
	return ""
}
