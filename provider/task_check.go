package provider

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// MaxTaskState is the most bytes of the input, of the result, and of all slots of a task together.
const MaxTaskState = 1 << 20

var (
	// ErrTaskIDReused: a task or a group of this id exists with another kind, input, data or group.
	ErrTaskIDReused = errors.New("the id is used by another task or group")
	// ErrTaskVersion: the task has another version or status than the decision requires, or a worker has it.
	ErrTaskVersion = errors.New("the task has changed, or a worker has it: read it again")
	// ErrTaskEnded: the task is done or undone, and never changes again. It is an ErrTaskVersion too.
	ErrTaskEnded error = taskEnded{}
)

type taskEnded struct{}

func (taskEnded) Error() string {
	return "the task has ended, and what it recorded stays as it is: no handler would read the change"
}
func (taskEnded) Is(target error) bool { return target == ErrTaskVersion }

// CodeVanished is the code of a task whose lease ended without a change: its worker may have crashed.
const CodeVanished = "vanished"

var (
	kindRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,40}/[a-z][a-z0-9_-]{0,40}$`)
	slotRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,60}$`)
)

// undoPrefix begins the name of the slot that records that a step was undone.
const undoPrefix = "undo:"

// UndoSlot returns the name of the slot that records that a step was undone.
func UndoSlot(step string) string { return undoPrefix + step }

// CheckKind returns an *eventstore.InvalidError for a kind that is not "domain/name".
func CheckKind(field, kind string) error {
	if !kindRE.MatchString(kind) {
		return invalid(field, `must be "domain/name", and each part match ^[a-z][a-z0-9_-]{0,40}$`)
	}
	return nil
}

// CheckSlot returns an *eventstore.InvalidError for a name of a step or a wait that is not ^[a-z][a-z0-9_-]{0,60}$.
func CheckSlot(field, name string) error {
	if !slotRE.MatchString(name) {
		return invalidf(field, "must match %s", slotRE)
	}
	return nil
}

// CheckTaskDrafts returns an *eventstore.InvalidError for a draft that no provider can store, and for two with one id.
func CheckTaskDrafts(drafts []TaskDraft) error {
	seen := make(map[string]struct{}, len(drafts))
	for i := range drafts {
		d, at := &drafts[i], fmt.Sprintf("tasks[%d].", i)
		if d.Err != nil {
			return invalidf(at+"input", "cannot be encoded as JSON: %s", d.Err)
		}
		if err := cmp.Or(CheckText(at+"id", d.ID, MaxIDBytes), CheckKind(at+"kind", d.Kind), CheckJSON(at+"input", d.Input, MaxTaskState)); err != nil {
			return err
		}
		if _, ok := seen[d.ID]; ok {
			return invalidf(at+"id", "an earlier task has the same id: give each task its own")
		}
		seen[d.ID] = struct{}{}
		if d.After < 0 {
			return invalidf(at+"after", "%s: must not be negative", d.After)
		}
		if err := checkTime(at+"at", d.At); err != nil {
			return err
		}
	}
	return nil
}

// checkTime refuses times outside the years 1 to 9999. The zero time passes.
func checkTime(field string, at time.Time) error {
	if _, ok := StoredTime(at); !ok {
		return invalidf(field, "must be in the years 1 to 9999")
	}
	return nil
}

// CheckTaskGroup returns an *eventstore.InvalidError for a group that no provider can store, or that has no tasks.
func CheckTaskGroup(g TaskGroupDraft) error {
	if g.Err != nil {
		return invalidf("group.data", "cannot be encoded as JSON: %s", g.Err)
	}
	if len(g.Tasks) == 0 {
		return invalid("group.tasks", "must not be empty: the group would never be complete")
	}
	return cmp.Or(CheckText("group.id", g.ID, MaxIDBytes), CheckKind("group.kind", g.Kind),
		CheckJSON("group.data", g.Data, MaxTaskState), CheckTaskDrafts(g.Tasks))
}

// CheckTaskAnswer returns an *eventstore.InvalidError for an answer that no provider can store.
func CheckTaskAnswer(a TaskAnswer) error {
	return cmp.Or(CheckText("answer.task", a.Task, MaxIDBytes), CheckSlot("answer.name", a.Name),
		CheckText("answer.id", a.ID, MaxIDBytes), CheckJSON("answer.out", a.Out, MaxTaskState))
}

// CheckPostpone returns an *eventstore.InvalidError for invalid arguments of TaskTx.Postpone.
func CheckPostpone(id string, at time.Time) error {
	if at.IsZero() {
		return invalid("at", "must not be zero")
	}
	return cmp.Or(CheckStorable("task id", id), checkTime("at", at))
}

