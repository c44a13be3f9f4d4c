package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

const (
	pageSize    = 20      // products, unless ?limit= says otherwise
	pageMax     = 100     // products
	latestShown = 10      // reviews of one product or of all products
	bodyMax     = 1 << 20 // bytes of a request: fits the longest text, escaped
)

// api serves commands and queries as JSON over HTTP.
type api struct {
	db         serviceStore
	commands   *review.Commands
	clock      func() time.Time
	strongWait time.Duration   // how long a write with strong consistency waits for the read model
	stopping   context.Context // ends when the service starts to stop
}

func (a *api) routes(mux *http.ServeMux) {
	mux.Handle("POST /products/{id}/reviews", jsonHandler(a.post))
	mux.Handle("DELETE /products/{id}/reviews/{author}", jsonHandler(a.withdraw))
	mux.Handle("POST /moderation/{task}", jsonHandler(a.answer))
	mux.Handle("GET /products", jsonHandler(a.list))
	mux.Handle("GET /products/{id}", jsonHandler(a.get))
}

// written is the result of a command.
type written struct {
	Product string `json:"product"`
	Author  string `json:"author"`
	Version int64  `json:"version"` // number of events of the review
	Changed bool   `json:"changed"` // false: the command changed nothing, and nothing was written
}

func (a *api) post(w http.ResponseWriter, r *http.Request) error {
	strong, err := strongRequested(r)
	if err != nil {
		return err
	}
	var body struct {
		Author string `json:"author"`
		Stars  int    `json:"stars"`
		Text   string `json:"text"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	done, err := a.do(r.Context(), r.PathValue("id"), body.Author, strong, func(ctx context.Context, product, author string) (eventstore.Appended, error) {
		return a.commands.Post(ctx, product, author, review.Content{Stars: body.Stars, Text: body.Text}, a.clock(), commandID(r, "post")...)
	})
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/products/"+url.PathEscape(done.Product))
	if done.Changed {
		return writeJSON(w, http.StatusCreated, done)
	}
	return writeJSON(w, http.StatusOK, done)
}

// withdraw withdraws a review. With the query parameter forever it cannot be posted again.
func (a *api) withdraw(w http.ResponseWriter, r *http.Request) error {
	strong, err := strongRequested(r)
	if err != nil {
		return err
	}
	done, err := a.do(r.Context(), r.PathValue("id"), r.PathValue("author"), strong, func(ctx context.Context, product, author string) (eventstore.Appended, error) {
		if r.URL.Query().Has("forever") {
			return a.commands.Erase(ctx, product, author, a.clock(), commandID(r, "erase")...)
		}
		return a.commands.Withdraw(ctx, product, author, a.clock(), commandID(r, "withdraw")...)
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, done)
}

// commandID returns the header Idempotency-Key, if the request has one, for an operation: clients may use one key for
// several operations. The stream is that of one author, so the authors have keys of their own. Of requests with one id,
// the first that changes something counts, and the others get its result.
func commandID(r *http.Request, operation string) []eventstore.CommandID {
	if keys := r.Header.Values("Idempotency-Key"); len(keys) > 0 {
		return []eventstore.CommandID{eventstore.CommandID(operation + " " + keys[0])}
	}
	return nil
}

// do runs a command. With strong consistency it waits until the read model shows the result.
func (a *api) do(ctx context.Context, product, author string, strong bool,
	command func(ctx context.Context, product, author string) (eventstore.Appended, error),
) (written, error) {
	at, err := command(ctx, product, author)
	if err != nil {
		return written{}, err
	}
	done := written{Product: product, Author: author, Version: at.Version, Changed: at.Count > 0}
	if !strong {
		return done, nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.strongWait)
	defer cancel()
	// Cancel early enough to answer before the shutdown timeout.
	defer context.AfterFunc(a.stopping, func() { time.AfterFunc(shutdownTimeout/2, cancel) })()
	switch err := a.db.wait(ctx, at); {
	case errors.Is(err, projector.ErrParked):
		return done, &httpError{http.StatusInternalServerError, "parked", "written, but the read model could not apply it: an operator must replay or skip the parked message", &done}
	case errors.Is(err, projector.ErrSkipped):
		return done, &httpError{http.StatusInternalServerError, "skipped", "written, but the read model will not show it: an operator skipped the message", &done}
	case errors.Is(err, projector.ErrPruned):
		return done, nil // this command wrote nothing, and the marker of the earlier write is pruned
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return done, &httpError{http.StatusGatewayTimeout, "not_visible_yet", "written, but not visible yet: read again later", &done}
	default:
		return done, err
	}
}

// strongRequested reads the header Consistency. The query parameter consistency takes precedence.
func strongRequested(r *http.Request) (bool, error) {
	v := r.Header.Get("Consistency")
	if r.URL.Query().Has("consistency") {
		v = r.URL.Query().Get("consistency")
	}
	switch strings.ToLower(v) {
	case "strong":
		return true, nil
	case "", "eventual":
		return false, nil
	}
	return false, badRequest(`consistency must be "strong" or "eventual"`)
}

func (a *api) list(w http.ResponseWriter, r *http.Request) error {
	limit := pageSize
	if text := r.URL.Query().Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > pageMax {
			return badRequest(fmt.Sprintf("limit must be a number from 1 to %d", pageMax))
		}
		limit = n
	}
	page, next, err := a.page(r.Context(), r.URL.Query().Get("after"), limit)
	if err != nil {
		return err
	}
	answer := struct {
		Products []reportRow `json:"products"`
		Next     string      `json:"next,omitempty"` // URL of the next page; absent on the last page
	}{Products: page}
	if next != "" {
		answer.Next = "/products?" + url.Values{"after": {next}, "limit": {strconv.Itoa(limit)}}.Encode()
	}
	return writeJSON(w, http.StatusOK, answer)
}

// page lists the products after the given one. next is the last product of the page, or empty if
// no page follows.
func (a *api) page(ctx context.Context, after string, limit int) (page []reportRow, next string, err error) {
	if err := checkText("after", after); err != nil {
		return nil, "", err
	}
	found, err := a.db.products(ctx, after, limit+1)
	if err != nil {
		return nil, "", err
	}
	if len(found) > limit {
		found = found[:limit]
		next = found[limit-1].Product
	}
	return reportRows(found), next, nil
}

func (a *api) get(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if err := checkText("product", id); err != nil {
		return err
	}
	found, latest, err := a.db.product(r.Context(), id, latestShown)
	if err != nil {
		return err
	}
	rows := reportRows([]rating{found})
	if len(rows) == 0 {
		return &httpError{Status: http.StatusNotFound, Code: "no_reviews", Message: "this product has no reviews"}
	}
	return writeJSON(w, http.StatusOK, struct {
		reportRow
		Latest []currentReview `json:"latest"`
	}{rows[0], latest})
}

// checkText rejects a text that cannot be an id, before a database rejects it with its own error.
func checkText(what, text string) error {
	if text == "" {
		return nil
	}
	if err := provider.CheckText(what, text, provider.MaxIDBytes); err != nil {
		return badRequest(err.Error())
	}
	return nil
}

func readJSON(w http.ResponseWriter, r *http.Request, into any) error {
	if mediaType(r) != "application/json" {
		return &httpError{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Message: "Content-Type must be application/json"}
	}
	err := json.UnmarshalRead(http.MaxBytesReader(w, r.Body, bodyMax), into, json.RejectUnknownMembers(true))
	if err == nil {
		return nil
	}
	if e := bodyError(err); e != nil {
		return e
	}
	return badRequest("body: " + jsonReason(err).Error())
}

// bodyError returns the response for a body that was not read completely. It returns nil if the
// body was read and is invalid.
func bodyError(err error) error {
	switch _, tooLarge := errors.AsType[*http.MaxBytesError](err); {
	case tooLarge:
		return &httpError{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Message: fmt.Sprintf("the request is longer than %d bytes: shorten it", bodyMax)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &httpError{Status: http.StatusRequestTimeout, Code: "timeout", Message: fmt.Sprintf("the request did not arrive within %s: send it again", requestLimit)}
	}
	return nil
}
