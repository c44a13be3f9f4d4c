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

// httpError is an error response.
type httpError struct {
	Status  int      `json:"-"`
	Code    string   `json:"code"`    // for programs
	Message string   `json:"message"` // for people
	Written *written `json:"-"`       // the result of a write that succeeded before the error
}

func (e *httpError) Error() string { return e.Message }

func badRequest(message string) error {
	return &httpError{Status: http.StatusBadRequest, Code: "bad_request", Message: message}
}

// asHTTP returns the response for err. The response to an internal error has no details.
func asHTTP(err error) *httpError {
	if known, ok := errors.AsType[*httpError](err); ok {
		return known
	}
	switch {
	case errors.Is(err, review.ErrNoReview):
		return &httpError{Status: http.StatusNotFound, Code: "no_review", Message: err.Error()}
	case errors.Is(err, eventstore.ErrStreamEnded):
		return &httpError{Status: http.StatusGone, Code: "erased", Message: "this review is erased for ever: nothing was written"}
	case errors.Is(err, review.ErrRejected), errors.Is(err, eventstore.ErrInvalid):
		return &httpError{Status: http.StatusUnprocessableEntity, Code: "rejected", Message: err.Error()}
	case errors.Is(err, eventstore.ErrConflict):
		return &httpError{Status: http.StatusConflict, Code: "conflict", Message: "other clients kept changing this review: nothing was written, send the command again"}
	case errors.Is(err, eventstore.ErrAmbiguous):
		return &httpError{Status: http.StatusServiceUnavailable, Code: "unknown_outcome", Message: "the database did not confirm the write: read the review, or send the command again"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), postgresUnavailable(err), redisUnavailable(err):
		return &httpError{Status: http.StatusServiceUnavailable, Code: "unavailable", Message: "the database does not answer: send the request again later"}
	}
	return &httpError{Status: http.StatusInternalServerError, Code: "internal", Message: "internal error: the log of the service has the details"}
}

// requestLimit is how long a request may take, including the wait for strong consistency. Only tests change it.
var requestLimit = 30 * time.Second

// jsonHandler sends errors as JSON and logs internal errors.
func jsonHandler(handle func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestLimit)
		defer cancel()
		if err := handle(w, r.WithContext(ctx)); err != nil {
			answerError(w, r, err)
		}
	})
}

// explain returns the response for err and logs internal errors.
func explain(w http.ResponseWriter, r *http.Request, err error) *httpError {
	e := asHTTP(err)
	_, expected := errors.AsType[*httpError](err)
	if !expected && e.Status >= http.StatusInternalServerError && r.Context().Err() == nil {
		slog.Error("request failed", "route", r.Pattern, "status", e.Status, "err", err)
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

// writeJSON sends v as JSON. It ignores errors of the connection: the client is gone.
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
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")) // "" if absent or invalid
	return kind
}

// front handles every request first: it refuses writes from other sites and for hosts other than
// listen, limits what a page may load, and answers requests without a route in JSON.
func front(mux *http.ServeMux, listen string) http.Handler {
	guard := http.NewCrossOriginProtection()
	guard.SetDenyHandler(jsonHandler(func(http.ResponseWriter, *http.Request) error {
		return &httpError{Status: http.StatusForbidden, Code: "cross_origin", Message: "writes from pages of other sites are refused"}
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

// refusal records the mux's response to a request without a route: the status, and for 405 the
// header Allow.
type refusal struct {
	header http.Header
	status int
}

func (f *refusal) Header() http.Header       { return f.header }
func (f *refusal) WriteHeader(status int)    { f.status = status }
func (f *refusal) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func (f *refusal) reason() error {
	if f.status == http.StatusMethodNotAllowed {
		return &httpError{Status: f.status, Code: "method_not_allowed", Message: "the method is not allowed: use " + f.header.Get("Allow")}
	}
	return &httpError{Status: f.status, Code: "not_found", Message: "this path does not exist"}
}
