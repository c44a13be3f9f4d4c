package mutant

import "slices"

const (
	tasksSQL    = "providers/postgres/migrations/00001_kinora.sql"
	attemptsSQL = "providers/postgres/migrations/00004_attempts.sql" // claims and changes

	// unfilled is the guard of a slot in kinora.change_tasks.
	unfilled = "(opens[i] = '' or not coalesce(o.state -> opens[i] ? 'out' or o.state -> opens[i] ->> 'timeout' = 'true', false))"
)

// conforms is a case of the conformance suite of tasks on PostgreSQL.
func conforms(name string) []Test {
	return []Test{{"./providers/postgres", "TestConformance/Tasks/" + name}}
}

// tasks lists the mutants of durable tasks.
var tasks = slices.Concat(storedTasks, workers)

// storedTasks lists those of the provider. Cells do not notice those that change the schema: the suite
// itself creates it.
var storedTasks = []Mutant{
	{
		Name:  "task_no_fence",
		What:  "a change of a task does not compare the token",
		Edits: []Edit{{File: attemptsSQL, Old: "o.token = tokens[i] and o.status = 'claimed'", New: "o.status = 'claimed'", Count: 4}},
		Tests: conforms("Changes/no_claim,_no_change"),
	},
	{
		Name:  "no_slot_guard",
		What:  "a change fills a slot that is filled",
		Edits: []Edit{{File: attemptsSQL, Old: "and " + unfilled, New: "", Count: 3}},
		Tests: conforms("Claim/States/a_filled_slot_is_settled_again"),
	},
	{
		Name:  "done_despite_undo",
		What:  "a task ends as done although it was canceled",
		Edits: []Edit{{File: attemptsSQL, Old: "and not o.undo\n				and " + unfilled, New: "and " + unfilled}},
		Tests: conforms("Claim/States/the_handler_returns_after_a_cancellation"),
	},
	{
		Name:  "forward_again",
		What:  "a claim makes a task go forward again",
		Edits: []Edit{{File: attemptsSQL, Old: "			claimed_by = holder,\n", New: "			claimed_by = holder,\n			undo       = false,\n"}},
		Tests: conforms("Claim/States/the_direction_stays"),
	},
	{
		Name:  "suspects_together",
		What:  "tasks that have vanished twice in a row are claimed with others",
		Edits: []Edit{{File: attemptsSQL, Old: "o.status = 'claimed' and not o.suspect and o.vanished >= 1 as again", New: "false as again"}},
		Tests: conforms("Claim/States/vanished_twice_in_a_row"),
	},
	{
		Name: "failures_counted",
		What: "attempts are counted when a task has failed, not when it is claimed",
		Edits: []Edit{
			{File: attemptsSQL, Old: "else least(o.attempts, 999999999) + 1 end", New: "else o.attempts end"},
			{File: attemptsSQL, Old: "					else case when progresses[i] then 1 else o.attempts end end,", New: "					when 'failed' then o.attempts + 1\n					else case when progresses[i] then 1 else o.attempts end end,"},
		},
		Tests: conforms("Claim/Vanished/tasks_that_kill_their_workers"),
	},
	{
		Name: "inbox_apart",
		What: "answers are kept in a table of their own until their task is claimed",
		Edits: []Edit{
			{File: tasksSQL, Old: "-- Fills a slot with an answer, and returns the outcome.\n", New: "create table kinora.task_inbox (task text, name text, slot jsonb);\n"},
			{
				File: tasksSQL,
				Old:  "	update kinora.tasks t set\n		state      = t.state || jsonb_build_object(of_name, case",
				New: `	insert into kinora.task_inbox select of_id, of_name, jsonb_build_object('out', answer, 'by', answer_id)
		where exists (select from kinora.tasks t where t.id = of_id);
	update kinora.tasks t set status = 'pending', next_at = clock_timestamp() where t.id = of_id and t.status = 'waiting' and t.waits = of_name;
	if exists (select from kinora.tasks t where t.id = of_id) then
		return 'taken';
	end if;
	update kinora.tasks t set
		state      = t.state || jsonb_build_object(of_name, case`,
			},
			{
				File: attemptsSQL,
				Old:  "			claimed_by = holder,\n",
				New:  "			claimed_by = holder,\n			state      = o.state || coalesce((select jsonb_object_agg(b.name, b.slot) from kinora.task_inbox b where b.task = o.id), '{}'),\n",
			},
			{
				File: attemptsSQL,
				Old:  "			for update;\n			applied := found;\n			if applied then\n",
				New:  "				and not exists (select from kinora.task_inbox b where b.task = ids[i] and b.name = opens[i])\n			for update;\n			applied := found;\n			if applied then\n",
			},
		},
		Tests: conforms("Answers/an_answer_before_the_wait"),
	},
	{
		Name: "group_uncounted",
		What: "a finisher looks at the other tasks of its group, without a lock that they share",
		Edits: []Edit{{
			File: "providers/postgres/tasks.go",
			Old:  "update kinora.task_groups set open = open - 1, completed_at = case when open = 1 then clock_timestamp() end\nwhere id = $1::text returning kind, data, total, open",
			New:  "select kind, data, total, (select count(*)::int from kinora.tasks t where t.group_id = g.id and t.status <> 'done') from kinora.task_groups g where id = $1::text",
		}},
		Tests: conforms("Crowds/finishers_of_a_group"),
		Cells: []string{"task-points"},
	},
	{
		Name:  "group_open",
		What:  "tasks can be added to a group later",
		Edits: []Edit{{File: tasksSQL, Old: "	if not found then\n		-- tasks that", New: "	if false then\n		-- tasks that"}},
		Tests: conforms("Enqueue/a_group's_id_that_is_used"),
	},
	{
		Name:  "renew_waits",
		What:  "a renewal waits for the rows of tasks that are locked",
		Edits: []Edit{{File: "providers/postgres/tasks.go", Old: "order by o.id for update skip locked", New: "order by o.id for update"}},
		Tests: []Test{{"./providers/postgres", "TestARenewalWaitsForNoRow"}},
		Cells: []string{"task-broken"},
	},
	{
		Name:  "clock_joined",
		What:  "the clock is not a bound of the walk of a claim: a claim reads every waiting task",
		Edits: []Edit{{File: attemptsSQL, Old: "o.kind = k.kind and o.next_at <= ck\n", New: "o.kind = k.kind and o.next_at <= (clock_timestamp())\n"}},
		Tests: []Test{{"./providers/postgres", "TestAClaimReadsNoWaitingTasks"}},
	},
	{
		Name:  "oldest_first",
		What:  "a claim takes the tasks that are due for longest, whatever their kind",
		Edits: []Edit{{File: attemptsSQL, Old: "from seen s order by s.turn, s.next_at, s.id limit most", New: "from seen s order by s.next_at, s.id limit most"}},
		Tests: conforms("Claim/Claims/kinds_take_turns"),
	},
	{
		Name:  "null_dropped",
		What:  "slots are set as a merge patch does, which drops nulls",
		Edits: []Edit{{File: attemptsSQL, Old: "else o.state || slots[i] end", New: "else jsonb_strip_nulls(o.state || slots[i]) end", Count: 3}},
		Tests: conforms("Changes/null_is_a_value"),
	},
	{
		Name:  "until_moves",
		What:  "a wait begins anew when its task waits again",
		Edits: []Edit{{File: attemptsSQL, Old: "if slot ? 'until' then", New: "if false then"}},
		Tests: conforms("Changes/the_end_of_a_wait_is_set_once"),
	},
	{
		Name:  "attempts_for_ever",
		What:  "a recorded step does not begin a new budget of attempts",
		Edits: []Edit{{File: attemptsSQL, Old: "				attempts   = case when progresses[i] then 1 else o.attempts end,\n", New: ""}},
		Tests: conforms("Claim/Vanished/progress_begins_a_new_budget"),
	},
	{
		Name:  "patch_refused_without_reason",
		What:  "a patch of a task that has ended asks for a newer version",
		Edits: []Edit{{File: "providers/postgres/tasks_requests.go", Old: "return provider.ErrTaskEnded\n", New: "return provider.ErrTaskVersion\n"}},
		Tests: conforms("Decisions/patch_at_another_version"),
	},
	{
		Name:  "attempt_untimed",
		What:  "a claim does not set the time of the last attempt",
		Edits: []Edit{{File: attemptsSQL, Old: "then o.attempted_at else ck end", New: "then o.attempted_at else o.attempted_at end"}},
		Tests: conforms("Claim/States/a_claim_takes_a_pending_task"),
	},
	{
		Name:  "failure_untold",
		What:  "the trail of a task has no attempt that failed",
		Edits: []Edit{{File: attemptsSQL, Old: "statuses[i] in ('failed', 'abandoned') then\n				insert", New: "statuses[i] in ('abandoned') then\n				insert"}},
		Tests: conforms("Claim/States/an_error_with_attempts_left"),
	},
	{
		Name:  "crash_untold",
		What:  "the trail of a task has no worker that vanished",
		Edits: []Edit{{File: attemptsSQL, Old: "from picked p where p.vanished),", New: "from picked p where false),"}},
		Tests: conforms("Claim/States/a_claim_at_the_limit_of_attempts"),
	},
	{
		Name:  "doubt_lost",
		What:  "a claim does not note that the next step may begin",
		Edits: []Edit{{File: attemptsSQL, Old: "			doubt      = o.doubt or not o.undo,\n", New: ""}},
		Tests: conforms("Changes/the_step_in_doubt"),
	},
}

