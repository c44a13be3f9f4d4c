package kinora

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Projector is a *projector.Projector of any type of transaction.
type Projector interface {
	Name() string
	Lag(ctx context.Context, s projector.State) (projector.Lag, error)
}

// ReadyConfig says what Ready checks.
type ReadyConfig struct {
	// Store is the database, such as a *postgres.DB. It is required. For read models whose events are
	// in another database it is projector.StateOf of both.
	Store projector.State
	// Projectors are those whose lag is checked. One that reads no log would never be ready: see Projector.Lag.
	Projectors []Projector
	// Lag is the greatest age of an event that a projector has neither applied nor parked, by the clocks of the store
	// and of this process. Zero means 1m.
	Lag     time.Duration
	Open    time.Duration // how long an append may stay open and hold back the log; zero means 1m
	Timeout time.Duration // how long a probe may take; zero means 2s
	Again   time.Duration // how long an answer is used again; zero means 1s
}

// CheckState is the result of a check, as the body of Ready has it.
type CheckState struct {
	Name   string  `json:"name"` // "database", "schema", "log", "lag <projector>"
	OK     bool    `json:"ok"`
	Age    float64 `json:"age_seconds,omitempty"` // of the oldest event that waits, or since when the log has not advanced
	Events int64   `json:"events,omitempty"`      // that wait
	Reason string  `json:"reason,omitempty"`      // why it is not ok
}

// Ready returns a handler for readiness probes: it replies 200 if the service can work, and 503 otherwise.
//   - database: the store replies.
//   - schema: the store can be used by this program (provider.ReadyChecker): it is migrated, and the
//     role has the rights of a service.
//   - log: events become settled. An append that stays open holds them back.
//   - lag: no event waits for a projector for longer than ReadyConfig.Lag, and its handlers take events (Lag.NotBegun).
//
// The body is JSON: {"ok":true,"checks":[{"name":"database","ok":true}]}. It has no texts of errors.
//
// A probe takes at most the Timeout. Probes at the same time share one check, and a check that does not return keeps
// others from starting. Lag is counted in the store, a second per million events: a longer count is a failed check.
//
// Ready returns an error if the Store is nil, a projector is nil, or a duration is negative.
func Ready(cfg ReadyConfig) (http.Handler, error) {
	if cfg.Store == nil {
		return nil, errors.New("ready: the store is nil: give one")
	}
	for _, p := range cfg.Projectors {
		if p == nil {
			return nil, errors.New("ready: a projector is nil: leave it out")
		}
	}
	for _, d := range []struct {
		is   *time.Duration
		zero time.Duration
	}{{&cfg.Lag, time.Minute}, {&cfg.Open, time.Minute}, {&cfg.Timeout, 2 * time.Second}, {&cfg.Again, time.Second}} {
		if *d.is < 0 {
			return nil, fmt.Errorf("ready: a duration is %s: must not be negative", *d.is)
		}
		if *d.is == 0 {
			*d.is = d.zero
		}
	}
	return &ready{cfg: cfg}, nil
}

// ready answers readiness probes.
type ready struct {
	cfg ReadyConfig

	mu      sync.Mutex
	running chan struct{} // closed when the check that runs has ended; nil: none runs
	last    readiness

	// Only the running check uses these.
	settled int64     // a settled position of the log
	movedAt time.Time // when it was seen to move, or to be the last one
}

type readiness struct {
	at     time.Time
	OK     bool         `json:"ok"`
	Checks []CheckState `json:"checks"`
}

// ServeHTTP implements http.Handler.
func (h *ready) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	if !h.last.at.IsZero() && since(h.last.at) < h.cfg.Again {
		last := h.last
		h.mu.Unlock()
		reply(w, r, last.OK, last)
		return
	}
	if h.running == nil {
		h.running = make(chan struct{})
		go h.check(h.running)
	}
	running := h.running
	h.mu.Unlock()
	late := time.NewTimer(h.cfg.Timeout)
	defer late.Stop()
	var a readiness
	select {
	case <-running:
		h.mu.Lock()
		a = h.last
		h.mu.Unlock()
	case <-r.Context().Done():
		return
	case <-late.C:
		a.Checks = []CheckState{{Name: "database", Reason: reasonTimeout}}
	}
	reply(w, r, a.OK, a)
}

// check checks everything once, and stores the answer.
func (h *ready) check(done chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), h.cfg.Timeout)
	defer cancel()
	a := readiness{OK: true, Checks: h.checks(ctx)}
	for _, c := range a.Checks {
		a.OK = a.OK && c.OK
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	a.at = now()
	h.last, h.running = a, nil
	close(done)
}

