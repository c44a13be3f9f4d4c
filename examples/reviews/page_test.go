package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const formType = "Content-Type: application/x-www-form-urlencoded"

func reviewForm(product, author, stars, text string) string {
	return url.Values{"product": {product}, "author": {author}, "stars": {stars}, "text": {text}}.Encode()
}

// TestPageWithoutJavaScript: a posted form redirects to a page that shows the review.
func TestPageWithoutJavaScript(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		require.Contains(t, call(t, "GET", s.url+"/", "").text, "No reviews yet")
		a := call(t, "POST", s.url+"/?product=p%26q", reviewForm("p&q", "<ann>", "4", "one\r\n<script>two"), formType, "Sec-Fetch-Site: same-origin")
		require.Equal(t, http.StatusSeeOther, a.status, a.text)
		require.Equal(t, "/?posted=1&product=p%26q", a.header.Get("Location"))
		page := call(t, "GET", s.url+a.header.Get("Location"), "")
		require.Equal(t, http.StatusOK, page.status)
		require.Equal(t, "text/html; charset=utf-8", page.header.Get("Content-Type"))
		for _, want := range []string{
			"Posted.", "4.00", "★★★★☆", "Latest reviews of <bdi>p&amp;q</bdi>", `href="/?product=p%26q"`, "&lt;ann&gt;", "&lt;script&gt;two",
			`value="p&amp;q"`,
		} {
			require.Contains(t, page.text, want)
		}
		// The relay marks an entry as published after the read model has applied it.
		require.Eventually(t, func() bool { return strings.Contains(call(t, "GET", s.url+"/", "").text, `<dd id="pending">0</dd>`) },
			patience, 10*time.Millisecond)
		require.NotContains(t, page.text, "<script>two")
		require.NotContains(t, call(t, "GET", s.url+"/?product=other", "").text, "&lt;ann&gt;")

		a = call(t, "POST", s.url+"/", reviewForm("p", "ann", "", "a <text>"), formType)
		require.Equal(t, http.StatusUnprocessableEntity, a.status)
		require.Contains(t, a.text, "stars must be 1 to 5, got 0")
		require.Contains(t, a.text, "a &lt;text&gt;</textarea>", "the text is still in the form")

		a = call(t, "POST", s.url+"/", reviewForm("p", "ann", "4", ""), formType, "Sec-Fetch-Site: cross-site")
		require.Equal(t, http.StatusForbidden, a.status)
		require.Equal(t, http.StatusUnsupportedMediaType, call(t, "POST", s.url+"/", "{}").status)
		require.Equal(t, http.StatusRequestEntityTooLarge, call(t, "POST", s.url+"/", strings.Repeat("x", bodyMax+1), formType).status)
		require.Equal(t, http.StatusBadRequest, call(t, "POST", s.url+"/", "%zz", formType).status)
		require.Equal(t, http.StatusOK, call(t, "HEAD", s.url+"/live", "").status, "a HEAD request ends")
		require.Equal(t, http.StatusBadRequest, call(t, "GET", s.url+"/?after=%ff", "").status)
		require.Equal(t, http.StatusBadRequest, call(t, "GET", s.url+"/?product=%00", "").status)
	})
}

// TestPageLoadsNothingFromElsewhere: the page uses no other host and no inline script or style, and
// its policy forbids them.
func TestPageLoadsNothingFromElsewhere(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, patience)
	page := call(t, "GET", s.url+"/", "")
	require.Contains(t, page.header.Get("Content-Security-Policy"), "default-src 'none'")
	require.NotRegexp(t, regexp.MustCompile(`(?i)https?://|<style|style=|\son[a-z]+=|<script>`), page.text)
	links := regexp.MustCompile(`(?:src|href)="(/web/[^"]+)"`).FindAllStringSubmatch(page.text, -1)
	require.Len(t, links, 3)
	for _, link := range links {
		require.Equal(t, http.StatusOK, call(t, "GET", s.url+link[1], "").status, link[1])
	}
}

// TestPagesOfProducts: links lead through all pages of products and back to the first.
func TestPagesOfProducts(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, patience)
	for i := range pageSize + 1 {
		require.Equal(t, http.StatusCreated, call(t, "POST", s.url+fmt.Sprintf("/products/p%02d/reviews", i), reviewJSON("ann", 5, ""), strong).status)
	}
	first := call(t, "GET", s.url+"/", "").text
	require.Contains(t, first, `href="/?after=p19">Next page`)
	require.NotContains(t, first, "First page")
	require.NotContains(t, first, `<td><a href="/?product=p20">`)
	second := call(t, "GET", s.url+"/?after=p19", "").text
	require.Contains(t, second, `<td><a href="/?product=p20">`)
	require.NotContains(t, second, `<td><a href="/?product=p19">`)
	require.Contains(t, second, `href="/">First page`)
	require.NotContains(t, second, "Next page")
}

