package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// moderation hides reviews that a moderator rejects. A review is visible until then.
type moderation struct {
	ask     moderator
	timeout time.Duration // after that the review stays visible, and a verdict is too late
	worker  task.WorkerConfig
}

// moderator asks for a verdict about a review. A repeated question has the same key.
type moderator func(ctx context.Context, key string, q question) (verdict, error)

// question is a review that was posted or edited. The verdict may be sent later to
// POST /moderation/{task}.
type question struct {
	Task    string `json:"task"`
	Product string `json:"product"`
	Author  string `json:"author"`
	Stars   int    `json:"stars"`
	Summary string `json:"summary,omitempty"`
	Text    string `json:"text"`
}

// verdict is the decision of a moderator.
type verdict struct {
	Verdict string `json:"verdict"` // "publish", "hide", or "later"
	Reason  string `json:"reason,omitempty"`
}

const (
	verdictPublish = "publish"
	verdictHide    = "hide"
	verdictLater   = "later" // the moderator sends the verdict later
)

// The names of tasks and of their wait, which are stored, and their results.
const (
	moderateKind = "reviews/moderate"
	verdictWait  = "verdict"
	published    = "published"
	hidden       = "hidden"
	unanswered   = "published without a verdict"
)

// moderatedStore is a database of any kind with tasks.
type moderatedStore[Tx any] interface {
	eventstore.Store
	provider.Log
	provider.Provider[Tx]
	provider.TaskProvider[Tx]
}

// moderate is the handler of tasks. It runs again from its beginning after a crash, a failure or the
// wait; steps that are done return their recorded results.
type moderate[Tx any] struct {
	moderation
	db       moderatedStore[Tx]
	inTx     func(tx Tx) eventstore.TxStore
	commands *review.Commands
	clock    func() time.Time
}

func (m *moderate[Tx]) run(ctx context.Context, r *task.Run[Tx], q question) (string, error) {
	v, err := task.Step(ctx, r, "ask", func(ctx context.Context, key string) (verdict, error) {
		return m.ask(ctx, key, q)
	}, nil)
	if err != nil {
		return "", err
	}
	if v.Verdict == verdictLater {
		v, err = task.Wait[verdict](ctx, r, verdictWait, m.timeout)
		if errors.Is(err, task.ErrTimeout) {
			return unanswered, nil
		}
		if err != nil {
			return "", err
		}
	}
	if v.Verdict != verdictHide {
		return published, nil
	}
	return task.StepTx(ctx, r, "hide", func(ctx context.Context, tx Tx) (string, []outbox.Message, error) {
		content := review.Content{Stars: q.Stars, Summary: q.Summary, Text: q.Text}
		_, err := m.commands.HideTx(ctx, m.inTx(tx), q.Product, q.Author, content, v.Reason, m.clock())
		if errors.Is(err, eventstore.ErrStreamEnded) { // it is erased: there is nothing to hide
			err = nil
		}
		return hidden, nil, err
	}, nil)
}

// moderationServices returns the runner that starts a task for each review with a text, and the
// worker of these tasks.
func moderationServices[Tx any](db moderatedStore[Tx], inTx func(tx Tx) eventstore.TxStore, m moderation) ([]kinora.Service, error) {
	commands, err := review.NewCommands(db)
	if err != nil {
		return nil, err
	}
	h := &moderate[Tx]{moderation: m, db: db, inTx: inTx, commands: commands, clock: time.Now}
	kind := task.Define(moderateKind, h.run)
	start := func(ctx context.Context, tx Tx, event string, recorded, reviewed time.Time, q question) error {
		// Imported records are reviewed long before they are recorded.
		if q.Text == "" || recorded.Sub(reviewed) > 24*time.Hour {
			return nil
		}
		q.Task = "moderate-" + event
		return db.TasksIn(tx).Enqueue(ctx, kind.New(q.Task, q))
	}
	// From the log each event starts one task, whatever the broker is.
	submitted := projector.Define("moderation", review.Types, projector.Options{From: eventstore.From{Now: true}},
		projector.On("posted", func(ctx context.Context, tx Tx, e eventstore.Event[review.Posted]) error {
			d := e.Data
			return start(ctx, tx, e.ID, e.RecordedAt, d.ReviewedAt, question{"", d.Product, d.Author, d.Stars, d.Summary, d.Text})
		}),
		projector.On("edited", func(ctx context.Context, tx Tx, e eventstore.Event[review.Edited]) error {
			d := e.Data
			return start(ctx, tx, e.ID, e.RecordedAt, d.ReviewedAt, question{"", d.Product, d.Author, d.Stars, d.Summary, d.Text})
		}),
	)
	runner, err1 := projector.NewRunner(db, fromLog(db), projector.RunnerConfig{Lease: lease}, submitted)
	worker, err2 := task.NewWorker(db, m.worker, kind)
	return []kinora.Service{runner, worker}, errors.Join(err1, err2)
}

// answer passes a verdict to its task. The id of the message makes a repeated request harmless.
func (a *api) answer(w http.ResponseWriter, r *http.Request) error {
	var body struct {
		ID string `json:"id"`
		verdict
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	if body.Verdict != verdictPublish && body.Verdict != verdictHide {
		return badRequest(`verdict must be "publish" or "hide"`)
	}
	out, err := json.Marshal(body.verdict)
	if err != nil {
		return err
	}
	outcome, err := a.db.answer(r.Context(), task.Answer{Task: r.PathValue("task"), Name: verdictWait, ID: body.ID, Out: out})
	if err != nil {
		return err
	}
	switch outcome {
	case task.NotFound:
		return &httpError{Status: http.StatusNotFound, Code: "no_task", Message: "no review waits for this verdict: check the task"}
	case task.Late:
		return &httpError{Status: http.StatusConflict, Code: "late", Message: "there is another verdict, or it is too late for one"}
	}
	return writeJSON(w, http.StatusOK, map[string]task.Outcome{"outcome": outcome})
}
