package adminpage_test

import (
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

const canary = "canary-7f3a"

// hostile does something in a browser that does not take it for text.
const hostile = `<script>pwned()</script>"'><img src=x onerror=pwned()>{{.}}javascript:pwned()`

// full fills the store: messages that are parked, applied, and tried in a dry run and in a verification, an
// abandoned entry, an abandoned task, a pause, and services.
func (w *world) full(stream, topic, taskID, text string, d provider.Decision) {
	w.Helper()
	w.topic = topic
	w.start(w.runner(), w.worker())
	w.rate(stream, text, 5)
	patience.Until(w, func() bool { return w.stars() == 5 }, "the event to be applied")
	_, err := w.db.SQL().ExecContext(w.Context(), `update ratings_g1 set stars = 77`)
	require.NoError(w, err)
	ops, err := admin.New(w.db)
	require.NoError(w, err)
	id, err := ops.Verify(w.Context(), "ratings", provider.VerifyRequest{}, d)
	require.NoError(w, err)
	act, err := ops.Await(w.Context(), id, nil)
	require.NoError(w, err)
	require.Equal(w, provider.ActDone, act.State, string(act.Outcome))
	w.rate(stream, text, 0, 4)
	w.abandon()
	w.enqueue(taskID, text)
	patience.Until(w, func() bool {
		parked, err := w.db.Parked(w.Context(), projector.ParkedFilter{})
		require.NoError(w, err)
		tasks, err := w.db.Tasks(w.Context(), task.Filter{Status: []task.Status{task.Abandoned}})
		require.NoError(w, err)
		return len(parked) == 2 && len(tasks) == 1
	}, "two parked messages and an abandoned task")
	for range 2 { // one fails, one changes rows
		id, err = ops.DryRun(w.Context(), projector.ParkedFilter{Projector: "ratings", Key: stream}, d)
		require.NoError(w, err)
		_, err = ops.Await(w.Context(), id, nil)
		require.NoError(w, err)
		w.fixed.Store(true)
	}
	_, err = ops.Pause(w.Context(), provider.PauseTopic, topic, d)
	require.NoError(w, err)
}

// Promise: O3.3
func TestDataOfUsersIsHiddenUnlessItIsAllowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.full("review-cup-ann", "reviews", "greet-1", canary, by)
	hidden := w.crawl(w.serve(adminpage.Config{Who: everyone("ann")}, ""))
	for address, text := range hidden {
		require.False(t, strings.Contains(text, canary), address)
		if path, _, _ := strings.Cut(address, "?"); len(regexp.MustCompile(`id="live"`).FindString(text)) > 0 && !strings.HasSuffix(path, "/services") {
			require.NotContains(t, w.event(address), canary, "live: %s", address)
		}
	}
	shown := map[string]bool{}
	for address, text := range w.crawl(w.serve(adminpage.Config{Payloads: allowed}, "")) {
		if u, err := url.Parse(address); err == nil && strings.Contains(text, canary) {
			shown[u.Path] = true
		}
	}
	for _, path := range []string{"/message", "/entry", "/event", "/task", "/act"} {
		require.True(t, shown[path], "%s shows nothing of it", path)
	}
	require.NotContains(t, w.logs.String(), canary)
	at := w.serve(adminpage.Config{}, "")
	require.Contains(t, w.get(at+"event?position=1").body, `<td class="good">applied</td>`)
	require.Contains(t, w.get(at+"event?position=2").body, `">parked, stuck</a>`)
}

// Promise: O4.1
func TestTextOfUsersIsText(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.full("review-"+hostile, hostile+"\u202e", "greet-"+hostile, hostile, provider.Decision{By: hostile, Reason: hostile})
	seen := map[string]bool{}
	for address, text := range w.crawl(w.serve(adminpage.Config{Name: hostile, Who: everyone(hostile), Payloads: allowed}, "")) {
		require.Equal(t, 1, strings.Count(text, "<script"), address)
		require.False(t, strings.Contains(text, "<img"), address)
		require.False(t, strings.Contains(text, `href="javascript:`), address)
		bare := regexp.MustCompile(`"[^"]*"`).ReplaceAllString(text[:strings.Index(text, "<script")], "")
		require.False(t, strings.ContainsRune(bare, 0x202e), "%s changes the direction of text", address)
		require.Empty(t, regexp.MustCompile(`<[a-z][^>]*\s(on|style)\w*=`).FindAllString(bare, -1), address)
		u, err := url.Parse(address)
		require.NoError(t, err)
		seen[u.Path] = true
	}
	for _, path := range []string{"/message", "/entry", "/event", "/task", "/act", "/stream", "/services", "/projector"} {
		require.True(t, seen[path], path)
	}
}