// stream is a client of the live page.
type stream struct {
	*testing.T
	events chan [2]string // name and data
	stop   context.CancelFunc
}

func listen(t *testing.T, url string) *stream {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	require.NoError(t, err)
	res, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.Equal(t, "text/event-stream", res.Header.Get("Content-Type"))
	s := &stream{t, make(chan [2]string, 1000), stop}
	go func() {
		defer close(s.events)
		defer res.Body.Close()
		var name string
		var data []string
		for in := bufio.NewScanner(res.Body); in.Scan(); {
			field, value, _ := strings.Cut(in.Text(), ": ")
			switch {
			case field == "event":
				name = value
			case field == "data":
				data = append(data, value)
			case field == "" && value == "" && name != "":
				s.events <- [2]string{name, strings.Join(data, "\n")}
				name, data = "", nil
			}
		}
	}()
	t.Cleanup(stop)
	return s
}

// waitFor waits for an event that contains all parts.
func (s *stream) waitFor(name string, parts ...string) {
	s.Helper()
	late := time.After(patience)
	for {
		select {
		case e, ok := <-s.events:
			require.True(s, ok, "the stream ended")
			all := e[0] == name
			for _, part := range parts {
				all = all && strings.Contains(e[1], part)
			}
			if all {
				return
			}
		case <-late:
			require.Fail(s, "no such event", "%s %q", name, parts)
		}
	}
}

// TestLive: the first event has the whole page, and each change sends another event, also changes
// by other clients.
func TestLive(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		all, one := listen(t, s.url+"/live"), listen(t, s.url+"/live?product=p1")
		all.waitFor("page", "No reviews yet", `id="pending">0<`)
		one.waitFor("page", "Latest reviews of <bdi>p1</bdi>", "None.")
		post := func(product, author string, stars int) {
			require.Equal(t, http.StatusCreated, call(t, "POST", s.url+"/products/"+product+"/reviews", reviewJSON(author, stars, "line 1\nline 2 <i>")).status)
		}
		post("p2", "bob", 2)
		all.waitFor("page", "<bdi>bob</bdi></strong> on <bdi>p2</bdi>", "2.00", "line 1\nline 2 &lt;i&gt;", `id="pending">0<`)
		post("p1", "ann", 5)
		one.waitFor("page", "<bdi>ann</bdi>", "5.00", `id="pending">0<`)
		all.waitFor("page", "<bdi>ann</bdi></strong> on <bdi>p1</bdi>", "<bdi>bob</bdi></strong> on <bdi>p2</bdi>")
		call(t, "DELETE", s.url+"/products/p1/reviews/ann", "")
		one.waitFor("page", "None.")

		late := listen(t, s.url+"/live") // as after a lost connection
		late.waitFor("page", "<bdi>bob</bdi></strong> on <bdi>p2</bdi>")
		s.stopping()
		for _, page := range []*stream{all, one, late} {
			for range page.events {
			}
		}
	})
}

// TestLiveTrouble: a page receives an event when the database does not answer, and the whole page
// again afterwards.
func TestLiveTrouble(t *testing.T) {
	t.Parallel()
	fail := make(chan error, 100)
	l := newLive(t.Context().Done(), func(context.Context, pageKey) ([]byte, error) {
		select {
		case err := <-fail:
			return nil, err
		default:
			return []byte("fine"), nil
		}
	})
	mux := http.NewServeMux()
	mux.Handle("GET /live", l)
	server := newTestServer(t, mux)
	page := listen(t, server+"/live")
	page.waitFor("page", "fine")
	fail <- context.DeadlineExceeded
	page.waitFor("trouble")
	page.waitFor("page", "fine")
	page.stop()
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.subscriptions) == 0 && l.listeners == 0
	}, patience, time.Millisecond, "no page is rendered without a listener")

	l.mu.Lock()
	l.listeners = maxListeners
	l.mu.Unlock()
	require.Equal(t, http.StatusServiceUnavailable, call(t, "GET", server+"/live", "").status)
}
