// Package taskrow has the rules of tasks for stores that apply them in Go: claims, changes of workers,
// answers, and decisions. The store reads a row, calls a method, and writes the row that it returns, all under
// one lock. PostgreSQL has the same rules as SQL; the suites of providertest run both.
package taskrow

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// Row is a stored task. TimedOut and Spent are set only in the result of a claim.
type Row struct {
	provider.Task
	WaitEnds time.Time // the end of the wait for Waits; zero: none
}

// Record is a row of a task's trail, without the columns of the task.
type Record struct {
	What, Detail string
	provider.Decision
}

func recorded(what, detail, by string) Record { return Record{what, detail, provider.Decision{By: by}} }

// Another program may have stored a number that has no next one.
const (
	maxVersion = 1<<53 - 1 // the greatest that is exact in JSON
	maxCount   = 999_999_999
)

func (r *Row) raise() { r.Version = min(r.Version, maxVersion) + 1 }

// IsDue reports whether a claim may take r.
func (r *Row) IsDue(now time.Time) bool {
	return r.Status.Open() && !r.NextAt.IsZero() && !r.NextAt.After(now)
}

// IsAsRead reports whether r is still the task that a candidate was.
func (r *Row) IsAsRead(c *provider.Task) bool {
	return r.Version == c.Version && r.Status == c.Status && r.Attempts == c.Attempts && r.Token == c.Token
}

// Take returns r, which is due, after a claim by t, and the task as the worker gets it. It returns false if the worker
// does not get it: it was claimed, and its lease has ended for the second time in a row.
func (r Row) Take(attempts int, t claim.Terms, now time.Time) (is Row, records []Record, taken provider.Task, ok bool) {
	is = r
	spent := false
	if r.Status == provider.TaskClaimed { // its lease has ended
		is.Vanished, is.Code = min(r.Vanished, maxCount)+1, provider.CodeVanished
		records = append(records, recorded(provider.WhatFailed, provider.CodeVanished, r.ClaimedBy))
		spent = attempts > 0 && r.Attempts >= attempts
		if !spent && !r.Suspect && is.Vanished > 1 {
			is.Status, is.Suspect, is.Token = provider.TaskFailed, true, claim.Token{}
			return is, records, provider.Task{}, false
		}
	}
	if !spent {
		is.Attempts, is.LastAttemptedAt = min(r.Attempts, maxCount)+1, now
	}
	is.Doubt = is.Doubt || !is.Undo
	is.Status, is.Token, is.ClaimedBy, is.NextAt = provider.TaskClaimed, t.Token, t.Holder, now.Add(t.Lease)
	taken = is.Task
	taken.Doubt, taken.Spent = r.Doubt, spent
	taken.TimedOut = !is.WaitEnds.IsZero() && !is.WaitEnds.After(now)
	return is, records, taken, true
}

// Change returns r after c, with the records of the change. It returns false if r refuses c.
func (r Row) Change(c *provider.TaskChange, now time.Time) (is Row, records []Record, ok bool) {
	if r.refuses(c) {
		return r, nil, false
	}
	is = r
	is.Status, is.NextAt, is.Vanished = c.To, now.Add(c.After), 0
	is.raise()
	if c.To != provider.TaskClaimed {
		is.Token = claim.Token{}
	}
	is.State = CloneState(r.State)
	maps.Copy(is.State, CloneState(c.Slots))
	if c.Result != nil && !r.Undo {
		is.Result = bytes.Clone(c.Result)
	}
	ends := c.To == provider.TaskPending || c.To == provider.TaskFailed || c.To == provider.TaskAbandoned
	if ends || c.GiveUp != "" {
		is.Doubt = c.Doubt
	}
	if c.GiveUp != "" {
		is.Undo, is.Why = true, c.GiveUp
		records = append(records, recorded(provider.WhatGaveUp, c.GiveUp, is.ClaimedBy))
	}
	if c.Progress {
		is.Attempts, is.Suspect, is.Waits, is.WaitEnds = 1, false, "", time.Time{}
	}
	switch c.To {
	case provider.TaskPending:
		is.Attempts, is.Code = max(is.Attempts-1, 0), cmp.Or(c.Code, is.Code)
	case provider.TaskFailed:
		is.Code = cmp.Or(c.Code, is.Code)
		records = append(records, recorded(provider.WhatFailed, is.Code, is.ClaimedBy))
	case provider.TaskWaiting:
		is.wait(c, r.State[c.Open].Until, now)
	case provider.TaskDone:
		is.Code = ""
	case provider.TaskAbandoned:
		is.Code = cmp.Or(c.Code, is.Code)
	}
	if !c.To.Open() {
		records = append(records, is.end(string(c.To), now)) // the What constants have the names of the statuses
	}
	return is, records, true
}

