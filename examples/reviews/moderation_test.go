package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/task"
)

// fakeModerator answers by what the text of a review says, and records each question by its key.
type fakeModerator struct {
	*httptest.Server
	mu    sync.Mutex
	calls map[string]int      // by key
	asked map[string]question // by author
}

func newFakeModerator(t *testing.T) *fakeModerator {
	m := &fakeModerator{calls: map[string]int{}, asked: map[string]question{}}
	m.Server = httptest.NewServer(m)
	t.Cleanup(m.Close)
	return m
}

func (m *fakeModerator) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q question
	if json.NewDecoder(r.Body).Decode(&q) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	key := r.Header.Get("Idempotency-Key")
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls[key]++
	m.asked[q.Author] = q
	switch {
	case strings.HasPrefix(q.Text, "later"):
		w.WriteHeader(http.StatusAccepted)
	case strings.HasPrefix(q.Text, "refused"):
		w.WriteHeader(http.StatusUnprocessableEntity)
	case strings.HasPrefix(q.Text, "down") && m.calls[key] < 3:
		w.WriteHeader(http.StatusServiceUnavailable)
	case strings.HasPrefix(q.Text, "good"):
		fmt.Fprint(w, `{"verdict":"publish"}`)
	default:
		fmt.Fprint(w, `{"verdict":"hide","reason":"rude"}`)
	}
}

// moderatedService is a service with a moderator.
type moderatedService struct{ *testService }

func startModerated(t *testing.T, d database, ask moderator, timeout time.Duration) *moderatedService {
	t.Helper()
	s := startService(t, d, inProcess, patience)
	services, err := s.db.moderation(moderation{ask: ask, timeout: timeout, worker: task.WorkerConfig{
		Backoff: claim.Backoff{Base: 5 * time.Millisecond}, Poll: 20 * time.Millisecond,
	}})
	require.NoError(t, err)
	pipe, err := pipelineFlags{Broker: noneKind}.start(t.Context(), d, s.db, services...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pipe.Stop()) })
	return &moderatedService{s}
}

// post posts a review and returns its task once that has the status.
func (s *moderatedService) post(author, text string, status task.Status) task.Task {
	s.Helper()
	at := call(s.T, "POST", s.url+"/products/p/reviews", reviewJSON(author, 3, text), strong).decode(s.T)["version"].(float64)
	var id string
	for e, err := range s.db.ReadStream(s.Context(), eventstore.StreamName(review.Category, eventstore.JoinID("p", author)), int64(at)-1) {
		require.NoError(s, err)
		id = "moderate-" + e.ID
		break
	}
	return s.task(id, status)
}

func (s *moderatedService) task(id string, status task.Status) (found task.Task) {
	s.Helper()
	require.Eventually(s, func() bool {
		all, err := s.db.Tasks(s.Context(), task.Filter{IDs: []string{id}})
		require.NoError(s, err)
		if len(all) == 1 {
			found = all[0]
		}
		return len(all) == 1 && found.Status == status
	}, patience, 5*time.Millisecond, "%s must become %s", id, status)
	return found
}

// visible requires the authors whose reviews are shown.
func (s *moderatedService) visible(authors ...string) {
	s.Helper()
	require.EventuallyWithT(s, func(c *assert.CollectT) {
		shown := []string{}
		a := call(s.T, "GET", s.url+"/products/p", "")
		if a.status == http.StatusOK {
			for _, one := range a.decode(s.T)["latest"].([]any) {
				shown = append(shown, one.(map[string]any)["author"].(string))
			}
		}
		assert.ElementsMatch(c, authors, shown)
	}, patience, 10*time.Millisecond)
}

// send sends a verdict, and returns the status and the outcome or the code of the error.
func (s *moderatedService) send(task, id, verdict string) string {
	a := call(s.T, "POST", s.url+"/moderation/"+task, fmt.Sprintf(`{"id":%q,"verdict":%q,"reason":"rude"}`, id, verdict))
	if a.status != http.StatusOK {
		return fmt.Sprint(a.status, " ", code(s.T, a))
	}
	return fmt.Sprint(a.status, " ", a.decode(s.T)["outcome"])
}

