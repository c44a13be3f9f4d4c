//go:build mutant_ack_early

package mutant

// AckEarly: a delivery is acked before it takes effect.
const AckEarly = true
