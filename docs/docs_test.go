// Package docs checks that the tests, cases, files and headings that the documents name exist.
package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every test that the documents name exists, and so does every case of a suite.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	t.Parallel()
	var sources strings.Builder
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			text, err := os.ReadFile(path)
			sources.Write(text)
			return err
		}
		return err
	}))
	has := func(text string) bool { return strings.Contains(sources.String(), text) }
	named := 0
	for _, page := range []string{"reliability.md", "performance.md", "operations.md", "architecture.md", "telemetry.md"} {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("`(Test[^`]+)`").FindAllStringSubmatch(string(text), -1) {
			named++
			parts := strings.Split(m[1], "/")
			require.True(t, has("func "+parts[0]+"("), "%s: %s is not a test", page, m[1])
			if len(parts) == 1 {
				continue
			}
			for _, suite := range parts[1 : len(parts)-1] {
				require.True(t, has(`t.Run("`+suite+`", `) || has(`{name: "`+suite+`", cases: `), "%s: %s is not in a suite", page, m[1])
			}
			name := strings.ReplaceAll(parts[len(parts)-1], "_", " ")
			require.True(t, has(`name: "`+name+`"`), "%s: %s is not a case", page, m[1])
		}
	}
	require.Greater(t, named, 20)
}

// Promises are for users. Their tests and mutants are in evidence.md, which internal/promises writes.
func TestGuaranteesNameNoTests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("guarantees.md")
	require.NoError(t, err)
	require.Empty(t, regexp.MustCompile("(Test|Fuzz)[A-Z]\\w*|`[^`]+/[^`]+_[^`]+`|mutant").FindAllString(string(page), -1))
}

// The code that operations.md shows is that of examples that are run.
func TestOperationsShowsCodeThatRuns(t *testing.T) {
	page, err := os.ReadFile("operations.md")
	require.NoError(t, err)
	examples, err := os.ReadFile("../projector/example_test.go")
	require.NoError(t, err)
	shown := 0
	for _, m := range fenceForm.FindAllStringSubmatch(string(page), -1) {
		if m[1] == "go" {
			require.Contains(t, string(examples), regexp.MustCompile(`(?m)^(.)`).ReplaceAllString(m[2], "\t$1"))
			shown++
		}
	}
	require.Equal(t, 4, shown)
}

// fenceForm is a block of code with its language.
var fenceForm = regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$")

// Every link of a page to a file or a heading of the repository leads to one that exists.
func TestLinksLeadToFilesAndHeadingsThatExist(t *testing.T) {
	t.Parallel()
	pages := 0
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			checkLinks(t, path)
			pages++
		}
		return err
	}))
	require.Greater(t, pages, 25)
}

// checkLinks checks the links of a page that lead to files of the repository.
func checkLinks(t *testing.T, page string) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	for _, m := range linkForm.FindAllStringSubmatch(fenceForm.ReplaceAllString(string(text), ""), -1) {
		to := page
		if m[1] != "" {
			to = filepath.Join(filepath.Dir(page), m[1])
		}
		_, err := os.Stat(to)
		require.NoError(t, err, page)
		if m[2] != "" {
			require.Contains(t, anchors(t, to), m[2], "%s links to a heading that does not exist", page)
		}
	}
}

var linkForm = regexp.MustCompile(`\]\(([^):#]*)(?:#([^)]*))?\)`)

// anchors returns the anchors that GitHub gives the headings of a page.
func anchors(t *testing.T, page string) (names []string) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		plain := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		names = append(names, strings.ReplaceAll(plain, " ", "-"))
	}
	return names
}

// The index of decision records has the number, the title and the status of each record, in order.
func TestTheIndexHasEveryDecisionRecord(t *testing.T) {
	t.Parallel()
	records, err := filepath.Glob("adr/0*.md")
	require.NoError(t, err)
	require.Greater(t, len(records), 10)
	var want []string
	for _, path := range records {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		title := regexp.MustCompile(`\A# (\d{4}): (.+)\n`).FindStringSubmatch(string(text))
		require.NotNil(t, title, "%s: want the title \"# number: title\"", path)
		status := "accepted"
		if m := regexp.MustCompile(`(?m)^Superseded by \[ADR (\d+)\]\((.*)\)\.$`).FindStringSubmatch(string(text)); m != nil {
			status = "superseded by [00" + m[1] + "](" + m[2] + ")"
		}
		want = append(want, "| ["+title[1]+"]("+filepath.Base(path)+") | "+title[2]+" | "+status+" |")
	}
	index, err := os.ReadFile("adr/README.md")
	require.NoError(t, err)
	require.Equal(t, want, regexp.MustCompile(`(?m)^\| \[\d{4}\](?:.*? \|){3}`).FindAllString(string(index), -1))
}