// Links and forms work under any prefix, also if the prefix is taken off before.
func TestAnyPrefix(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.rate("review-cup", "x", 1)
	for _, prefix := range []string{"", "/operator", "/a/b%20c"} {
		plain, err := url.PathUnescape(prefix)
		require.NoError(t, err)
		from := w.serve(adminpage.Config{Who: everyone("ann")}, plain)
		all := w.crawl(from)
		require.Greater(t, len(all), 10)
		got := w.post(from+"pause", "kind", "topic", "name", "a/b?c&d", "reason", "r")
		require.Equal(t, http.StatusOK, got.status, got.body)
		require.True(t, strings.HasPrefix(got.url, from+"outbox?"), got.url)
		require.Contains(t, got.body, "a/b?c&amp;d")
		require.Equal(t, http.StatusOK, w.post(from+"resume", "kind", "topic", "name", "a/b?c&d", "reason", "r").status)
	}
	h, err := adminpage.New(w.db, adminpage.Config{})
	require.NoError(t, err)
	got := record(http.StripPrefix("/operator", h), http.MethodGet, "/operator?x", "")
	require.Equal(t, http.StatusTemporaryRedirect, got.Code)
	require.Equal(t, "./operator/", got.Header().Get("Location"))
	got = record(http.StripPrefix("//evil.example", h), http.MethodGet, "//evil.example", "")
	require.Equal(t, "./evil.example/", got.Header().Get("Location"), "not another site")
}

// Promise: O4.1
func TestEveryAnswerIsGuarded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := w.serve(adminpage.Config{Who: everyone("ann")}, "")
	for _, got := range []answer{w.get(at), w.get(at + "nothing"), w.post(at + "pause"), w.post(at), w.get(at + "parked?class=x")} {
		policy := got.header.Get("Content-Security-Policy")
		require.True(t, strings.HasPrefix(policy, "default-src 'none'; script-src 'sha256-"), policy)
		require.NotContains(t, policy, "unsafe")
		require.Contains(t, policy, "frame-ancestors 'none'")
		require.Contains(t, policy, "base-uri 'none'")
		require.Equal(t, "nosniff", got.header.Get("X-Content-Type-Options"))
		require.Equal(t, "no-store", got.header.Get("Cache-Control"))
		require.Equal(t, "same-origin", got.header.Get("Referrer-Policy"))
		require.NotContains(t, got.body, "://", "nothing is loaded from elsewhere")
	}
}

func TestRequestsThatAreNotValid(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := w.serve(adminpage.Config{Who: everyone("ann")}, "/x")
	long := strings.Repeat("a", 300)
	for path, status := range map[string]int{
		"nothing": 404, "parked/": 404, "static/../parked": 404, "%2e%2e/parked": 404, "%70arked": 404, "parked%2f": 404, "/parked": 404, "..%2fparked": 404, "parked%00": 404,
		"a/" + strings.Repeat("b/", 2000): 404, "parked?class=nonsense": 400, "parked?state=nonsense": 400, "outbox?status=nonsense": 400, "tasks?status=nonsense": 400,
		"parked?key=%ff": 400, "stream?id=%ff": 400, "stream?id=a%00": 400, "event?id=%c3%28": 400, "task?id=%ff": 400, "streams?category=%ff": 400, "outbox?topic=%ff": 400,
		"parked?projector=" + long: 400, "stream?id=review-" + long: 400, "stream": 400, "task": 400, "projector": 400, "message?seq=-1": 400, "message?seq=x": 400,
		"message?seq=99999999999999999999": 400, "message?seq=7": 404, "entry?seq=7": 404, "act?id=7": 404, "task?id=none": 404, "stream?id=none-1": 404, "event?id=none": 404,
		"projector?name=none": 404, "parked?key=" + strings.Repeat("a", 9000): 414, "parked?key=%zz": 400, "parked?a;b": 400, "parked?after=9223372036854775807": 200,
		"stream?id=none": 400, "event": 404, "event?position=9223372036854775807": 404, "parked?unknown=1": 200, "parked?said=nonsense": 200, "parked?said=skipped&n=50000": 200,
	} {
		got := w.get(at + path)
		require.Equal(t, status, got.status, "%s: %s", path, got.body)
		require.NotContains(t, got.body, "nonsense\"", path)
		require.NotContains(t, got.body, "were skipped", path)
	}
	for path, method := range map[string]string{"parked": "POST", "": "DELETE", "replay": "GET", "skip": "PUT", "act": "PATCH"} {
		got := w.send(method, at+path, "")
		require.Equal(t, 405, got.status, path)
		require.NotEmpty(t, got.header.Get("Allow"))
	}
	require.Equal(t, 200, w.send("HEAD", at+"parked", "").status)
	require.Empty(t, w.logs.String(), "wrong requests are no fault of the service")
}

