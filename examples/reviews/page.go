package main

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"errors"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/task"
)

//go:embed web
var web embed.FS

var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"stars": func(n int) string {
		n = min(max(n, 0), review.MaxStars)
		return strings.Repeat("★", n) + strings.Repeat("☆", review.MaxStars-n)
	},
	"scale": func() []int { return []int{5, 4, 3, 2, 1} },
}).ParseFS(web, "web/*.html"))

// page serves the web page. Without JavaScript everything except the live part works.
type page struct {
	*api
	live *live
}

func (p *page) routes(mux *http.ServeMux) {
	mux.HandleFunc("GET /{$}", p.show)
	mux.HandleFunc("POST /{$}", p.postForm)
	mux.Handle("GET /live", p.live)
	for _, file := range []string{"/web/style.css", "/web/live.js", "/web/icon.svg"} { // not the templates
		mux.Handle("GET "+file, http.FileServerFS(web))
	}
}

// pageKey identifies a page: its products are those after the product after, and its reviews are
// those of product, or of all products if that is empty.
type pageKey struct{ after, product string }

func pageKeyOf(q url.Values) pageKey { return pageKey{q.Get("after"), q.Get("product")} }

// URL returns the URL of the page.
func (key pageKey) URL() string {
	q := url.Values{}
	if key.after != "" {
		q.Set("after", key.after)
	}
	if key.product != "" {
		q.Set("product", key.product)
	}
	return (&url.URL{Path: "/", RawQuery: q.Encode()}).String()
}

// view is the data of the templates.
type view struct {
	Products          []reportRow
	First, Next       string // URLs; empty if there is no such page
	Product           string // the product whose reviews are shown; empty: all products
	Latest            []currentReview
	Lag               projector.Lag // how far the read model is behind the events
	Behind            time.Duration // the age of the oldest of them, in whole seconds
	NoRunner          bool          // no process has ever updated the read model: there is no lag
	Abandoned, Parked int64
	Trouble           bool // the database does not answer: the fields above are not set
	Form              form
}

// form is the submitted form and its result.
type form struct {
	Product, Author, Text string
	Stars                 int
	Posted                bool
	Error                 string
}

func (p *page) view(ctx context.Context, key pageKey) (v view, err error) {
	var next string
	if v.Products, next, err = p.page(ctx, key.after, pageSize); err != nil {
		return v, err
	}
	if key.after != "" {
		v.First = pageKey{product: key.product}.URL()
	}
	if next != "" {
		v.Next = pageKey{next, key.product}.URL()
	}
	v.Product = key.product
	if key.product == "" {
		v.Latest, err = p.db.newest(ctx, latestShown)
	} else if err = checkText("product", key.product); err == nil {
		_, v.Latest, err = p.db.product(ctx, key.product, latestShown)
	}
	if err != nil {
		return v, err
	}
	return v, p.pipeline(ctx, &v)
}

// pipeline sets the lag, and the counts of abandoned entries and tasks, and of parked messages.
func (p *page) pipeline(ctx context.Context, v *view) error {
	lag, err := lagOf(ctx, p.db)
	if v.NoRunner = errors.Is(err, projector.ErrNoCheckpoint); err != nil && !v.NoRunner {
		return err
	}
	if v.Lag = lag; !lag.Oldest.IsZero() {
		v.Behind = max(p.clock().Sub(lag.Oldest), 0).Round(time.Second)
	}
	counts, err := p.db.StatusCounts(ctx, outbox.Abandoned)
	if err != nil {
		return err
	}
	tasks, err := p.db.TaskCounts(ctx, moderateKind)
	if err != nil {
		return err
	}
	v.Abandoned = counts[outbox.Abandoned] + tasks[task.Abandoned]
	v.Parked, err = p.db.ParkedCount(ctx, "")
	return err
}

func (p *page) show(w http.ResponseWriter, r *http.Request) {
	key := pageKeyOf(r.URL.Query())
	p.answer(w, r, http.StatusOK, key, form{Product: key.product, Posted: r.URL.Query().Has("posted")})
}

func (p *page) answer(w http.ResponseWriter, r *http.Request, status int, key pageKey, f form) {
	ctx, cancel := context.WithTimeout(r.Context(), requestLimit)
	defer cancel()
	v, err := p.view(ctx, key)
	switch {
	case err != nil && f.Error == "":
		answerError(w, r, err)
		return
	case err != nil: // keep the submitted text
		v = view{Trouble: true}
	}
	v.Form = f
	var text bytes.Buffer
	if err := templates.ExecuteTemplate(&text, "page.html", v); err != nil {
		answerError(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(text.Bytes())
}

const formMedia = "application/x-www-form-urlencoded"

// postForm handles the form without JavaScript. It redirects to the page once the page shows the
// review.
func (p *page) postForm(w http.ResponseWriter, r *http.Request) {
	key := pageKeyOf(r.URL.Query())
	if mediaType(r) != formMedia {
		answerError(w, r, &httpError{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Message: "Content-Type must be " + formMedia})
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, bodyMax)
	if err := r.ParseForm(); err != nil {
		answerError(w, r, cmp.Or(bodyError(err), badRequest("the body is not a valid form")))
		return
	}
	f := form{Product: r.PostForm.Get("product"), Author: r.PostForm.Get("author"), Text: r.PostForm.Get("text")}
	f.Stars, _ = strconv.Atoi(r.PostForm.Get("stars")) // not a number: 0 stars, which is rejected
	ctx, cancel := context.WithTimeout(r.Context(), requestLimit)
	defer cancel()
	_, err := p.do(ctx, f.Product, f.Author, true, func(ctx context.Context, product, author string) (eventstore.Appended, error) {
		return p.commands.Post(ctx, product, author, review.Content{Stars: f.Stars, Text: f.Text}, p.clock())
	})
	if err != nil {
		e := explain(w, r, err)
		f.Error = e.Message
		p.answer(w, r, e.Status, key, f)
		return
	}
	to, _ := url.Parse(key.URL())
	q := to.Query()
	q.Set("posted", "1")
	to.RawQuery = q.Encode()
	http.Redirect(w, r, to.String(), http.StatusSeeOther)
}

// fragment renders the live part of a page.
func (p *page) fragment(ctx context.Context, key pageKey) ([]byte, error) {
	v, err := p.view(ctx, key)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	err = templates.ExecuteTemplate(&text, "live.html", v)
	return text.Bytes(), err
}