// refuses reports whether c is the change of another claim, or no longer allowed.
func (r *Row) refuses(c *provider.TaskChange) bool {
	return r.Status != provider.TaskClaimed || r.Token != c.Token || c.Open != "" && r.State[c.Open].Filled() ||
		r.Undo && (c.To == provider.TaskDone || c.To == provider.TaskWaiting)
}

// wait makes r wait for c.Open. until is the end of an earlier wait for it, as its slot has it.
func (r *Row) wait(c *provider.TaskChange, until string, now time.Time) {
	ends, err := time.Parse(time.RFC3339Nano, until)
	if _, ok := provider.StoredTime(ends); err != nil || !ok {
		if ends = (time.Time{}); c.After > 0 {
			ends = now.Add(c.After)
		}
	}
	slot := r.State[c.Open]
	if slot.Until = ""; !ends.IsZero() {
		slot.Until = ends.Format(time.RFC3339Nano)
	}
	r.State[c.Open] = slot
	r.Attempts, r.Suspect, r.Doubt, r.Waits, r.WaitEnds, r.NextAt = 0, false, false, c.Open, ends, ends
}

// end ends r with its new status.
func (r *Row) end(what string, now time.Time) Record {
	detail := r.Code
	r.Suspect, r.Waits, r.WaitEnds, r.EndedAt = false, "", time.Time{}, now
	if r.Status.Final() {
		r.Attempts, detail = 0, ""
	}
	return recorded(what, detail, r.ClaimedBy)
}

// Answer returns r after a, and the result. Only AnswerTaken changes r.
func (r Row) Answer(a *provider.TaskAnswer, now time.Time) (Row, provider.AnswerOutcome) {
	slot := r.State[a.Name]
	switch {
	case slot.Filled() && slot.By == a.ID:
		return r, provider.AnswerAgain
	case slot.Filled() || r.Status.Final():
		return r, provider.AnswerLate
	}
	is := r
	is.State = CloneState(r.State)
	slot.Out, slot.By, slot.At = bytes.Clone(a.Out), a.ID, now.Format(time.RFC3339Nano)
	is.State[a.Name] = slot
	is.raise()
	is.resume(now)
	return is, provider.AnswerTaken
}

// resume makes a waiting task pending if its slot is filled.
func (r *Row) resume(now time.Time) {
	if r.Status == provider.TaskWaiting && r.State[r.Waits].Filled() {
		r.Status, r.NextAt = provider.TaskPending, now
	}
}

// Patch returns r after a patch of its state. It returns provider.ErrTaskVersion if r does not exist, does not have this
// version, or is claimed, and provider.ErrTaskEnded if it has ended.
func (r Row) Patch(version int64, patch []byte, now time.Time) (is Row, err error) {
	if r.Status.Final() {
		return r, provider.ErrTaskEnded
	}
	if r.ID == "" || r.Version != version || r.Status == provider.TaskClaimed {
		return r, provider.ErrTaskVersion
	}
	is = r
	if is.State, err = provider.PatchState(r.State, patch); err != nil {
		return r, err
	}
	is.raise()
	is.resume(now)
	return is, nil
}

// CloneState copies a state. It never returns nil.
func CloneState(state map[string]provider.Slot) map[string]provider.Slot {
	own := make(map[string]provider.Slot, len(state)+1)
	for name, s := range state {
		s.Out = bytes.Clone(s.Out)
		own[name] = s
	}
	return own
}

// IsOf reports whether r was added as d, outside of a group.
func (r *Row) IsOf(d *provider.TaskDraft) bool {
	return r.ID == d.ID && r.Kind == d.Kind && r.Group == "" && check.SameJSON(r.Input, d.Input)
}

// Digest identifies the ids, kinds and inputs of tasks, in any order. Their group has it: they may be deleted before.
func Digest(tasks []provider.TaskDraft) string {
	all := make([][3]string, len(tasks))
	for i, d := range tasks {
		all[i] = [3]string{d.ID, d.Kind, string(check.ComparableJSON(d.Input))}
	}
	slices.SortFunc(all, func(a, b [3]string) int { return strings.Compare(a[0], b[0]) })
	text, _ := json.Marshal(all) // cannot fail
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// IsGroup reports whether the stored group, which has this digest, was added as g.
func IsGroup(stored provider.TaskGroup, digest string, g provider.TaskGroupDraft) bool {
	return stored.Kind == g.Kind && digest == Digest(g.Tasks) && check.SameJSON(stored.Data, g.Data)
}
