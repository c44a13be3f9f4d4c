package main

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
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

// page is the service as people see it. Without JavaScript everything works but the live part.
type page struct {
	*api
	live       *live
	unconsumed func(context.Context) (int64, error) // messages that the broker still has
}

func (p *page) routes(mux *http.ServeMux) {
	mux.HandleFunc("GET /{$}", p.show)
	mux.HandleFunc("POST /{$}", p.postForm)
	mux.Handle("GET /live", p.live)
	for _, file := range []string{"/web/style.css", "/web/live.js", "/web/icon.svg"} { // not the templates
		mux.Handle("GET "+file, http.FileServerFS(web))
	}
}

// spot is which part of everything a page shows: products after one, and the latest reviews of all or of one.
type spot struct{ after, product string }

func spotOf(q url.Values) spot { return spot{q.Get("after"), q.Get("product")} }

// URL is the spot's page.
func (at spot) URL() string {
	q := url.Values{}
	if at.after != "" {
		q.Set("after", at.after)
	}
	if at.product != "" {
		q.Set("product", at.product)
	}
	return (&url.URL{Path: "/", RawQuery: q.Encode()}).String()
}

// view is what the templates show.
type view struct {
	Products          []reportRow
	First, Next       string // URLs; empty where there is no such page
	Product           string // whose reviews are shown; empty: everybody's
	Latest            []standing
	Pending           int64 // events on their way to the read model
	Abandoned, Parked int64
	Trouble           bool // the database does not answer: nothing above is known
	Form              form
}

// form is what somebody typed, and what became of it.
type form struct {
	Product, Author, Text string
	Stars                 int
	Posted                bool
	Error                 string
}

func (p *page) view(ctx context.Context, at spot) (v view, err error) {
	var next string
	if v.Products, next, err = p.page(ctx, at.after, pageSize); err != nil {
		return v, err
	}
	if at.after != "" {
		v.First = spot{product: at.product}.URL()
	}
	if next != "" {
		v.Next = spot{next, at.product}.URL()
	}
	v.Product = at.product
	if at.product == "" {
		v.Latest, err = p.db.newest(ctx, latestShown)
	} else if err = checkText("product", at.product); err == nil {
		_, v.Latest, err = p.db.product(ctx, at.product, latestShown)
	}
	if err != nil {
		return v, err
	}
	return v, p.pipeline(ctx, &v)
}

// pipeline says what is on its way, and what did not get through.
func (p *page) pipeline(ctx context.Context, v *view) error {
	counts, err := p.db.StatusCounts(ctx, outbox.Pending, outbox.Claimed, outbox.Failed, outbox.Held, outbox.Abandoned)
	if err != nil {
		return err
	}
	v.Pending, err = p.unconsumed(ctx)
	if err != nil {
		return err
	}
	v.Pending += counts[outbox.Pending] + counts[outbox.Claimed] + counts[outbox.Failed] + counts[outbox.Held]
	v.Abandoned = counts[outbox.Abandoned]
	v.Parked, err = p.db.ParkedCount(ctx, "")
	return err
}

func (p *page) show(w http.ResponseWriter, r *http.Request) {
	at := spotOf(r.URL.Query())
	p.answer(w, r, http.StatusOK, at, form{Product: at.product, Posted: r.URL.Query().Has("posted")})
}

func (p *page) answer(w http.ResponseWriter, r *http.Request, status int, at spot, f form) {
	ctx, cancel := context.WithTimeout(r.Context(), requestLimit)
	defer cancel()
	v, err := p.view(ctx, at)
	switch {
	case err != nil && f.Error == "":
		answerError(w, r, err)
		return
	case err != nil: // what was typed is not lost
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

// postForm is the form without JavaScript: it goes back to the page once that shows the review.
func (p *page) postForm(w http.ResponseWriter, r *http.Request) {
	at := spotOf(r.URL.Query())
	if mediaType(r) != formMedia {
		answerError(w, r, &httpError{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Message: "want Content-Type: " + formMedia})
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, bodyMax)
	if err := r.ParseForm(); err != nil {
		answerError(w, r, cmp.Or(unread(err), badRequest("body: not a form")))
		return
	}
	f := form{Product: r.PostForm.Get("product"), Author: r.PostForm.Get("author"), Text: r.PostForm.Get("text")}
	f.Stars, _ = strconv.Atoi(r.PostForm.Get("stars")) // no number is no star, which is rejected
	ctx, cancel := context.WithTimeout(r.Context(), requestLimit)
	defer cancel()
	_, err := p.do(ctx, f.Product, f.Author, true, func(ctx context.Context, product, author string) (eventstore.Appended, error) {
		return p.commands.Post(ctx, product, author, review.Content{Stars: f.Stars, Text: f.Text}, p.clock())
	})
	if err != nil {
		e := explain(w, r, err)
		f.Error = e.Message
		p.answer(w, r, e.Status, at, f)
		return
	}
	to, _ := url.Parse(at.URL())
	q := to.Query()
	q.Set("posted", "1")
	to.RawQuery = q.Encode()
	http.Redirect(w, r, to.String(), http.StatusSeeOther)
}

// fragment is the live part of a page.
func (p *page) fragment(ctx context.Context, at spot) ([]byte, error) {
	v, err := p.view(ctx, at)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	err = templates.ExecuteTemplate(&text, "live.html", v)
	return text.Bytes(), err
}