// A form changes something only if it comes from the page itself, in a form, and from someone who may.
// Promise: O4.1
func TestForeignFormsDoNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	who := "ann"
	at := w.serve(adminpage.Config{Who: func(r *http.Request) string {
		if r.Header.Get("X-User") == "reader" {
			return ""
		}
		return who
	}}, "")
	form := url.Values{"kind": {"projector"}, "name": {"ratings"}, "reason": {"r"}}.Encode()
	pauses := func() int {
		all, err := w.db.Pauses(t.Context())
		require.NoError(t, err)
		return len(all)
	}
	for name, headers := range map[string][]string{
		"another site":          {"Sec-Fetch-Site", "cross-site"},
		"another host":          {"Sec-Fetch-Site", "same-site"},
		"an old browser":        {"Origin", "https://evil.example"},
		"a sandbox":             {"Origin", "null"},
		"a reader":              {"X-User", "reader"},
		"JSON":                  {"Content-Type", "application/json"},
		"text":                  {"Content-Type", "text/plain"},
		"a form with a file":    {"Content-Type", "multipart/form-data; boundary=x"},
		"a form that is broken": {"Content-Type", "application/x-www-form-urlencoded;;"},
	} {
		got := w.send(http.MethodPost, at+"pause", form, headers...)
		require.Contains(t, []int{http.StatusForbidden, http.StatusUnsupportedMediaType, http.StatusBadRequest}, got.status, name)
		require.Zero(t, pauses(), name)
	}
	require.Equal(t, http.StatusForbidden, w.send(http.MethodPost, w.serve(adminpage.Config{}, "")+"pause", form).status, "read-only by default")
	require.Equal(t, http.StatusRequestEntityTooLarge, w.send(http.MethodPost, at+"pause", form+"&x="+strings.Repeat("a", 1<<20)).status)
	require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"pause?reason=r", "kind=projector&name=ratings").status, "the query is no form")
	require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"pause", form+"%zz").status)
	require.Equal(t, http.StatusBadRequest, w.post(at+"pause", "kind", "nonsense", "name", "ratings", "reason", "r").status)
	require.Equal(t, http.StatusBadRequest, w.post(at+"pause", "kind", "projector", "name", "\xff", "reason", "r").status)
	require.Equal(t, http.StatusBadRequest, w.post(at+"pause", "kind", "projector", "name", "ratings", "reason", strings.Repeat("r", 1001)).status)
	require.Equal(t, http.StatusBadRequest, w.post(at+"pause", "kind", "projector", "name", "ratings", "reason", " ").status)
	require.Zero(t, pauses())
	who = strings.Repeat("a", 300)
	require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"pause", form).status, "a name that cannot be stored")
	who = "ann"
	require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"pause", form).status, "nobody has the projector")
	require.NoError(t, w.db.Report(t.Context(), provider.ServiceReport{
		ID: "1", Kind: "runner", Holder: "h", Process: "h/1", Clock: time.Now(), Can: []provider.Capability{{Projector: "ratings", Version: 1}}}, time.Hour))
	require.Equal(t, http.StatusNotFound, w.send(http.MethodPost, at+"pause", form, "Sec-Fetch-Site", "same-origin").status, "the page of a projector that has no checkpoint")
	all, err := w.db.Pauses(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, provider.Decision{By: "ann", Reason: "r"}, all[0].Decision)
}

