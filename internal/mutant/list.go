package mutant

// Group is the mutants of one part of Kinora.
type Group struct {
	Title   string
	Mutants []Mutant
}

// Groups lists the mutants. An edit's old text is short and part of the mechanism, so that other
// changes of the file do not affect it. A mutant that no longer applies fails
// TestEveryMutantApplies.
var Groups = []Group{
	{"Markers, appends, the log and the outbox", stores},
	{"Claims, backoff and maintenance", claims},
	{"Units and parked messages", units},
	{"Checkpoints and their modes", progress},
	{"Generations", generations},
	{"Readers of the log", readers},
	{"Rebuilds, rollbacks and verifications", rebuilds},
	{"Tables of read models, and their names", tables},
	{"Tasks", tasks},
	{"Event types", events},
	{"Read models in Redis", redis},
	{"Handlers and projectors in a Watermill router", routers},
	{"Messages and rows of other software", decoders},
	{"Messages that are not trusted", untrusted},
	{"Snapshots, repeated commands and appends that share a transaction", appends},
	{"Segments", segments},
	{"The edges of a service", edges},
	{"Settings of sessions", settings},
	{"Pauses, requests and surveys", operations},
	{"Telemetry and health", observers},
	{"The page for operators", pages},
}

// All lists the mutants of all groups.
var All = all()

func all() (mutants []Mutant) {
	for _, g := range Groups {
		mutants = append(mutants, g.Mutants...)
	}
	return mutants
}

