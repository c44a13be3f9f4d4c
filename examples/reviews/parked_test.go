package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// TestPoisonSkipped: an undecodable message is parked with the later messages of its key, and all
// other messages are applied. It fails a dry run and a replay. After it is skipped, the waiting
// messages are applied automatically.
func TestPoisonSkipped(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		s := startService(t, d, overMemory, patience)
		s.enqueuePoison("review-tea-ann")
		s.eventuallyParked(1)
		a := s.post("tea", "ann", 5)
		require.Equal(t, http.StatusInternalServerError, a.status, "the write waits behind the poison message")
		require.Equal(t, "parked", code(t, a))
		require.Equal(t, http.StatusCreated, s.post("tea", "ben", 3).status)
		require.Equal(t, http.StatusCreated, s.post("cup", "ann", 4).status)
		require.EqualValues(t, 1, call(t, "GET", s.url+"/products/tea", "").decode(t)["reviews"])
		require.Contains(t, call(t, "GET", s.url+"/", "").text, `<dd class="error">2</dd>`)

		rows := parkedList(t, d)
		require.Len(t, rows, 2)
		require.Equal(t, []string{
			"1 product-reviews/posted review-tea-ann permanent undecodable 1",
			"2 product-reviews review-tea-ann held  0",
		}, summaries(rows))
		require.Equal(t, "poison", rows[0].MessageID)
		require.Equal(t, `{"stars":"five"}`, rows[0].Payload)
		require.Equal(t, "review.posted", rows[0].Headers[provider.HeaderType])

		o := runOperator(t, d, "replay", "--key", "review-tea-ann", "--dry-run")
		require.Equal(t, 1, o.code)
		require.Contains(t, o.stdout, "1 would fail: permanent (undecodable)")
		require.Contains(t, o.stdout, "0 would be replayed, 1 would fail, 1 would wait; 0 rows would change")
		require.Equal(t, rows, parkedList(t, d), "the dry run changed nothing")
		o = runOperator(t, d, "replay", "--seq", "2", "--reason", "the wrong one")
		require.Equal(t, 1, o.code)
		require.Equal(t, "1 selected: 0 still waiting, 1 stuck\n", o.stdout, "the message waits behind a stuck one")
		o = runOperator(t, d, "replay", "--key", "review-tea-ann", "--class", "permanent", "--reason", "let us see")
		require.Equal(t, 1, o.code)
		require.Equal(t, "1 selected: 0 still waiting, 2 stuck\n", o.stdout)
		require.Contains(t, o.stderr, "'reviews parked' lists them")
		require.Equal(t, "undecodable let us see", parkedList(t, d)[0].Code+" "+parkedList(t, d)[0].Reason)

		o = runOperator(t, d, "skip", "--seq", "1,77", "--reason", "a test message", "--by", "ann")
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, "1 skipped\n", o.stdout)
		s.eventuallyParked(0)
		require.EqualValues(t, 8, call(t, "GET", s.url+"/products/tea", "").decode(t)["stars"])
		skipped := parkedList(t, d, "--state", "skipped")
		require.Len(t, skipped, 1)
		require.Equal(t, "ann: a test message", skipped[0].By+": "+skipped[0].Reason)
		require.Equal(t, "the wrong one", parkedList(t, d, "--state", "replayed")[0].Reason, "the waiting message")
		require.Equal(t, 1, runOperator(t, d, "skip", "--seq", "1", "--reason", "again").code)
		require.Equal(t, http.StatusCreated, s.post("tea", "ann", 1).status, "later messages of the key are applied")
	})
}

// TestPoisonReplayed: the read model refuses an author. After that is fixed, a dry run shows the
// exact rows and changes nothing, and a replay applies all messages in order.
// Promise: G6.14
func TestPoisonReplayed(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		s := startService(t, d, inProcess, patience)
		require.Equal(t, http.StatusCreated, s.post("cup", "ben", 3).status)
		s.refuse("ann")
		commands, err := review.NewCommands(s.db)
		require.NoError(t, err)
		for day, stars := range []int{2, 4} {
			_, err = commands.Post(t.Context(), "cup", "ann", review.Content{Stars: stars, Summary: "s"}, time.Date(2026, 5, day+1, 0, 0, 0, 0, time.UTC))
			require.NoError(t, err)
		}
		require.Equal(t, http.StatusCreated, s.post("tea", "ben", 5).status)
		s.eventuallyParked(2)
		s.eventuallyStuck()
		rows := parkedList(t, d, "--key", "review-cup-ann")
		require.Equal(t, []string{
			"1 product-reviews/posted review-cup-ann unknown " + refusals[d.kind] + " 5",
			"2 product-reviews review-cup-ann held  0",
		}, summaries(rows))
		o := runOperator(t, d, "parked")
		require.Regexp(t, `(?m)^1 +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +product-reviews/posted +review-cup-ann +\S{36} +unknown +`+refusals[d.kind]+` +5`, o.stdout)

		o = runOperator(t, d, "replay", "--all", "--dry-run")
		require.Equal(t, 1, o.code)
		require.Contains(t, o.stdout, "1 would fail: unknown ("+refusals[d.kind]+")")
		s.allow()
		before := s.report()
		o = runOperator(t, d, "replay", "--all", "--dry-run")
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, dryRuns[d.kind]+"2 would be replayed, 0 would fail, 0 would wait; 2 rows would change; nothing is changed\n", o.stdout)
		require.Equal(t, rows, parkedList(t, d), "the dry run changed no parked message")
		require.Equal(t, before, s.report(), "the dry run changed no rating")

		o = runOperator(t, d, "replay", "--seq", "1", "--reason", "ann may write again")
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, "1 selected: 0 still waiting, 0 stuck\n", o.stdout)
		s.eventuallyParked(0)
		require.Equal(t, []rating{{"cup", 2, 7}, {"tea", 1, 5}}, s.report())
		require.Equal(t, "ann may write again", parkedList(t, d, "--state", "replayed")[0].Reason)
		require.EqualValues(t, 7, call(t, "GET", s.url+"/products/cup", "").decode(t)["stars"])

	})
}

