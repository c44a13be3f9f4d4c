// Package bolt has, in its tests, a provider of the first two tiers on a file of bbolt, a key-value store. It
// shows what docs/providers.md asks for, and is no part of the library. Read store_test.go for transactions and
// tables, events_test.go for the first tier, and units_test.go and progress_test.go for the second.
package bolt
