package adminpage

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed" // the template, the style and the script
	"encoding/base64"
	"errors"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

const (
	readLimit = 5 * time.Second  // of a page
	actLimit  = 30 * time.Second // of an act
	maxBody   = 64 << 10         // bytes of a form
	maxQuery  = 8 << 10          // bytes of a query
	rows      = 50               // of a list
)

// Config is the configuration of a Handler. The zero value is read-only and hides data of users.
type Config struct {
	Name string // of the service, in the title of the page; empty means "Kinora"
	// Who returns who sends a request that changes something. The name is stored with the act. Empty
	// means that this person may only read. Nil means that nobody may change anything.
	Who      func(*http.Request) string
	Payloads func(*http.Request) bool // whether who sends a request may see data of users; nil means no
	Limits   provider.DiagnosisLimits // from when on something is a finding; Watch is at most a second
	Logger   *slog.Logger             // gets requests that fail, without texts of errors; nil means slog.Default()
}

// Handler serves the page. It is also a kinora.Service: while Run runs, the plots of the overview have no
// gaps. Without Run they have a point for each time that the overview was read.
type Handler struct {
	cfg     Config
	store   admin.Store
	ops     *admin.Admin
	csrf    *http.CrossOriginProtection
	state   state
	streams chan struct{} // a place for each live page
	refused atomic.Int64  // when a live page was last refused
	times   times
	running chan struct{}
	ended   chan struct{}
}

// New returns the page of a store. It sends no statement.
func New(store admin.Store, cfg Config) (*Handler, error) {
	ops, err := admin.New(store)
	if err != nil {
		return nil, err
	}
	cfg.Name, cfg.Logger = cmp.Or(cfg.Name, "Kinora"), cmp.Or(cfg.Logger, slog.Default())
	cfg.Limits = cfg.Limits.WithDefaults()
	cfg.Limits.Watch = min(cfg.Limits.Watch, time.Second)
	h := &Handler{
		times: times{liveFor: time.Minute, refusedEvery: time.Minute},
		cfg:   cfg, store: store, ops: ops, csrf: http.NewCrossOriginProtection(),
		streams: make(chan struct{}, maxStreams), running: make(chan struct{}), ended: make(chan struct{}),
	}
	h.state.facts.turn, h.state.doctor.turn = make(chan struct{}, 1), make(chan struct{}, 1)
	return h, nil
}

var (
	//go:embed page.gohtml
	pageSource string
	//go:embed page.css
	style string
	//go:embed page.js
	script string

	templates = template.Must(template.New("").Funcs(template.FuncMap{"show": show}).Parse(pageSource))
	policy    = "default-src 'none'; script-src " + hashOf(script) + "; style-src " + hashOf(style) +
		"; img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// viewer is who sends a request.
type viewer struct {
	by       string // empty: may only read
	payloads bool
}

func (h *Handler) viewer(r *http.Request) (v viewer) {
	if h.cfg.Who != nil {
		v.by = h.cfg.Who(r)
	}
	v.payloads = h.cfg.Payloads != nil && h.cfg.Payloads(r)
	return v
}

// Every path of the handler is one word, so that relative links work under any prefix. If q.err is set, the page is not shown.
type pageFunc func(h *Handler, ctx context.Context, q *query, v viewer) (*view, error)

var pages = map[string]pageFunc{
	"/": (*Handler).overview, "/projectors": (*Handler).projectors, "/projector": (*Handler).projector,
	"/outbox": (*Handler).outbox, "/entry": (*Handler).entry, "/parked": (*Handler).parked, "/message": (*Handler).message,
	"/streams": (*Handler).streamList, "/stream": (*Handler).stream, "/event": (*Handler).event,
	"/tasks": (*Handler).tasks, "/task": (*Handler).task, "/services": (*Handler).services, "/acts": (*Handler).acts, "/act": (*Handler).act,
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	head := w.Header()
	head.Set("Content-Security-Policy", policy)
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("X-Frame-Options", "DENY")
	head.Set("Referrer-Policy", "same-origin")
	head.Set("Cross-Origin-Opener-Policy", "same-origin")
	head.Set("Cross-Origin-Resource-Policy", "same-origin")
	head.Set("Cache-Control", "no-store")
	if r.URL.Path == "" { // the prefix without its slash
		to, _, _ := strings.Cut(r.RequestURI, "?")
		head.Set("Location", "./"+url.PathEscape(path.Base(to))+"/")
		w.WriteHeader(http.StatusTemporaryRedirect)
		return
	}
	v := h.viewer(r)
	read, isPage := pages[r.URL.Path]
	do, isAct := acts[r.URL.Path]
	switch {
	case r.URL.RawPath != "" || !isPage && !isAct:
		h.fail(w, r, v, problem{http.StatusNotFound, "This page does not exist."})
	case len(r.URL.RawQuery) > maxQuery:
		h.fail(w, r, v, problem{http.StatusRequestURITooLong, "The query is too long."})
	case isPage && r.Method != http.MethodGet && r.Method != http.MethodHead:
		head.Set("Allow", "GET, HEAD")
		h.fail(w, r, v, problem{http.StatusMethodNotAllowed, "This page can only be read."})
	case isAct && r.Method != http.MethodPost:
		head.Set("Allow", "POST")
		h.fail(w, r, v, problem{http.StatusMethodNotAllowed, "This address takes forms."})
	case isAct:
		h.carryOut(w, r, v, do)
	case r.Method == http.MethodGet && strings.HasPrefix(r.Header.Get("Accept"), "text/event-stream"):
		h.live(w, r, v, read)
	default:
		page, err := h.read(r, v, read)
		if err != nil {
			h.fail(w, r, v, err)
			return
		}
		h.send(w, http.StatusOK, page, v)
	}
}

// read returns a page.
func (h *Handler) read(r *http.Request, v viewer, read pageFunc) (*view, error) {
	ctx, cancel := context.WithTimeout(r.Context(), readLimit)
	defer cancel()
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, problem{http.StatusBadRequest, "The query cannot be read."}
	}
	q := &query{values: values}
	page, err := read(h, ctx, q, v)
	if q.err != nil {
		return nil, q.err
	}
	if errors.Is(err, errors.ErrUnsupported) {
		page, err = &view{Title: "Not here", Intro: sentence(err)}, nil
	}
	if err == nil {
		page.Notice, page.At = h.noticeOf(q), r.URL.Path
	}
	return page, err
}