// TestModeration: a review with a text is moderated over HTTP. The moderator answers at once, after
// failures, later, twice, or not at all.
// Promise: T1.1, T5.1
func TestModeration(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		m := newFakeModerator(t)
		s := startModerated(t, d, newModerator(m.URL), time.Hour)
		s.post("ann", "good", task.Done)
		s.post("ben", "rude", task.Done)
		s.visible("ann")
		s.post("cy", "down", task.Done) // two failures, then "hide"
		s.visible("ann")
		held := s.post("dee", "refused", task.Abandoned)
		require.Equal(t, "http_422", held.Code)
		s.visible("ann", "dee")
		require.Contains(t, call(t, "GET", s.url+"/", "").text, `<dt>Abandoned</dt><dd class="error">1</dd>`)

		waiting := s.post("eve", "later", task.Waiting)
		s.visible("ann", "dee", "eve")
		require.Equal(t, "200 taken", s.send(waiting.ID, "m1", "hide"))
		require.Equal(t, "200 again", s.send(waiting.ID, "m1", "hide"))
		require.Equal(t, "409 late", s.send(waiting.ID, "m2", "publish"))
		s.task(waiting.ID, task.Done)
		s.visible("ann", "dee")
		require.Equal(t, "200 again", s.send(waiting.ID, "m1", "hide"), "also after the end")
		require.Equal(t, "404 no_task", s.send("moderate-unknown", "m1", "hide"))
		require.Equal(t, "400 bad_request", s.send(waiting.ID, "m1", "perhaps"))
		require.Equal(t, "422 rejected", s.send(waiting.ID, "", "hide"), "the id of the message is required")

		// The author edits the review before the verdict about the old text.
		old := s.post("fay", "later", task.Waiting)
		s.post("fay", "good", task.Done)
		require.Equal(t, "200 taken", s.send(old.ID, "m1", "hide"))
		s.task(old.ID, task.Done)
		s.visible("ann", "dee", "fay")
		s.post("eve", "good", task.Done) // a hidden review may be posted again
		s.visible("ann", "dee", "fay", "eve")

		// The author erases the review before the verdict.
		erased := s.post("hal", "later", task.Waiting)
		require.Equal(t, http.StatusOK, call(t, "DELETE", s.url+"/products/p/reviews/hal?forever", "", strong).status)
		require.Equal(t, "200 taken", s.send(erased.ID, "m1", "hide"))
		s.task(erased.ID, task.Done)
		s.visible("ann", "dee", "fay", "eve")

		require.Equal(t, http.StatusCreated, call(t, "POST", s.url+"/products/p/reviews", reviewJSON("gil", 5, ""), strong).status)
		tasks, err := s.db.Tasks(t.Context(), task.Filter{})
		require.NoError(t, err)
		require.Len(t, tasks, 9, "one for each text")
		m.mu.Lock()
		defer m.mu.Unlock()
		require.Len(t, m.calls, 9, "one key for each task")
		require.Equal(t, 3, m.calls[m.asked["cy"].Task+"/ask"], "the key stays the same")
		require.NotContains(t, m.asked, "gil")
	})
}

// TestTasksCommand: an operator sees an abandoned task, requeues it after the cause is fixed, and
// cancels another one.
func TestTasksCommand(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		var fixed atomic.Bool
		s := startModerated(t, d, func(context.Context, string, question) (verdict, error) {
			if !fixed.Load() {
				return verdict{}, permanent("http_401", errors.New("the token has expired"))
			}
			return verdict{verdictHide, "rude"}, nil
		}, time.Hour)
		ann, ben := s.post("ann", "rude", task.Abandoned), s.post("ben", "rude", task.Abandoned)
		o := runOperator(t, d, "tasks")
		require.Zero(t, o.code, o.stderr)
		require.Regexp(t, regexp.QuoteMeta(ann.ID)+`\s+abandoned\s+http_401`, o.stdout)
		require.Contains(t, o.stdout, ben.ID)
		require.Contains(t, runOperator(t, d, "tasks", "--requeue").stderr, "--reason is missing")
		require.Equal(t, 1, runOperator(t, d, "tasks", "--requeue", "--id", "other", "--reason", "r").code)

		o = runOperator(t, d, "tasks", "--cancel", "--id", ben.ID, "--reason", "not so rude", "--by", "dee")
		require.Equal(t, "1 canceled\n", o.stdout, o.stderr)
		require.Equal(t, task.Undone, s.task(ben.ID, task.Undone).Status)
		fixed.Store(true)
		o = runOperator(t, d, "tasks", "--requeue", "--code", "http_401", "--reason", "new token")
		require.Equal(t, "1 requeued\n", o.stdout, o.stderr)
		s.task(ann.ID, task.Done)
		s.visible("ben")
		trail, err := s.db.TaskTrail(t.Context(), ben.ID)
		require.NoError(t, err)
		require.Contains(t, fmt.Sprint(trail), "dee not so rude")
	})
}

// TestModeratorNeverAnswers: after the timeout the review stays visible, and a verdict is too late.
// Promise: T5.1
func TestModeratorNeverAnswers(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		m := newFakeModerator(t)
		s := startModerated(t, d, newModerator(m.URL), 50*time.Millisecond)
		ended := s.post("ann", "later", task.Done)
		require.JSONEq(t, `"`+unanswered+`"`, string(ended.Result))
		require.Equal(t, "409 late", s.send(ended.ID, "m1", "hide"))
		s.visible("ann")
	})
}

// TestServeModerates: the flags of the service reach the moderator.
func TestServeModerates(t *testing.T) {
	t.Parallel()
	m := newFakeModerator(t)
	p := startServiceProcess(t, "--db", databases["sqlite"](t).flag(), "--addr", "127.0.0.1:0", "--moderator", m.URL)
	require.Contains(t, []int{http.StatusCreated, http.StatusOK}, postUntilVisible(t, p.url+"/products/p/reviews", reviewJSON("ann", 3, "rude")))
	require.Eventually(t, func() bool {
		return call(t, "GET", p.url+"/products/p", "").status == http.StatusNotFound
	}, patience, 10*time.Millisecond, "the review must be hidden")
	require.Zero(t, p.stop(t, syscall.SIGTERM), p.stderr.String())
}

// TestLocalRule: without a moderator, reviews with links are hidden.
func TestLocalRule(t *testing.T) {
	t.Parallel()
	s := startModerated(t, databases["sqlite"](t), newModerator(""), time.Hour)
	s.post("ann", "see https://pills.example", task.Done)
	s.post("ben", "It pours.", task.Done)
	s.visible("ben")
}