// stores lists the mutants of markers, generations, appends, the log and the outbox.
var stores = []Mutant{
	{
		Name: "no_marker",
		What: "an existing marker does not prevent a handler from running",
		Edits: []Edit{
			{File: "providers/memory/unit.go", Old: "s.mark(m, build, marker{now, position})", New: "(s.mark(m, build, marker{now, position}) || true)"},
			{File: "providers/sqlite/do.go", Old: "return !marked[m] })", New: "return true })"},
			{File: "providers/postgres/open.go", Old: "return w.marked[", New: "return true || w.marked["},
		},
		Tests: []Test{
			{"./projector", "TestRedeliveryTakesEffectOnce/with_markers"},
			{"./providers/sqlite", "TestMessageDeliveredManyTimesAtOnceAppliesOnce"},
			{"./providers/postgres", "TestOneMessageAHundredTimesThroughTwoProcesses"},
		},
		Cells: []string{"storm", "kill"},
	},
	{
		Name: "marker_apart",
		What: "markers are committed before the handler's transaction begins",
		Edits: []Edit{{File: "providers/postgres/open.go", Old: `	w.queueMarkers(b, sql)
`, New: `	w.queueMarkers(b, sql)
	if !w.IsReplay() && w.Careful == nil {
		b.Queue("commit")
		b.Queue("begin")
	}
`}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Units/Transaction/nothing_of_a_failed_unit_is_left"}},
		Cells: []string{"conflicts", "kill"},
	},
	{
		Name: "batch_on_conflict",
		What: "a unit in one round trip ignores an existing marker instead of failing",
		Edits: []Edit{
			{File: "providers/postgres/batch.go", Old: "mustMarkSQL)", New: `mustMarkSQL+" on conflict do nothing")`},
		},
		Tests: []Test{{"./providers/postgres", "TestBatchedUnitsApplyOnce"}},
		Cells: []string{"storm", "kill"},
	},
	{
		Name: "no_generation_fence",
		What: "a unit of work does not take its projector's fence",
		Edits: []Edit{{
			File: "providers/postgres/open.go",
			Old:  "	pg_advisory_xact_lock_shared($1::int, $2::int)",
			New:  "	$1::int, $2::int",
		}},
		Tests: []Test{{"./providers/postgres", "TestUnitsAndASwitchOfGenerationsWaitForEachOther"}},
		Cells: []string{"rebuild"},
	},
	{
		Name: "no_fence",
		What: "marks are not fenced by the claim's token",
		Edits: []Edit{
			{File: "providers/memory/entries.go", Old: "e.Status != outbox.Claimed || e.Token != m.Token {", New: "e.Status != outbox.Claimed {"},
			{File: "providers/sqlite/claim.go", Old: "and token = ?2", New: "and ?2 is not null", Count: 2},
			{File: "providers/postgres/mark.go", Old: "o.token = m.token", New: "m.token is not null", Count: 2},
			{File: "providers/postgres/mark.go", Old: "o.token = $2::uuid", New: "$2::uuid is not null"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Outbox/Claim/a_late_mark_changes_nothing"},
			{"./providers/sqlite", "TestLateMarkChangesNothing"},
			{"./tests/fault", "TestNoTwoRelaysHoldAClaim"},
		},
		Cells: []string{"zombie"},
	},
	{
		Name: "half_guard",
		What: "taking an entry does not check the earlier entries of its key again",
		Edits: []Edit{
			{File: "provider/entry.go", Old: "case !e.IsEligible(now), e.Seq <= q.After:", New: "case e.Seq <= q.After:\n			continue\n		case !e.IsEligible(now):"},
			{File: "providers/sqlite/claim.go", Old: "query := takeEntry", New: "query := takeUnordered"},
			{File: "providers/postgres/claim.go", Old: "and e.id not in (select id from picked where not exhausted)", New: "and false"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Outbox/Claim/a_scan_after_a_Seq"},
			{"./providers/sqlite", "TestTakeDoesNotPassAnEarlierEntry"},
			{"./providers/postgres", "TestClaimStatementsThatOverlapDoNotSplitAKey"},
		},
		Cells: []string{"clock", "kill"},
	},
	{
		Name:  "held_no_barrier",
		What:  "a claim passes entries of its key that are held",
		Edits: []Edit{{File: "providers/postgres/claim.go", Old: "where e.held and e.topic <> ''", New: "where false"}},
		Tests: []Test{{"./providers/postgres", "TestHeldEntriesKeepTheirPlace"}},
		Cells: []string{"poison"},
	},
	{
		Name: "clock_per_row",
		What: "a claim reads the clock again for every row",
		Edits: []Edit{
			{File: "providers/postgres/claim.go", Old: "'claimed') and o.next_attempt_at <= ck.t", New: "'claimed') and o.next_attempt_at <= clock_timestamp()"},
			{File: "providers/postgres/claim.go", Old: "e.next_attempt_at <= ck.t", New: "e.next_attempt_at <= clock_timestamp()"},
			{
				File: "providers/postgres/claim.go",
				Old:  "'claimed', last_attempt_at = ck.t, next_attempt_at = ck.until",
				New:  "'claimed', last_attempt_at = clock_timestamp(), next_attempt_at = clock_timestamp() + (ck.until - ck.t)",
			},
		},
		Tests: []Test{{"./providers/postgres", "TestAClaimReadsTheClockOnce"}},
		Cells: []string{"kill", "clock"},
	},
	{
		Name: "worker_clock",
		What: "statements read the clock of the process that sends them instead of the server's",
		Edits: []Edit{
			{File: "providers/postgres/postgres.go", Old: "import (\n", New: "import (\n\t\"os\"\n"},
			{File: "providers/postgres/postgres.go", Old: "func (db *Provider) q(statement string) string {\n", New: `func (db *Provider) q(statement string) string {
	if skew := os.Getenv("KINORA_FAULT_SKEW"); skew != "" { // in seconds: see tests/fault/skewed.go
		statement = strings.ReplaceAll(statement, "clock_timestamp()", "(clock_timestamp() + interval '"+skew+" s')")
	}
`},
		},
		Cells: []string{"clock"},
	},
	{
		Name:  "no_version_guard",
		What:  "an append moves its stream's row from any version",
		Edits: []Edit{{File: "providers/postgres/append.go", Old: "and version = $9::bigint", New: "and $9::bigint is not null"}},
		Tests: []Test{{"./providers/postgres", "TestAStaleVersionIsAConflict"}},
		Cells: []string{"kill"},
	},
	{
		Name:  "log_without_proof",
		What:  "a page of the log ends at the highest visible position",
		Edits: []Edit{{File: "providers/postgres/log_settled.go", Old: "position = is.position\n", New: "position = is.head\n"}},
		Tests: []Test{
			{"./providers/postgres", "TestNoEventIsSkippedWhateverTheOrderOfCommits"},
			{"./providers/postgres", "TestAPageWaitsForAnOpenAppendOnly"},
		},
	},
	{
		Name: "gap_lock_not_awaited",
		What: "a reader of the log ignores the holders of the gap lock",
		Edits: []Edit{{
			File: "providers/postgres/log_settled.go",
			Old:  "select distinct l.virtualtransaction from pg_locks l where ",
			New:  "select distinct l.virtualtransaction from pg_locks l where false and ",
		}},
		Tests: []Test{
			{"./providers/postgres", "TestNoEventIsSkippedWhateverTheOrderOfCommits"},
			{"./providers/postgres", "TestAPageWaitsForAPreparedAppend"},
		},
	},
	{
		Name: "log_rows_with_holders",
		What: "a reader of the log lists the holders of the gap lock before it reads the highest visible position",
		Edits: []Edit{
			{File: "providers/postgres/log_settled.go", Old: "	b := &pgx.Batch{}\n	hidden := db.queueByIndex(b)\n", New: `	if s.holders, err = collect(ctx, db.pool, pgx.RowTo[string], db.q(holdersSQL)); err != nil {
		return s, err
	}
	b := &pgx.Batch{}
	hidden := db.queueByIndex(b)
`},
			{File: "providers/postgres/log_settled.go", Old: "queueAll(b, &s.holders, ", New: "queueAll(b, new([]string), "},
		},
		Tests: []Test{{"./providers/postgres", "TestNoEventIsSkippedWhateverTheOrderOfCommits"}},
	},
	{
		Name:  "log_of_another_server",
		What:  "a position that was settled on one server counts on the next one",
		Edits: []Edit{{File: "providers/postgres/log_settled.go", Old: "is.branch != now.branch ||", New: "is.branch == \"\" ||"}, {File: "providers/postgres/log.go", Old: "if branch != r.branch {", New: "if false {"}},
		Tests: []Test{{"./providers/postgres", "TestARestartBeginsTheProofAgain"}},
	},
	{
		Name: "two_transactions",
		What: "an append commits its events before its outbox entries",
		Edits: []Edit{
			{File: "providers/sqlite/append.go", Old: `	err = d.writeTx(ctx, func(u *unit) error {
		at, err = a.run(`, New: `	topics := a.topics
	a.topics = make([][]string, len(topics))
	err = d.writeTx(ctx, func(u *unit) error {
		at, err = a.run(`},
			{File: "providers/sqlite/append.go", Old: `		u.entries = a.entries > 0 && !at.Replayed
		return err
	})
`, New: `		u.entries = a.entries > 0 && !at.Replayed
		return err
	})
	if a.topics = topics; err == nil && !at.Replayed {
		err = d.writeTx(ctx, func(u *unit) error { return a.writeEntries(ctx, u.session, at, at.Log+"/") })
	}
`},
			{File: "providers/postgres/append.go", Old: `	at, err := a.tryUntilKnown(ctx, send)
`, New: `	if a.entries {
		noEntries := &DB{&Provider{pool: db.pool, cfg: Config{Schema: db.cfg.Schema}}}
		if a, err = noEntries.newAppend(ctx, db.pool, stream, expected, events); err != nil {
			return eventstore.Appended{}, err
		}
		at, err := a.run(ctx, db.pool)
		if err != nil {
			return at, err
		}
		var out []provider.OutboxMessage
		for i, d := range events {
			for _, topic := range db.cfg.Route(stream, d) {
				out = append(out, provider.FromEvent(stream, at.Version-int64(len(events)-i-1), d, topic))
			}
		}
		return at, pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error { return db.InTx(tx).Enqueue(ctx, out...) })
	}
	at, err := a.tryUntilKnown(ctx, send)
`},
		},
		Tests: []Test{{"./providers/sqlite", "TestEventsAndEntriesCommitTogether"}},
		Cells: []string{"conflicts", "backends"},
	},
}
