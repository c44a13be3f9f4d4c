//go:build mutant_no_fence

package mutant

// NoFence: marks are not fenced by the claim's token.
const NoFence = true
