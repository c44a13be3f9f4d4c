//go:build mutant_worker_clock

package mutant

// WorkerClock: statements read the clock of whoever sends them, which is off by KINORA_MUTANT_SKEW, and not the server's.
const WorkerClock = true