// What changes many messages, or cannot be undone, needs a name that is typed.
// Promise: O4.1
func TestSomeActsAreConfirmed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.full("review-cup-ann", "reviews", "greet-1", "x", by)
	at := w.serve(adminpage.Config{Who: everyone("ann")}, "")
	parked := func(states ...projector.ParkedState) int {
		all, err := w.db.Parked(t.Context(), projector.ParkedFilter{States: states})
		require.NoError(t, err)
		return len(all)
	}
	entries, err := w.db.Entries(t.Context(), provider.EntryFilter{Status: []provider.EntryStatus{provider.EntryAbandoned}})
	require.NoError(t, err)
	require.NotEmpty(t, entries)
	seq := fmt.Sprint(entries[0].Seq)
	for _, c := range []struct{ act, confirm, form string }{
		{"replay", "ratings", "projector=ratings"},
		{"replay", "ratings", "projector=ratings&class=permanent"},
		{"skip", "ratings", "projector=ratings&key=review-cup-ann"},
		{"requeue", "reviews", "topic=reviews"},
		{"skip-entries", seq, "seq=" + seq},
		{"requeue-tasks", "mail/greet", "kind=mail%2Fgreet"},
		{"cancel-tasks", "greet-1", "id=greet-1"},
		{"complete-task", "greet-1", "id=greet-1&result=1"},
		{"rebuild", "ratings", "projector=ratings&how=in-place"},
		{"generation", "ratings", "projector=ratings&generation=1&action=drop"},
		{"verify", "ratings", "projector=ratings&repair=yes"},
	} {
		for _, typed := range []string{"", "no", c.confirm + "x"} {
			got := w.send(http.MethodPost, at+c.act, c.form+"&reason=r&confirm="+url.QueryEscape(typed))
			require.Equal(t, http.StatusBadRequest, got.status, "%s: %s", c.act, got.body)
			require.Contains(t, got.body, "nothing was changed", c.act)
		}
	}
	for _, form := range []string{"", "projector=", "class=permanent"} {
		require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"replay", form+"&reason=r&confirm=").status)
		require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"skip", form+"&reason=r&confirm=").status)
		require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"skip-entries", "&reason=r&confirm=").status)
		require.Equal(t, http.StatusBadRequest, w.send(http.MethodPost, at+"cancel-tasks", "&reason=r&confirm=").status)
	}
	require.Equal(t, 2, parked())
	// With the name, each of them does what it says.
	require.Contains(t, w.post(at+"skip-entries", "seq", seq, "reason", "r", "confirm", seq).body, "1 entries were skipped")
	require.Contains(t, w.post(at+"requeue", "topic", "reviews", "reason", "r", "confirm", "reviews").body, "entries were requeued")
	require.Contains(t, w.post(at+"complete-task", "id", "greet-1", "result", "1", "reason", "r", "confirm", "greet-1").body, "The task is complete")
	require.Contains(t, w.post(at+"replay", "projector", "ratings", "reason", "r", "confirm", "ratings").body, "2 messages are applied again")
	patience.Until(t, func() bool { return parked() == 0 }, "the messages to be applied")
	require.Contains(t, w.post(at+"verify", "projector", "ratings", "reason", "r", "repair", "yes", "confirm", "ratings").body, "Act ")
	require.Contains(t, w.post(at+"rebuild", "projector", "ratings", "how", "in-place", "reason", "r", "confirm", "ratings").body, "The rebuild is requested")
}

// A form acts on the rows that the page has listed, by each value of the list. If a value cannot be read back, the
// form does nothing: another version of the page has made it, or another program the filter.
func TestFormsSelectWhatThePageListed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.full("review-cup-ann", "reviews", "greet-1", "x", by)
	at := w.serve(adminpage.Config{Who: everyone("ann")}, "")
	parked := func() int {
		all, err := w.db.Parked(t.Context(), projector.ParkedFilter{})
		require.NoError(t, err)
		return len(all)
	}
	hidden := func(address, name, value string) {
		require.Contains(t, w.get(at+address).body, `<input type="hidden" name="`+name+`" value="`+value+`">`, address)
	}
	hidden("parked?projector=ratings&state=waiting", "state", "waiting")
	hidden("parked?projector=ratings&generation=1", "generation", "1")
	hidden("outbox?topic=reviews&status=abandoned", "status", "abandoned")
	hidden("tasks?kind=mail%2Fgreet&status=failed", "status", "failed")
	hidden("tasks?kind=mail%2Fgreet&group-kind=0", "group-kind", "0")
	for _, c := range []struct{ act, confirm, form string }{
		{"replay", "ratings", "projector=ratings&older=24h"},
		{"skip", "ratings", "projector=ratings&types=review.posted"},
		{"skip", "ratings", "projector=ratings&state=stuck&state=waiting"},
		{"dry-run", "", "projector=ratings&seqs=1"},
		{"requeue", "reviews", "topic=reviews&projector=ratings"},
		{"skip-entries", "reviews", "topic=reviews&topic=audit"},
		{"requeue-tasks", "mail/greet", "kind=mail%2Fgreet&age=1"},
		{"cancel-tasks", "mail/greet", "kind=mail%2Fgreet&status=nonsense"},
	} {
		got := w.send(http.MethodPost, at+c.act, c.form+"&reason=r&confirm="+url.QueryEscape(c.confirm))
		require.Equal(t, http.StatusBadRequest, got.status, "%s: %s", c.act, got.body)
	}
	require.Equal(t, 2, parked())
	// One of the two is stuck, and the other one waits behind it.
	require.Contains(t, w.post(at+"skip", "projector", "ratings", "state", "stuck", "reason", "r", "confirm", "ratings").body, "1 messages were skipped")
	require.Contains(t, w.post(at+"cancel-tasks", "kind", "mail/greet", "status", "waiting", "reason", "r", "confirm", "mail/greet").body, "0 tasks were canceled")
	ops, err := admin.New(w.db)
	require.NoError(t, err)
	id, err := ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "ratings", Types: []string{"none"}}, by)
	require.NoError(t, err)
	_, err = ops.Await(t.Context(), id, nil)
	require.NoError(t, err)
	require.NotContains(t, w.get(at+"act?id="+fmt.Sprint(id)).body, "<form", "the page cannot select by type")
}

