package mutant

// claims lists the mutants of the paths of a claim, of its backoff, and of maintenance under leases.
var claims = []Mutant{
	{
		Name:  "claim_waits",
		What:  "a claim waits for entries that other transactions have locked",
		Edits: []Edit{{File: "providers/postgres/claim.go", Old: "for update of o skip locked", New: "for update of o", Count: 2}},
		Tests: []Test{{"./providers/postgres", "TestAClaimSkipsLockedEntries"}},
	},
	{
		Name: "claim_not_committed",
		What: "a claim returns entries although its commit failed",
		Edits: []Edit{{
			File: "providers/postgres/claim.go",
			Old:  "were sent\n\t\treturn nil, err",
			New:  "were sent\n\t\treturn entries, err",
		}},
		Tests: []Test{{"./providers/postgres", "TestAClaimWhoseCommitFailsReturnsNothing"}},
	},
	{
		Name: "claim_unsorted",
		What: "a claim returns entries in the order in which the database returned their rows",
		Edits: []Edit{{
			File: "providers/postgres/claim.go",
			Old:  "return cmp.Compare(a.Seq, b.Seq) })",
			New:  "return 0 * cmp.Compare(a.Seq, b.Seq) })",
		}},
		Tests: []Test{{"./providers/postgres", "TestAClaimIsSortedBySeq"}},
	},
	{
		Name: "claim_in_transaction",
		What: "a transaction of the caller has claims",
		Edits: []Edit{{File: "providers/memory/entries.go", Old: "// openEntries yields", New: `func (t *Tx) ClaimEntries(ctx context.Context, q provider.EntryQuery, terms claim.Terms) ([]provider.Entry, error) {
	return t.db.ClaimEntries(ctx, q, terms)
}

// openEntries yields`}},
		Tests: []Test{{"./providers/memory", "TestConformance/Outbox/Entries/no_claim_in_a_transaction"}},
	},
	{
		Name: "waits_for_itself",
		What: "a claim inside a unit waits for the unit",
		Edits: []Edit{
			{File: "providers/memory/memory.go", Old: "return ok && !m.ended.Load()", New: "return ok && m == nil"},
			{File: "providers/sqlite/unit.go", Old: "ok && d.current.Load() == u {", New: "ok && u == nil {"},
		},
		Tests: []Test{{"./providers/memory", "TestACallInsideATransactionIsRefused"}, {"./providers/sqlite", "TestACallInsideATransactionIsRefused/Open"}},
	},
	{
		Name: "no_jitter",
		What: "relays and runners ignore the jitter of their backoff",
		Edits: []Edit{
			{File: "outbox/publish.go", Old: "		m.After, _ = b.cfg.Backoff.Delay(", New: `		exact := b.cfg.Backoff
		exact.Jitter = 0
		m.After, _ = exact.Delay(`},
			{File: "projector/internal/unit/handle.go", Old: "\t\trow.After, _ = retry.Delay(", New: "\t\texact := retry\n\t\texact.Jitter = 0\n\t\trow.After, _ = exact.Delay("},
		},
		Tests: []Test{
			{"./outbox", "TestRelayAppliesItsJitter"},
			{"./projector", "TestRunnerAppliesItsJitter"},
		},
	},
	{
		Name:  "another_limit",
		What:  "the default limit of attempts is 9",
		Edits: []Edit{{File: "claim/claim.go", Old: "cmp.Or(b.Attempts, 8)", New: "cmp.Or(b.Attempts, 9)"}},
		Tests: []Test{{"./claim", "TestBackoffIsExhaustedAtItsLimit"}, {"./outbox", "TestRelayBackoffScheduleThenAbandoned"}},
	},
	{
		Name:  "two_limits",
		What:  "a claim of a relay abandons an entry that ended its relays only after twice the limit of attempts",
		Edits: []Edit{{File: "outbox/relay.go", Old: "Attempts: r.cfg.Backoff.Attempts", New: "Attempts: 2 * r.cfg.Backoff.Attempts"}},
		Tests: []Test{{"./outbox", "TestAnEntryThatEndsItsRelaysIsAbandonedAtTheLimit"}},
	},
	{
		Name: "all_sweep",
		What: "every relay and every runner deletes old rows at the same time",
		Edits: []Edit{{
			File: "internal/sweep/sweep.go",
			Old:  "if more, err = t.Leases.AcquireLease(ctx, t.Name, terms); !more || err != nil {",
			New:  "if _, err = t.Leases.AcquireLease(ctx, t.Name, terms); err != nil {",
		}},
		Tests: []Test{
			{"./outbox", "TestOneRelayDeletesOldEntries"},
			{"./projector", "TestOneRunnerDeletesOldMarkers"},
		},
	},
	{
		Name:  "sweep_ends_with_its_process",
		What:  "after a process has died while it deleted old rows, no other process takes over",
		Edits: []Edit{{File: "internal/sweep/sweep.go", Old: "length = 15 * time.Second", New: "length = 1000 * time.Hour"}},
		Tests: []Test{
			{"./outbox", "TestOneRelayDeletesOldEntries"},
			{"./projector", "TestOneRunnerDeletesOldMarkers"},
		},
	},
	{
		Name:  "sweep_not_released",
		What:  "a process that has deleted all old rows keeps its lease",
		Edits: []Edit{{File: "internal/sweep/sweep.go", Old: "ReleaseLease(limited, t.Name, terms.Token)", New: "ReleaseLease(limited, t.Name, claim.Token{})"}},
		Tests: []Test{{"./outbox", "TestOneRelayDeletesOldEntries"}},
	},
}