// CheckTaskChanges returns an *eventstore.InvalidError for a change that TaskChange does not describe.
func CheckTaskChanges(changes []TaskChange) error {
	for i := range changes {
		c, at := &changes[i], fmt.Sprintf("changes[%d].", i)
		switch {
		case !slices.Contains(TaskStatuses(), c.To):
			return invalidf(at+"to", "%q: must be a status", c.To)
		case c.To == TaskWaiting && c.Open == "":
			return invalid(at+"open", "must not be empty: a waiting task waits for a slot")
		}
		if c.After < 0 && c.To != TaskWaiting {
			return invalidf(at+"after", "%s: must not be negative", c.After)
		}
		if err := cmp.Or(CheckStored(at+"id", c.ID), CheckStorable(at+"code", c.Code), CheckStorable(at+"give_up", c.GiveUp)); err != nil {
			return err
		}
	}
	return nil
}

// CheckTaskFilter checks the texts and the limit of a filter.
func CheckTaskFilter(f TaskFilter) error {
	return cmp.Or(checkLimit(f.Limit), CheckStorable("filter.ids", f.IDs...), CheckStorable("filter.kind", f.Kind),
		CheckStorable("filter.group", f.Group), CheckStorable("filter.group_kind", f.GroupKind),
		CheckStorable("filter.status", f.Status...), CheckStorable("filter.code", f.Code), CheckStorable("filter.after", f.After))
}

// CheckTaskDecision checks a filter and a decision: an invalid decision is ErrInput.
func CheckTaskDecision(f TaskFilter, d Decision) error {
	return cmp.Or(CheckTaskFilter(f), checkDecision(d))
}

// CheckTaskCancel is CheckTaskDecision, and returns ErrInput for a filter that selects all tasks.
func CheckTaskCancel(f TaskFilter, d Decision) error {
	if err := CheckTaskDecision(f, d); err != nil {
		return err
	}
	if f.After, f.Limit = "", 0; len(f.Status) == 0 {
		f.Status = nil
	}
	if reflect.ValueOf(f).IsZero() {
		return fmt.Errorf("%w: filter: selects all tasks: select those to cancel", ErrInput)
	}
	return nil
}

// CheckTaskResult returns an *eventstore.InvalidError for a result that no provider can store.
func CheckTaskResult(result json.RawMessage) error {
	return CheckJSON("result", result, MaxTaskState)
}

// WithDefaults returns r with its zero fields filled in. A negative duration is claim.ErrTerms.
func (r TaskRetention) WithDefaults() (TaskRetention, error) {
	r.Done, r.Undone = cmp.Or(r.Done, 7*24*time.Hour), cmp.Or(r.Undone, 30*24*time.Hour)
	if r.Done < 0 || r.Undone < 0 {
		return r, fmt.Errorf("%w: retention of done tasks %s, of undone ones %s: must not be negative", claim.ErrTerms, r.Done, r.Undone)
	}
	return r, nil
}

// ZeroTaskCounts returns a count of zero for each status.
func ZeroTaskCounts() map[TaskStatus]int64 {
	counts := map[TaskStatus]int64{}
	for _, s := range TaskStatuses() {
		counts[s] = 0
	}
	return counts
}

// PatchState applies a JSON merge patch (RFC 7386) to a state. If the result is not an object of slots with valid names
// and at most MaxTaskState bytes, the error is an *eventstore.InvalidError.
func PatchState(state map[string]Slot, patch json.RawMessage) (map[string]Slot, error) {
	if err := CheckJSON("patch", patch, MaxTaskState); err != nil {
		return nil, err
	}
	before, err := json.Marshal(state)
	if err != nil {
		return nil, invalidf("state", "cannot be encoded: %s", err)
	}
	merged, err := mergePatch(before, patch)
	if err != nil {
		return nil, invalidf("patch", "cannot be applied: %s", err)
	}
	return ParseState("patch", merged)
}

// ParseState parses a state. Text that is not one, or is too long, is an *eventstore.InvalidError of field.
func ParseState(field string, text []byte) (map[string]Slot, error) {
	if len(text) > MaxTaskState {
		return nil, invalidf(field, "the state would have %d bytes: at most %d are allowed", len(text), MaxTaskState)
	}
	var state map[string]Slot
	if err := json.Unmarshal(text, &state); err != nil || state == nil {
		return nil, invalid(field, "the state must be an object of slots")
	}
	for name, s := range state {
		if err := CheckSlot(field, strings.TrimPrefix(name, undoPrefix)); err != nil {
			return nil, err
		}
		if s.Call < 0 {
			return nil, invalidf(field, "%s: n must not be negative", name)
		}
	}
	return state, nil
}

// mergePatch applies a JSON merge patch.
func mergePatch(doc, patch []byte) ([]byte, error) {
	var d, p any
	if err := errors.Join(unmarshalNumbers(doc, &d), unmarshalNumbers(patch, &p)); err != nil {
		return nil, err
	}
	return json.Marshal(merge(d, p))
}

// unmarshalNumbers keeps the digits of numbers.
func unmarshalNumbers(data []byte, into *any) error {
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.UseNumber()
	return dec.Decode(into)
}

func merge(doc, patch any) any {
	members, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	object, ok := doc.(map[string]any)
	if !ok {
		object = map[string]any{}
	}
	for name, value := range members {
		if value == nil {
			delete(object, name)
		} else {
			object[name] = merge(object[name], value)
		}
	}
	return object
}
