package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/reviews/review"
)

const goodLine = `{"reviewerID": "A2", "asin": "B1", "reviewerName": "x", "helpful": [0, 0], "reviewText": "Fine.\n☕",
	"overall": 5.0, "summary": "good", "unixReviewTime": 1393545600, "reviewTime": "02 28, 2014"}`

func TestParseRecord(t *testing.T) {
	t.Parallel()
	r, err := parseRecord([]byte(goodLine))
	require.NoError(t, err)
	require.Equal(t, []string{"B1", "A2"}, []string{r.Product, r.Author})
	require.Equal(t, review.Content{Stars: 5, Summary: "good", Text: "Fine.\n☕"}, r.content())
	require.Equal(t, time.Date(2014, 2, 28, 0, 0, 0, 0, time.UTC), r.at())

	_, err = parseRecord([]byte(`{"asin":"B1","reviewerID":"A2","overall":5,"unixReviewTime":0}`))
	require.NoError(t, err, "a review may have no text")
}

// TestBadRecords: the error of a bad line names the problem and quotes nothing of the line.
func TestBadRecords(t *testing.T) {
	t.Parallel()
	with := func(old, to string) string {
		require.Contains(t, goodLine, old)
		return strings.Replace(goodLine, old, to, 1)
	}
	for _, c := range []struct{ line, want string }{
		{`{secret`, "not valid JSON at byte 1"},
		{goodLine[:40], "not valid JSON at byte"},
		{goodLine + goodLine, "not valid JSON at byte"},
		{`["secret"]`, "must be a JSON object"},
		{`"secret"`, "must be a JSON object"},
		{`null`, "asin is missing"},
		{with(`"asin"`, `"ASIN"`), "asin is missing"},
		{with(`"reviewerID"`, `"author"`), "reviewerID is missing"},
		{with(`"overall"`, `"stars"`), "overall is missing"},
		{with(`5.0`, `null`), "overall is missing"},
		{with(`5.0`, `4.5`), "overall must be a whole number of stars"},
		{with(`5.0`, `1e300`), "overall must be a whole number of stars"},
		{with(`5.0`, `1e999`), "overall has the wrong type"},
		{with(`5.0`, `"secret"`), "overall has the wrong type"},
		{with(`"good"`, `["secret"]`), "summary has the wrong type"},
		{with(`"unixReviewTime"`, `"time"`), "unixReviewTime is missing"},
		{with(`1393545600`, `-1`), "unixReviewTime must be between the years 1970 and 9999"},
		{with(`1393545600`, `253402300800`), "unixReviewTime must be between the years 1970 and 9999"},
		{with(`1393545600`, `1.5`), "unixReviewTime has the wrong type"},
		{with(`1393545600`, `99999999999999999999`), "unixReviewTime has the wrong type"},
		{with(`Fine`, "\xff"), "not valid JSON at byte"},
		{with(`Fine`, `\ud83d`), "not valid JSON at byte"},
		{with(`{`, `{"asin":"secret",`), "a key appears twice"},
	} {
		_, err := parseRecord([]byte(c.line))
		require.ErrorContains(t, err, c.want, c.line)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestExcerpt(t *testing.T) {
	t.Parallel()
	require.Equal(t, "short", excerpt("short"))
	require.Equal(t, strings.Repeat("é", 280), excerpt(strings.Repeat("é", 280)))
	require.Equal(t, strings.Repeat("é", 280)+"…", excerpt(strings.Repeat("é", 281)))
}
