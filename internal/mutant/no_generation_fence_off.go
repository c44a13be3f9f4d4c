//go:build !mutant_no_generation_fence

package mutant

// NoGenerationFence: a unit of work does not take its projector's fence.
const NoGenerationFence = false
