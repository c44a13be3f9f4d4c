//go:build !mutant_half_guard

package mutant

// HalfGuard: taking an entry does not look at the earlier entries of its key again.
const HalfGuard = false