// workers lists the mutants of package task.
var workers = []Mutant{
	{
		Name: "status_before_record",
		What: "a task ends before the audit sink has its record",
		Edits: []Edit{
			{File: "task/end.go", Old: "	if c.To == Done || c.To == Undone || c.To == Abandoned {\n		if err := a.audit(", New: "	if c.To == \"\" {\n		if err := a.audit("},
			{File: "task/end.go", Old: "	crash.Point(\"task: after its end\")\n", New: "	crash.Point(\"task: after its end\")\n	if c.To == Done || c.To == Undone || c.To == Abandoned {\n		_ = a.audit(a.work, c.To, c.Code)\n	}\n"},
		},
		Tests: []Test{{"./task", "TestTheAuditSink"}},
	},
	{
		Name: "completion_apart",
		What: "a group is completed in a transaction of its own",
		Edits: []Edit{
			{File: "task/finish.go", Old: "	ms, err = complete(ctx, tx, got.Group)\n", New: `	err = a.db.Do(ctx, provider.Unit{}, func(ctx context.Context, tx Tx, _ provider.Found) (provider.Closing, error) {
		ms, err := complete(ctx, tx, got.Group)
		return provider.Closing{Output: ms}, err
	})
`},
		},
		Tests: []Test{{"./providers/postgres", "TestAGroupIsCompletedOnItsOneConnection"}},
	},
	{
		Name:  "group_without_record",
		What:  "a group is completed without a record for the audit sink",
		Edits: []Edit{{File: "task/finish.go", Old: "err = a.append(ctx, Record{", New: "_ = (Record{"}},
		Tests: []Test{{"./task", "TestTheSinkGetsTheEndOfAGroup"}},
	},
	{
		Name: "position_only",
		What: "the result of a step is found by the number of the call alone",
		Edits: []Edit{
			{File: "task/run.go", Old: "	slot := r.task.State[name]\n	before :=", New: "	slot := r.task.State[r.first(func(_ string, s provider.Slot) bool { return s.Call == r.calls })]\n	return slot, nil\n	before :="},
			{File: "task/run.go", Old: "	if name := r.first(func(name string, s provider.Slot) bool { return s.Call > 0 && !r.asked[name] }); name != \"\" {", New: "	if name := \"\"; name != \"\" {"},
		},
		Tests: []Test{{"./task", "TestChangedCode"}},
	},
	{
		Name: "name_only",
		What: "the result of a step is found by its name alone",
		Edits: []Edit{
			{File: "task/run.go", Old: "	slot := r.task.State[name]\n	before :=", New: "	slot := r.task.State[name]\n	return slot, nil\n	before :="},
			{File: "task/run.go", Old: "	if name := r.first(func(name string, s provider.Slot) bool { return s.Call > 0 && !r.asked[name] }); name != \"\" {", New: "	if name := \"\"; name != \"\" {"},
		},
		Tests: []Test{{"./task", "TestChangedCode"}},
		Cells: []string{"task-code"},
	},
	{
		Name:  "undo_recorded_only",
		What:  "a step that may have begun, and is not recorded, is not undone",
		Edits: []Edit{{File: "task/run.go", Old: "if !r.task.Doubt && undo != nil {", New: "if undo != nil {"}},
		Tests: []Test{{"./task", "TestCancelUndoesTheStepInDoubt"}},
	},
	{
		Name:  "undo_past_failure",
		What:  "earlier steps are undone although the undo of a later one has failed",
		Edits: []Edit{{File: "task/finish.go", Old: "		case err != nil:\n			return a.fail(ctx, causeOf(ctx, err))\n		}\n	}\n	a.task = r.task\n", New: "		}\n	}\n	a.task = r.task\n"}},
		Tests: []Test{{"./task", "TestUndoStopsAtTheFirstFailure"}},
	},
	{
		Name: "fence_first",
		What: "the transaction of a step changes the task's row first, and keeps it locked",
		Edits: []Edit{{File: "task/run.go", Old: "		out, ms, err := fn(ctx, tx)\n		r.clock.database()\n", New: `		if _, err := r.w.db.TasksIn(tx).Change(ctx, provider.TaskChange{ID: r.task.ID, Token: r.task.Token, To: Claimed, After: r.w.cfg.Lease}); err != nil {
			return nil, err
		}
		out, ms, err := fn(ctx, tx)
		r.clock.database()
`}},
		Tests: []Test{{"./providers/postgres", "TestAnAnswerDoesNotWaitForAStep"}},
	},
	{
		Name:  "conflict_counted",
		What:  "a conflict of two steps over a version counts as a failure",
		Edits: []Edit{{File: "task/finish.go", Old: "for n := 1; n < unitTries &&", New: "for n := unitTries; n < unitTries &&"}},
		Tests: []Test{{"./task", "TestConflictingStepsRunAgainAtOnce"}},
	},
	{
		Name:  "claim_before_room",
		What:  "a worker claims tasks although it has no room for them",
		Edits: []Edit{{File: "task/worker.go", Old: "return min(e.cfg.Concurrency-(e.active-e.ending), 2*e.cfg.Concurrency-e.active)", New: "return e.cfg.Concurrency"}},
		Tests: []Test{{"./task", "TestTheBoundComesBeforeTheClaim"}},
	},
	{
		Name: "kinds_of_domain",
		What: "a worker claims tasks of its domains whose kind it does not define",
		Edits: []Edit{{File: "task/worker.go", Old: "	return provider.TaskQuery{Kinds: kinds, Attempts", New: `	for _, domain := range domains(e.names) {
		stored, _ := e.db.TaskKinds(e.hard, domain)
		kinds = slices.Concat(kinds, stored)
	}
	return provider.TaskQuery{Kinds: kinds, Attempts`}},
		Tests: []Test{{"./task", "TestAWorkerClaimsOnlyKindsThatItDefines"}},
		Cells: []string{"task-code"},
	},
	{
		Name:  "kind_not_passed",
		What:  "a worker claims the last task of a group at once again, although it has left it to a worker that defines the group",
		Edits: []Edit{{File: "task/end.go", Old: "a.passed[t.Kind], c.After = now().Add(passFor), 0", New: "c.After = 0"}},
		Tests: []Test{{"./task", "TestAWorkerLeavesTheLastTaskOfAGroupToAnother"}},
	},
	{
		Name:  "group_left_without_result",
		What:  "the last task of a group is left to another worker without the result of its handler, which runs again",
		Edits: []Edit{{File: "task/end.go", Old: "Code: codeUnknownGroup, Doubt: t.Doubt, Result: result}", New: "Code: codeUnknownGroup, Doubt: t.Doubt}"}, {File: "task/end.go", Old: "func (a *attempt[Tx]) leave(result json.RawMessage) ending {", New: "func (a *attempt[Tx]) leave(json.RawMessage) ending {"}},
		Tests: []Test{{"./task", "TestTheLastTaskOfAGroupWaitsForAWorkerThatDefinesIt/Define"}},
	},
	{
		Name:  "kinds_unreported",
		What:  "a worker does not report its kinds",
		Edits: []Edit{{File: "task/maintain.go", Old: "Holder: e.cfg.Holder, Kinds: slices.Compact(kinds)}", New: "Holder: e.cfg.Holder}"}},
		Tests: []Test{{"./task", "TestAWorkerReportsItsKinds"}, {"./admin", "TestDoctorNamesKindsOfTasksThatNoWorkerDefines"}},
	},
	{
		Name:  "due_rounds_down",
		What:  "a task is due up to a microsecond before its time",
		Edits: []Edit{{File: "providers/postgres/tasks_requests.go", Old: "new(roundUp(d.At))", New: "&d.At"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Tasks/Enqueue/times_of_a_task"}},
	},
	{
		Name:  "failures_audited",
		What:  "the sink also gets failed attempts, waits and releases",
		Edits: []Edit{{File: "task/end.go", Old: "if c.To == Done || c.To == Undone || c.To == Abandoned {", New: "if true {"}},
		Tests: []Test{{"./task", "TestTheSinkGetsNoAttemptThatFailed"}},
	},
	{
		Name:  "one_at_a_time",
		What:  "RunOnce claims one task",
		Edits: []Edit{{File: "task/worker.go", Old: "e.claim(ctx, e.cfg.Concurrency, false)", New: "e.claim(ctx, 1, false)"}},
		Tests: []Test{{"./task", "TestRunOnceRunsABatch"}},
	},
	{
		Name:  "paused_limit_ends",
		What:  "a timer that fires while its limit is paused ends the handler",
		Edits: []Edit{{File: "task/attempt.go", Old: "if l.ended || l.due.IsZero() || now().Before(l.due) {", New: "if l.ended {"}},
		Tests: []Test{{"./task", "TestALimitThatIsPausedEndsNothing"}},
	},
	{
		Name:  "ended_compared_again",
		What:  "a comparison of a generation that has ended is tried for ever",
		Edits: []Edit{{File: "projector/internal/rebuild/compare.go", Old: " || errors.Is(err, provider.ErrEnded) {", New: " {"}},
		Tests: []Test{{"./projector/internal/rebuild", "TestComparisonsThatAreTriedAgain/the_generation_has_ended"}},
	},
}
