//go:build !mutant_clock_per_row

package mutant

// ClockPerRow: a claim reads the clock again for every row.
const ClockPerRow = false
