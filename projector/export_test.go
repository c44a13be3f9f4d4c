package projector

import "sync"

// OwnProcess makes r behave as the only runner of its process.
func OwnProcess(r *Runner) { ShareProcess(r) }

// ShareProcess makes runners behave as the only runners of one process.
func ShareProcess(runners ...*Runner) {
	one := new(sync.RWMutex)
	for _, r := range runners {
		r.process = one
	}
}