// TestParkedRefuses: a command that cannot work fails with the reason.
func TestParkedRefuses(t *testing.T) {
	t.Parallel()
	db := "sqlite:" + importFile(t, fourReviews)
	missing := "sqlite:" + filepath.Join(t.TempDir(), "missing.db")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"missing flags: --db", []string{"parked"}},
		{"use sqlite:PATH", []string{"parked", "--db", "memory"}},
		{"no such file", []string{"parked", "--db", missing}},
		{"--class", []string{"parked", "--db", db, "--class", "odd"}},
		{"--state", []string{"parked", "--db", db, "--state", "odd"}},
		{"--limit", []string{"parked", "--db", db, "--limit", "0"}},
		{"select messages: use --seq", []string{"replay", "--db", db, "--reason", "r"}},
		{"select messages: use --seq", []string{"replay", "--db", db, "--reason", "r", "--all", "--seq", "1"}},
		{"--reason", []string{"replay", "--db", db, "--all"}},
		{"--wait", []string{"replay", "--db", db, "--all", "--reason", "r", "--wait=-1s"}},
		{"give who decides", []string{"replay", "--db", db, "--all", "--by", "", "--reason", "r"}},
		{"give who decides", []string{"replay", "--db", db, "--all", "--reason", strings.Repeat("r", 1001)}},
		{"no parked message was selected", []string{"replay", "--db", db, "--all", "--reason", "r"}},
		{"no parked message was selected", []string{"replay", "--db", db, "--all", "--dry-run"}},
		{"missing flags: --seq", []string{"skip", "--db", db, "--reason", "r"}},
		{"--reason", []string{"skip", "--db", db, "--seq", "1"}},
		{"--seq", []string{"skip", "--db", db, "--seq", "one", "--reason", "r"}},
		{"no parked message was selected", []string{"skip", "--db", db, "--seq", "", "--reason", "r"}},
		{"give who decides", []string{"skip", "--db", db, "--seq", "1", "--by", "", "--reason", "r"}},
		{"no parked message was selected", []string{"skip", "--db", db, "--seq", "1", "--reason", "r"}},
	} {
		o := reviews(t, c.args...)
		require.NotZero(t, o.code, c.args)
		require.Contains(t, o.stderr, c.want, c.args)
	}
	o := reviews(t, "parked", "--db", db)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, "seq   parked (UTC)   handler   key   message   class   code   attempts   version   state   generation\n", o.stdout)
}

// TestOperatorsCommandsAsDocumented: the commands in the documents parse.
func TestOperatorsCommandsAsDocumented(t *testing.T) {
	t.Parallel()
	command := regexp.MustCompile(`(?m)^(reviews (?:parked|replay|skip) |kinora (?:\w+) )([^#|\n]*)`)
	word := regexp.MustCompile(`"([^"]*)"|([^\s"]+)`)
	for path, want := range map[string]int{"README.md": 4, "../../docs/operations.md": 15} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		lines := command.FindAllStringSubmatch(string(text), -1)
		require.GreaterOrEqual(t, len(lines), want, path)
		for _, line := range lines {
			name, args, _ := strings.Cut(line[0], " ")
			var words []string
			if name == "kinora" {
				words = []string{"ops"}
			}
			for _, m := range word.FindAllStringSubmatch(args, -1) {
				words = append(words, m[1]+m[2])
			}
			k, err := kong.New(&commandLine{}, commands.Vars(), kong.Bind(&commands.App{}))
			require.NoError(t, err)
			_, err = k.Parse(words)
			require.NoError(t, err, line[0])
		}
	}
}

// runOperator runs an operator's command while the service runs.
func runOperator(t *testing.T, d database, command string, args ...string) outcome {
	t.Helper()
	return reviews(t, slices.Concat([]string{command}, args, d.args())...)
}

