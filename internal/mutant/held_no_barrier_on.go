//go:build mutant_held_no_barrier

package mutant

// HeldNoBarrier: a claim passes entries of its key that are set aside.
const HeldNoBarrier = true