func (h *ready) checks(ctx context.Context) []CheckState {
	head, err := h.cfg.Store.LogPosition(ctx, eventstore.From{Now: true})
	database := CheckState{Name: "database", OK: err == nil, Reason: reasonOf(err)}
	schema := CheckState{Name: "schema", OK: true}
	if c, ok := h.cfg.Store.(provider.ReadyChecker); ok {
		if fault := c.ReadyFor(ctx, provider.AnyService); fault != nil {
			schema.OK, schema.Reason = false, "the database does not fit the program: the services return the error when they start"
			database.OK, database.Reason = true, ""
		}
	}
	all := []CheckState{database, schema}
	if !database.OK || !schema.OK {
		return all
	}
	all = append(all, h.log(ctx, head))
	for _, p := range h.cfg.Projectors {
		all = append(all, h.lag(ctx, p))
	}
	return all
}

// log checks that the settled position follows the last visible event.
func (h *ready) log(ctx context.Context, head int64) CheckState {
	is := CheckState{Name: "log", OK: true}
	if h.movedAt.IsZero() {
		h.settled, h.movedAt = head, now()
	}
	q := provider.LogQuery{After: h.settled, Limit: 10_000, NoData: true}
	for range 10 { // if there are more pages, the log is advancing
		page, err := h.cfg.Store.LogPage(ctx, q)
		if err != nil {
			return CheckState{Name: "log", Reason: reasonOf(err)}
		}
		if page.End.Position > h.settled || page.End.Position >= head {
			h.settled, h.movedAt = page.End.Position, now()
		}
		if q.After = h.settled; !page.Full {
			break
		}
	}
	if h.settled >= head {
		return is
	}
	held := since(h.movedAt)
	if is.Age = held.Seconds(); held > h.cfg.Open {
		is.OK, is.Reason = false, "an open append holds back the log"
	}
	return is
}

func (h *ready) lag(ctx context.Context, p Projector) CheckState {
	is := CheckState{Name: "lag " + p.Name(), OK: true}
	lag, err := p.Lag(ctx, h.cfg.Store)
	if err != nil {
		is.OK, is.Reason = false, reasonOf(err)
		return is
	}
	if len(lag.NotBegun) > 0 {
		is.OK, is.Reason = false, "new handlers do not take events yet"
		return is
	}
	if is.Events = lag.Events; lag.Events > 0 {
		behind := since(lag.Oldest)
		if is.Age = max(behind, 0).Seconds(); behind > h.cfg.Lag {
			is.OK, is.Reason = false, "behind by more than "+h.cfg.Lag.String()
		}
	}
	return is
}

const reasonTimeout = "no reply in time"

// reasonOf returns the reason of a failed query, without the text of the error.
func reasonOf(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, context.DeadlineExceeded):
		return reasonTimeout
	case errors.Is(err, projector.ErrNoCheckpoint):
		return "no runner has read the log for it"
	case errors.Is(err, projector.ErrOtherLog):
		return "it reads another log"
	case errors.Is(err, eventstore.ErrUnsafeLog):
		return "the log cannot be read safely here"
	}
	if code := provider.CodeOf(err); code != "" {
		return "error " + code
	}
	return "unreachable"
}

func now() time.Time { return time.Now() } //nolint:forbidigo // the time between two probes

func since(t time.Time) time.Duration { return now().Sub(t) }

// LoopState is a loop of a service, as the body of Healthy has it.
type LoopState struct {
	Name string  `json:"name"`         // such as "relay", "projector ratings", "handler ratings/posted"
	Late float64 `json:"late_seconds"` // for how long it should have moved; 0: it moves
	OK   bool    `json:"ok"`
}

// Healthy returns a handler for liveness probes: it replies 200 while the loops of the services move,
// and 503 if one is late for longer than late. Zero means 1m. Restart the process then: nothing else
// ends a call that does not return.
//   - A relay is late during a Publish call. The time of each call counts alone, so a slow broker is not late.
//   - A runner or a worker is late if a handler has not returned after the end of its context, and if an observer does
//     not return. Neither a slow handler nor a database that is down makes it late.
//   - A service whose Run has returned an error is late.
//   - Other services are late if they have a method Late() map[string]time.Duration, and it says so.
//
// The body is JSON: {"ok":true,"loops":[{"name":"relay","late_seconds":0,"ok":true}]}. A probe queries no database and
// never waits.
func Healthy(late time.Duration, services ...Service) http.Handler {
	if late <= 0 {
		late = time.Minute // longer than publishers usually wait for a broker
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		all := map[string]time.Duration{}
		for _, s := range services {
			if s, ok := s.(interface {
				Late() map[string]time.Duration
			}); ok {
				for name, d := range s.Late() {
					all[name] = max(all[name], d)
				}
			}
		}
		body := struct {
			OK    bool        `json:"ok"`
			Loops []LoopState `json:"loops"`
		}{true, []LoopState{}}
		for _, name := range slices.Sorted(maps.Keys(all)) {
			one := LoopState{Name: name, Late: all[name].Seconds(), OK: all[name] <= late}
			body.Loops, body.OK = append(body.Loops, one), body.OK && one.OK
		}
		reply(w, r, body.OK, body)
	})
}

// reply replies to a probe.
func reply(w http.ResponseWriter, r *http.Request, ok bool, body any) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(body) // an error means that the client is gone
}
