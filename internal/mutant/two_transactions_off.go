//go:build !mutant_two_transactions

package mutant

// TwoTransactions: an append commits its events before its outbox entries.
const TwoTransactions = false
