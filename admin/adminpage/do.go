package adminpage

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strings"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// doFunc carries out an act, and returns the page that follows.
type doFunc func(h *Handler, ctx context.Context, q *query, d provider.Decision) (next string, err error)

var acts = map[string]doFunc{
	"/pause": setPause(true), "/resume": setPause(false), "/verify": (*Handler).verify, "/rebuild": (*Handler).rebuild, "/generation": (*Handler).generation,
	"/dry-run": (*Handler).dryRun, "/complete-task": (*Handler).completeTask, "/cancel-act": (*Handler).cancelAct,

	"/replay":        onRows[filters.Parked]("parked", "replayed", true, func(h *Handler) decide[projector.ParkedFilter] { return h.ops.Replay }),
	"/skip":          onRows[filters.Parked]("parked", "skipped", false, func(h *Handler) decide[projector.ParkedFilter] { return h.ops.SkipParked }),
	"/requeue":       onRows[filters.Entries]("outbox", "requeued", true, func(h *Handler) decide[provider.EntryFilter] { return h.ops.Requeue }),
	"/skip-entries":  onRows[filters.Entries]("outbox", "skipped-entries", false, func(h *Handler) decide[provider.EntryFilter] { return h.ops.SkipEntries }),
	"/requeue-tasks": onRows[filters.Tasks]("tasks", "requeued-tasks", true, onTasks(provider.TaskInspector.RequeueTasks)),
	"/cancel-tasks":  onRows[filters.Tasks]("tasks", "canceled-tasks", false, onTasks(provider.TaskInspector.CancelTasks)),
}

// notices are what a page says after an act.
var notices = map[string]string{
	"paused": "Paused. Services follow within about a second.", "resumed": "Resumed. Services follow within about a second.", "unchanged": "That was so already: nothing was changed.",
	"replayed": "messages are applied again by a running runner.", "skipped": "messages were skipped.", "requeued": "entries were requeued.", "skipped-entries": "entries were skipped.",
	"requeued-tasks": "tasks were requeued.", "canceled-tasks": "tasks were canceled.", "completed": "The task is complete.", "requested": "The rebuild is requested: a running runner takes it up.",
	"controlled": "Done. A running runner follows within about a second.", "canceled": "The request is canceled.",
}

// mostTold is how many notices are kept: those of the last acts.
const mostTold = 1000

// told keeps the notice of an act for the page that follows, and returns the address of that page. The address has no text, and
// nothing that becomes one: who makes up an address must not make the page say that something was done.
func (h *Handler) told(next string) string {
	page, query, _ := strings.Cut(next, "?")
	values, err := url.ParseQuery(query)
	text := notices[values.Get("said")]
	if err != nil || text == "" {
		return next
	}
	if n := values.Get("n"); n != "" {
		text = n + " " + text
	}
	token := rand.Text()
	h.state.mu.Lock()
	defer h.state.mu.Unlock()
	if h.state.told == nil {
		h.state.told = map[string]string{}
	}
	if h.state.told[token] = text; len(h.state.tokens) == mostTold {
		delete(h.state.told, h.state.tokens[0])
		h.state.tokens = h.state.tokens[1:]
	}
	h.state.tokens = append(h.state.tokens, token)
	values.Del("n")
	values.Set("said", token)
	return page + "?" + values.Encode()
}

// noticeOf returns the notice of an act that this process has carried out; "" for another one.
func (h *Handler) noticeOf(q *query) string {
	h.state.mu.Lock()
	defer h.state.mu.Unlock()
	return h.state.told[q.values.Get("said")]
}

