package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
)

// httpError is an answer that says what is wrong.
type httpError struct {
	Status  int      `json:"-"`
	Code    string   `json:"code"`    // for programs
	Message string   `json:"message"` // for people
	Written *written `json:"-"`       // what was done all the same
}

func (e *httpError) Error() string { return e.Message }

func badRequest(message string) error {
	return &httpError{Status: http.StatusBadRequest, Code: "bad_request", Message: message}
}

// asHTTP is what a client is told about err. What is nobody's fault but ours is told in no detail.
func asHTTP(err error) *httpError {
	if known, ok := errors.AsType[*httpError](err); ok {
		return known
	}
	switch {
	case errors.Is(err, review.ErrNoReview):
		return &httpError{Status: http.StatusNotFound, Code: "no_review", Message: err.Error()}
	case errors.Is(err, review.ErrRejected), errors.Is(err, eventstore.ErrInvalid):
		return &httpError{Status: http.StatusUnprocessableEntity, Code: "rejected", Message: err.Error()}
	case errors.Is(err, eventstore.ErrConflict):
		return &httpError{Status: http.StatusConflict, Code: "conflict", Message: "others changed this review again and again: nothing was written, send it again"}
	case errors.Is(err, eventstore.ErrAmbiguous):
		return &httpError{Status: http.StatusServiceUnavailable, Code: "unknown_outcome", Message: "the database did not say whether it was written: look, or send it again"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), postgresAway(err):
		return &httpError{Status: http.StatusServiceUnavailable, Code: "unavailable", Message: "the database does not answer now"}
	}
	return &httpError{Status: http.StatusInternalServerError, Code: "internal", Message: "something went wrong here"}
}

// requestLimit is how long a request may take, waiting for strong consistency included.
const requestLimit = 30 * time.Second

// jsonHandler answers errors as JSON, and logs those that are ours.
func jsonHandler(handle func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestLimit)
		defer cancel()
		if err := handle(w, r.WithContext(ctx)); err != nil {
			answerError(w, r, err)
		}
	})
}

// explain makes of err what the client is told, and logs what is our fault.
func explain(w http.ResponseWriter, r *http.Request, err error) *httpError {
	e := asHTTP(err)
	_, told := errors.AsType[*httpError](err)
	if !told && e.Status >= http.StatusInternalServerError && r.Context().Err() == nil {
		slog.Error("request", "route", r.Pattern, "status", e.Status, "err", err)
	}
	if e.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	return e
}

func answerError(w http.ResponseWriter, r *http.Request, err error) {
	e := explain(w, r, err)
	_ = writeJSON(w, e.Status, struct {
		Error   *httpError `json:"error"`
		Written *written   `json:"written,omitempty"`
	}{e, e.Written})
}

// writeJSON returns no error of the connection: whoever was there is gone.
func writeJSON(w http.ResponseWriter, status int, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n'))
	return nil
}

func mediaType(r *http.Request) string {
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")) // none is the empty one
	return kind
}

// front is what every request passes: writes from other sites and for other hosts than listen are
// refused, answers say what a page may load, and what no route takes is told as JSON.
func front(mux *http.ServeMux, listen string) http.Handler {
	guard := http.NewCrossOriginProtection()
	guard.SetDenyHandler(jsonHandler(func(http.ResponseWriter, *http.Request) error {
		return &httpError{Status: http.StatusForbidden, Code: "cross_origin", Message: "a write from another site"}
	}))
	guarded := knownHosts(listen, guard.Handler(mux))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		if _, pattern := mux.Handler(r); pattern == "" {
			refusal := &refusal{header: h, status: http.StatusNotFound}
			mux.ServeHTTP(refusal, r)
			if refusal.status == http.StatusNotFound || refusal.status == http.StatusMethodNotAllowed {
				answerError(w, r, refusal.reason())
				return
			}
		}
		guarded.ServeHTTP(w, r)
	})
}

// refusal takes the mux's own answer to a request without a route: the status, and for 405 the header Allow.
type refusal struct {
	header http.Header
	status int
}

func (f *refusal) Header() http.Header       { return f.header }
func (f *refusal) WriteHeader(status int)    { f.status = status }
func (f *refusal) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func (f *refusal) reason() error {
	if f.status == http.StatusMethodNotAllowed {
		return &httpError{Status: f.status, Code: "method_not_allowed", Message: "not by this method: " + f.header.Get("Allow")}
	}
	return &httpError{Status: f.status, Code: "not_found", Message: "there is nothing here"}
}
