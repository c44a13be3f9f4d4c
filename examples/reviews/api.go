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
	latestShown = 10      // reviews of one product, or of all
	bodyMax     = 1 << 20 // bytes of a request: the longest text, escaped, fits
)

// api is commands and queries as JSON over HTTP.
type api struct {
	db         serviceStore
	commands   *review.Commands
	clock      func() time.Time
	strongWait time.Duration   // how long a write with strong consistency waits for the read model
	stopping   context.Context // ends when the service is told to stop
}

func (a *api) routes(mux *http.ServeMux) {
	mux.Handle("POST /products/{id}/reviews", jsonHandler(a.post))
	mux.Handle("DELETE /products/{id}/reviews/{author}", jsonHandler(a.withdraw))
	mux.Handle("GET /products", jsonHandler(a.list))
	mux.Handle("GET /products/{id}", jsonHandler(a.get))
}

// written is what a command came to.
type written struct {
	Product string `json:"product"`
	Author  string `json:"author"`
	Version int64  `json:"version"` // of the review: how many changes it has seen
	Changed bool   `json:"changed"` // false: it was so already, and nothing was written
}

func (a *api) post(w http.ResponseWriter, r *http.Request) error {
	strong, err := wantsStrong(r)
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
		return a.commands.Post(ctx, product, author, review.Content{Stars: body.Stars, Text: body.Text}, a.clock())
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

func (a *api) withdraw(w http.ResponseWriter, r *http.Request) error {
	strong, err := wantsStrong(r)
	if err != nil {
		return err
	}
	done, err := a.do(r.Context(), r.PathValue("id"), r.PathValue("author"), strong, func(ctx context.Context, product, author string) (eventstore.Appended, error) {
		return a.commands.Withdraw(ctx, product, author, a.clock())
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, done)
}

// do carries out a command, and with strong consistency waits until the read model shows it.
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
	defer context.AfterFunc(a.stopping, func() { time.AfterFunc(drain/2, cancel) })() // so that it is answered all the same
	switch err := a.db.wait(ctx, at); {
	case errors.Is(err, projector.ErrParked):
		return done, &httpError{http.StatusInternalServerError, "parked", "written, but what shows it has failed and waits for a person", &done}
	case errors.Is(err, projector.ErrSkipped):
		return done, &httpError{http.StatusInternalServerError, "skipped", "written, but what shows it has failed, and a person gave up on it", &done}
	case errors.Is(err, projector.ErrPruned):
		return done, nil // nothing was written now, and what was is older than markers are kept
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return done, &httpError{http.StatusGatewayTimeout, "not_visible_yet", "written, but not visible in time", &done}
	default:
		return done, err
	}
}

// wantsStrong reads the header Consistency, or the parameter of the same name.
func wantsStrong(r *http.Request) (bool, error) {
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
	return false, badRequest(`consistency: want "strong" or "eventual"`)
}

func (a *api) list(w http.ResponseWriter, r *http.Request) error {
	limit := pageSize
	if text := r.URL.Query().Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > pageMax {
			return badRequest(fmt.Sprintf("limit: want a number from 1 to %d", pageMax))
		}
		limit = n
	}
	page, next, err := a.page(r.Context(), r.URL.Query().Get("after"), limit)
	if err != nil {
		return err
	}
	answer := struct {
		Products []reportRow `json:"products"`
		Next     string      `json:"next,omitempty"` // where the next page is; absent on the last
	}{Products: page}
	if next != "" {
		answer.Next = "/products?" + url.Values{"after": {next}, "limit": {strconv.Itoa(limit)}}.Encode()
	}
	return writeJSON(w, http.StatusOK, answer)
}

// page lists products after one, and says after which the next page begins: empty where this is the last.
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
		return &httpError{Status: http.StatusNotFound, Code: "no_reviews", Message: "there are no reviews of this product"}
	}
	return writeJSON(w, http.StatusOK, struct {
		reportRow
		Latest []standing `json:"latest"`
	}{rows[0], latest})
}

// checkText refuses what no id can be and what a database would refuse in words of its own.
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
		return &httpError{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Message: "want Content-Type: application/json"}
	}
	err := json.UnmarshalRead(http.MaxBytesReader(w, r.Body, bodyMax), into, json.RejectUnknownMembers(true))
	if err == nil {
		return nil
	}
	if e := unread(err); e != nil {
		return e
	}
	return badRequest("body: " + jsonReason(err).Error())
}

// unread tells a body that did not arrive, or not all of it, from one that is wrong: nil for that.
func unread(err error) error {
	switch _, tooLarge := errors.AsType[*http.MaxBytesError](err); {
	case tooLarge:
		return &httpError{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Message: fmt.Sprintf("the request is longer than %d bytes", bodyMax)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &httpError{Status: http.StatusRequestTimeout, Code: "timeout", Message: fmt.Sprintf("the request did not arrive in %s", requestLimit)}
	}
	return nil
}