func parkedList(t *testing.T, d database, args ...string) (rows []parkedRow) {
	t.Helper()
	o := runOperator(t, d, "parked", append(args, "--json")...)
	require.Zero(t, o.code, o.stderr)
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
	return rows
}

func summaries(rows []parkedRow) (lines []string) {
	for _, r := range rows {
		lines = append(lines, fmt.Sprint(r.Seq, " ", r.Handler, " ", r.Key, " ", r.Class, " ", r.Code, " ", r.Attempts))
	}
	return lines
}

// post posts with strong consistency, so that the answer shows the outcome in the read model.
func (s *testService) post(product, author string, stars int) answer {
	s.Helper()
	return call(s.T, "POST", s.url+"/products/"+product+"/reviews", reviewJSON(author, stars, ""), strong)
}

// enqueuePoison enqueues a message that the handler cannot decode.
func (s *testService) enqueuePoison(key string) {
	s.Helper()
	require.NoError(s, s.db.inTx(s.Context(), func(tx eventstore.TxStore) error {
		return tx.(outbox.Enqueuer).Enqueue(s.Context(), outbox.Message{
			ID: "poison", Topic: review.Category, Key: key, Payload: []byte(`{"stars":"five"}`),
			Headers: map[string]string{provider.HeaderType: "review.posted", provider.HeaderStream: key},
		})
	}))
}

func (s *testService) eventuallyParked(want int64) {
	s.Helper()
	require.Eventually(s, func() bool {
		n, err := s.db.ParkedCount(context.Background(), "")
		return err == nil && n == want
	}, patience, 10*time.Millisecond)
}

// eventuallyStuck waits until all attempts at one message are exhausted.
func (s *testService) eventuallyStuck() {
	s.Helper()
	require.Eventually(s, func() bool {
		list, err := s.db.Parked(context.Background(), projector.ParkedFilter{States: []projector.ParkedState{projector.StateStuck}})
		return err == nil && len(list) == 1
	}, patience, 10*time.Millisecond)
}

func (s *testService) report() []rating {
	s.Helper()
	ratings, err := s.db.ratings(s.Context(), "")
	require.NoError(s, err)
	return ratings
}

// The error code of a refused row and the dry run of each database.
var (
	refusals = map[string]string{"sqlite": "SQLITE_CONSTRAINT_TRIGGER", "postgres": "23514"}
	dryRuns  = map[string]string{"sqlite": `latest_reviews
  + {"product":"cup","author":"ann","stars":4,"summary":"s","excerpt":"","reviewed_at":1777680000000}
ratings
  - {"product":"cup","reviews":1,"stars":3}
  + {"product":"cup","reviews":2,"stars":7}
`, "postgres": `latest_reviews
  + {"stars": 4, "author": "ann", "excerpt": "", "product": "cup", "summary": "s", "reviewed_at": "2026-05-02T00:00:00+00:00"}
ratings
  - {"stars": 3, "product": "cup", "reviews": 1}
  + {"stars": 7, "product": "cup", "reviews": 2}
`}
)

// refuse makes the read model refuse reviews by an author.
func (s *testService) refuse(author string) {
	s.exec(`create trigger refuse before insert on latest_reviews_g1 when new.author = '`+author+`' begin select raise(abort, 'no'); end`,
		`alter table latest_reviews_g1 add constraint refuse check (author <> '`+author+`')`)
}

func (s *testService) allow() {
	s.exec(`drop trigger refuse`, `alter table latest_reviews_g1 drop constraint refuse`)
}

func (s *testService) exec(sqlite, postgres string) {
	s.Helper()
	var err error
	switch db := s.db.(type) {
	case *sqliteStore:
		_, err = db.SQL().Exec(sqlite)
	case *postgresStore:
		_, err = db.Pool().Exec(s.Context(), postgres)
	}
	require.NoError(s, err)
}

// The commands of kinora in this program use its handlers.
func TestTheCommandsOfKinoraUseTheHandlersOfTheProgram(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		s := startService(t, d, overMemory, patience)
		s.enqueuePoison("review-tea-ann")
		s.eventuallyParked(1)
		o := runOperator(t, d, "ops", "doctor")
		require.Equal(t, 1, o.code, o.stderr)
		require.Contains(t, o.stdout, "Messages of the projector product-reviews are stuck")
		o = runOperator(t, d, "ops", "parked", "dry-run", "--projector", "product-reviews", "--key", "review-tea-ann", "--reason", "look")
		require.Equal(t, 1, o.code)
		require.Contains(t, o.stdout, "would fail: permanent undecodable")
		o = runOperator(t, d, "ops", "parked", "skip", "--seq", "1", "--reason", "a test message", "--yes")
		require.Zero(t, o.code, o.stderr)
		require.Zero(t, runOperator(t, d, "ops", "doctor", "--skew", "1m").code) // a report of a busy machine has the clock of a while ago
	})
}