// carryOut checks a form, carries out its act, and leads to the page that follows.
func (h *Handler) carryOut(w http.ResponseWriter, r *http.Request, v viewer, do doFunc) {
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch err := h.csrf.Check(r); {
	case err != nil:
		h.fail(w, r, v, problem{http.StatusForbidden, "Forms of other sites are refused."})
		return
	case v.by == "":
		h.fail(w, r, v, problem{http.StatusForbidden, "This page is read-only."})
		return
	case kind != "application/x-www-form-urlencoded":
		h.fail(w, r, v, problem{http.StatusUnsupportedMediaType, "This address takes forms."})
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	if err := r.ParseForm(); err != nil {
		p := problem{http.StatusBadRequest, "The form cannot be read."}
		if _, long := errors.AsType[*http.MaxBytesError](err); long {
			p = problem{http.StatusRequestEntityTooLarge, "The form is too long."}
		}
		h.fail(w, r, v, p)
		return
	}
	// An act that has begun ends also if the browser goes away.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), actLimit)
	defer cancel()
	q := &query{values: r.PostForm}
	d := provider.Decision{By: v.by, Reason: strings.TrimSpace(q.long("reason", 1000))}
	if d.Reason == "" {
		q.refuse("reason", "is missing: it is stored with the act")
	}
	next, err := do(h, ctx, q, d)
	if q.err != nil {
		err = q.err
	}
	if err != nil {
		h.fail(w, r, v, err)
		return
	}
	w.Header().Set("Location", h.told(next))
	w.WriteHeader(http.StatusSeeOther)
}

// confirmed reports whether the form is valid so far and the person has typed what it shows.
func (q *query) confirmed(want string) bool {
	if q.err == nil && want == "" {
		q.refuse("confirm", "cannot be checked: nothing is selected")
	}
	if q.err == nil && show(strings.TrimSpace(q.long("confirm", maxBody))) != show(strings.TrimSpace(want)) {
		q.refuse("confirm", fmt.Sprintf("must be %q: nothing was changed", show(want)))
	}
	return q.err == nil
}

func setPause(paused bool) doFunc {
	return func(h *Handler, ctx context.Context, q *query, d provider.Decision) (string, error) {
		kind, name := q.oneOf("kind", provider.PauseProjector, provider.PauseTopic), q.required("name")
		if q.err != nil {
			return "", q.err
		}
		do, what := h.ops.Resume, "resumed"
		if paused {
			do, what = h.ops.Pause, "paused"
		}
		changed, err := do(ctx, kind, name, d)
		if !changed {
			what = "unchanged"
		}
		if kind == provider.PauseTopic {
			return link("outbox", "said", what, "topic", name), err
		}
		return link("projector", "said", what, "name", name), err
	}
}

// ignored returns the columns that a verification did not compare.
func ignored(a provider.Act) string {
	var r provider.VerifyRequest
	_ = json.Unmarshal(a.Detail, &r) // what cannot be read ignores nothing
	return strings.Join(r.Ignore, ",")
}

func (h *Handler) verify(ctx context.Context, q *query, d provider.Decision) (string, error) {
	name := q.required("projector")
	r := provider.VerifyRequest{Repair: q.oneOf("repair", "yes") != ""}
	for column := range strings.SplitSeq(q.long("ignore", 4096), ",") {
		if column = strings.TrimSpace(column); column != "" {
			r.Ignore = append(r.Ignore, column)
		}
	}
	if r.Repair {
		q.confirmed(name)
	}
	if q.err != nil {
		return "", q.err
	}
	id, err := h.ops.Verify(ctx, name, r, d)
	return link("act", "id", fmt.Sprint(id)), err
}

func (h *Handler) rebuild(ctx context.Context, q *query, d provider.Decision) (string, error) {
	name := q.required("projector")
	r := projector.Rebuild{How: projector.BlueGreen, Decision: d, Rate: int(min(q.number("rate"), 1<<31-1)), Check: q.oneOf("check", "yes") != ""}
	if q.oneOf("how", "blue-green", "in-place") == "in-place" {
		r.How = projector.InPlace
	}
	if r.How == projector.InPlace && r.Check {
		q.refuse("check", "is for blue/green: in place there are no old tables")
	}
	if !q.confirmed(name) {
		return "", q.err
	}
	_, err := h.ops.Rebuild(ctx, name, r)
	return link("projector", "said", "requested", "name", name), err
}

func (h *Handler) generation(ctx context.Context, q *query, d provider.Decision) (string, error) {
	name, n := q.required("projector"), q.number("generation")
	actions := map[string]projector.GenerationAction{"pause": projector.Pause, "resume": projector.Resume, "cancel": projector.Cancel, "promote": projector.Promote, "drop": projector.Drop}
	action := q.oneOf("action", "pause", "resume", "cancel", "promote", "drop")
	if action == "" {
		q.refuse("action", "is missing")
	}
	if action != "pause" && action != "resume" {
		q.confirmed(name)
	}
	if q.err != nil {
		return "", q.err
	}
	err := h.ops.Control(ctx, name, int(n), actions[action], d)
	return link("projector", "said", "controlled", "name", name), err
}

func (h *Handler) dryRun(ctx context.Context, q *query, d provider.Decision) (string, error) {
	f := actOn[filters.Parked](q)
	if f.Projector == "" {
		q.refuse("projector", "is missing")
	}
	if q.err != nil {
		return "", q.err
	}
	id, err := h.ops.DryRun(ctx, f.Filter(), d)
	return link("act", "id", fmt.Sprint(id)), err
}

// onRows is an act on the rows of a list, which leads to page. If it can be undone, one row needs no confirmation.
func onRows[L rowList[F], F any](page, what string, canUndo bool, act func(h *Handler) decide[F]) doFunc {
	return func(h *Handler, ctx context.Context, q *query, d provider.Decision) (string, error) {
		list := actOn[L](q)
		if !canUndo || !list.IsOne() {
			q.confirmed(list.Confirm())
		}
		if q.err != nil {
			return "", q.err
		}
		n, err := act(h)(ctx, list.Filter(), d)
		return link(page, "said", what, "n", digits(int64(n))), err
	}
}

// onTasks is an act on tasks, if the store keeps any.
func onTasks(act func(provider.TaskInspector, context.Context, provider.TaskFilter, provider.Decision) (int, error)) func(*Handler) decide[provider.TaskFilter] {
	return func(h *Handler) decide[provider.TaskFilter] {
		return func(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
			store, err := h.ops.Tasks()
			if err != nil {
				return 0, err
			}
			return act(store, ctx, f, d)
		}
	}
}

func (h *Handler) completeTask(ctx context.Context, q *query, d provider.Decision) (string, error) {
	id, result := q.required("id"), json.RawMessage(q.long("result", maxBody))
	if q.err == nil && !json.Valid(result) {
		q.refuse("result", "is not JSON")
	}
	if !q.confirmed(id) {
		return "", q.err
	}
	store, err := h.ops.Tasks()
	if err != nil {
		return "", err
	}
	err = store.CompleteTask(ctx, id, result, d)
	return link("task", "said", "completed", "id", id), err
}

func (h *Handler) cancelAct(ctx context.Context, q *query, d provider.Decision) (string, error) {
	id := q.number("id")
	if q.err != nil {
		return "", q.err
	}
	canceled, err := h.ops.Cancel(ctx, id, d)
	what := "canceled"
	if !canceled {
		what = "unchanged"
	}
	return link("act", "said", what, "id", fmt.Sprint(id)), err
}