func (h *Handler) send(w http.ResponseWriter, status int, page *view, v viewer) {
	page.Name, page.Style, page.Script, page.By, page.Nav = h.cfg.Name, template.CSS(style), template.JS(script), v.by, nav //nolint:gosec // both are files of this package
	var text bytes.Buffer
	if err := templates.ExecuteTemplate(&text, "page", page); err != nil {
		h.cfg.Logger.Error("page not rendered", "err", errclass.Of(err))
		http.Error(w, "the page cannot be rendered", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(text.Bytes()) // the reader may be gone
}

// sentence returns the error of a part that the store does not have: "The store keeps no tasks."
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// problem is an error for the reader of a page.
type problem struct {
	status int
	text   string
}

func (p problem) Error() string { return p.text }

// problemOf returns what a reader may see of an error.
func problemOf(err error) problem {
	if p, ok := errors.AsType[problem](err); ok {
		return p
	}
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return problem{http.StatusNotImplemented, sentence(err) + " Nothing was changed."}
	case errors.Is(err, eventstore.ErrInvalid), errors.Is(err, provider.ErrInput):
		return problem{http.StatusBadRequest, "The request is not valid: an id or a text is too long, is not UTF-8, or a part is missing."}
	case errors.Is(err, outbox.ErrStale):
		return problem{http.StatusConflict, "Nothing was changed: an entry was last attempted before the window in which consumers recognize it, so it may take effect again. If that is right, use kinora outbox requeue --force."}
	case errors.Is(err, provider.ErrTaskVersion):
		return problem{http.StatusConflict, "Nothing was changed: the task is not as you have seen it. Look at it again."}
	case errors.Is(err, projector.ErrGeneration), errors.Is(err, projector.ErrNoCheckpoint), errors.Is(err, projector.ErrNoRebuild):
		return problem{http.StatusConflict, "Nothing was changed: " + err.Error()}
	case errors.Is(err, context.DeadlineExceeded):
		return problem{http.StatusServiceUnavailable, "The database did not answer in time. Select less, or try again."}
	}
	return problem{http.StatusInternalServerError, "The database has returned an error. Its kind is in the log of the service."}
}

// fail sends a page with an error.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, v viewer, err error) {
	p := problemOf(err)
	_, expected := errors.AsType[problem](err)
	if p.status >= http.StatusInternalServerError && !expected && r.Context().Err() == nil {
		h.cfg.Logger.Warn("page not served", "status", p.status, "err", errclass.Of(err))
	}
	h.send(w, p.status, &view{Title: http.StatusText(p.status), Error: p.text}, v)
}

const (
	maxStreams = 16              // live pages at the same time; others can be reloaded
	liveEvery  = 2 * time.Second // how often a live page is read
	liveWrite  = 10 * time.Second
)

// times are those that only tests change.
type times struct {
	liveFor      time.Duration // then the browser of a live page connects again
	refusedEvery time.Duration // between two lines about refused pages
}

// live sends the live part of a page as server-sent events, when it has changed. It ends with Run.
func (h *Handler) live(w http.ResponseWriter, r *http.Request, v viewer, read pageFunc) {
	select {
	case h.streams <- struct{}{}:
		defer func() { <-h.streams }()
	default:
		w.Header().Set("Retry-After", "60")
		if at, last := now().UnixNano(), h.refused.Load(); at-last >= int64(h.times.refusedEvery) && h.refused.CompareAndSwap(last, at) {
			h.cfg.Logger.Warn("live page refused: too many are open", "open", maxStreams)
		}
		h.fail(w, r, v, problem{http.StatusServiceUnavailable, "Too many live pages are open."})
		return
	}
	page, err := h.read(r, v, read)
	if err != nil {
		h.fail(w, r, v, err)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	conn := http.NewResponseController(w)
	send := func(event string) bool {
		_ = conn.SetWriteDeadline(now().Add(liveWrite)) // a wrapped writer may have no deadline
		_, err := w.Write([]byte(event))
		return err == nil && conn.Flush() == nil
	}
	tick, end := time.NewTicker(liveEvery), time.After(h.times.liveFor)
	defer tick.Stop()
	if !send("retry: 1000\n\n") {
		return
	}
	for last := ""; ; {
		if err == nil {
			var text bytes.Buffer
			if templates.ExecuteTemplate(&text, "update", page) != nil {
				return
			}
			event := "data: " + strings.ReplaceAll(strings.ReplaceAll(text.String(), "\r", " "), "\n", "\ndata: ") + "\n\n"
			if event == last {
				event = ": nothing new\n\n"
			} else {
				last = event
			}
			if !send(event) {
				return
			}
		}
		select {
		case <-tick.C:
		case <-end:
			return
		case <-h.ended:
			return
		case <-r.Context().Done():
			return
		}
		page, err = h.read(r, v, read) // the page stays as it is while the database does not answer
	}
}