// An event leads to what caused it, what it has caused, and what shares its correlation.
func TestCausesAreFollowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	add := func(stream string, m eventstore.Metadata) string {
		drafts, err := types.Encode(eventstore.WithMetadata(t.Context(), m), Rated{Stars: 1})
		require.NoError(t, err)
		_, err = w.db.Append(t.Context(), stream, eventstore.Any, drafts)
		require.NoError(t, err)
		return drafts[0].ID
	}
	root := add("order-1", eventstore.Metadata{CorrelationID: "c"})
	middle := add("payment-1", eventstore.Metadata{CorrelationID: "c", CausationID: root})
	for i := range 600 { // more than one part of the log
		add(fmt.Sprintf("noise-%d", i), eventstore.Metadata{})
	}
	leaf := add("parcel-1", eventstore.Metadata{CorrelationID: "c", CausationID: middle})
	far := add("mail-1", eventstore.Metadata{CorrelationID: "c", CausationID: leaf})
	add("sms-1", eventstore.Metadata{CorrelationID: "c"})
	foreign := add("x-1", eventstore.Metadata{CausationID: "a message of others"})
	at := w.serve(adminpage.Config{}, "")
	links := func(body string) (ids []string) {
		for _, m := range regexp.MustCompile(`href="\./event\?id=([^"&]*)"`).FindAllStringSubmatch(body, -1) {
			ids = append(ids, m[1])
		}
		return ids
	}
	body := w.get(at + "event?id=" + leaf).body
	require.Subset(t, links(body), []string{root, middle, far})
	require.Less(t, strings.Index(body, "order-1"), strings.Index(body, "payment-1"), "the first cause is first")
	require.Contains(t, body, "same correlation")
	body = w.get(at + "event?id=" + root).body
	require.Contains(t, links(body), middle)
	require.NotContains(t, links(body), leaf)
	next := regexp.MustCompile(`href="\.(/event\?from=[^"]*)"`).FindStringSubmatch(body)
	require.NotNil(t, next, "the search goes on")
	require.Subset(t, links(w.get(at+strings.ReplaceAll(next[1][1:], "&amp;", "&")).body), []string{leaf, far})
	require.Contains(t, w.get(at+"event?id="+foreign).body, "not in this log")
}

// Lists have pages, and a page has a limit.
func TestListsHavePages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.topic = "t"
	for i := range 120 {
		w.rate(fmt.Sprintf("review-%03d", i), "x", 1)
	}
	for range 110 {
		w.rate("review-000", "x", 1)
	}
	at := w.serve(adminpage.Config{}, "")
	for _, path := range []string{"streams", "outbox", "stream?id=review-000"} {
		next, rows := path, []string(nil)
		for n := 0; next != ""; n++ {
			require.Less(t, n, 10)
			body := w.get(at + next).body
			found := regexp.MustCompile(`(?m)^<tr>.*</tr>$|<tbody><tr>.*</tr>$`).FindAllString(body, -1)
			require.LessOrEqual(t, len(found), 51)
			rows = append(rows, found...)
			next = ""
			if m := regexp.MustCompile(`<a href="\./([^"]*)">Next page</a>`).FindStringSubmatch(body); m != nil {
				next = strings.ReplaceAll(m[1], "&amp;", "&")
			}
		}
		slices.Sort(rows)
		require.GreaterOrEqual(t, len(slices.Compact(rows)), 110, path)
	}
}
