// Package docs checks that what the documents name is there.
package docs_test

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every test that guarantees.md names exists, and so does every case of a suite.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	page, err := os.ReadFile("guarantees.md")
	require.NoError(t, err)
	var sources strings.Builder
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			text, err := os.ReadFile(path)
			sources.Write(text)
			return err
		}
		return err
	}))
	names := regexp.MustCompile("`(Test[^`]+)`").FindAllStringSubmatch(string(page), -1)
	require.Greater(t, len(names), 30)
	for _, m := range names {
		parts := strings.Split(m[1], "/")
		require.True(t, strings.Contains(sources.String(), "func "+parts[0]+"("), "%s is no test", m[1])
		if len(parts) > 1 {
			for _, suite := range parts[1 : len(parts)-1] {
				require.True(t, strings.Contains(sources.String(), `t.Run("`+suite+`", `) || strings.Contains(sources.String(), `{name: "`+suite+`", cases: `), "%s names no suite", m[1])
			}
			name := strings.ReplaceAll(parts[len(parts)-1], "_", " ")
			require.True(t, strings.Contains(sources.String(), `name: "`+name+`"`), "%s is no case", m[1])
		}
	}
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

// checkLinks tells that the links of a page within the repository lead somewhere, to headings that are there.
func checkLinks(t *testing.T, name string) {
	t.Helper()
	page, err := os.ReadFile(name)
	require.NoError(t, err)
	links := regexp.MustCompile(`\]\(([^):#]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(fenceForm.ReplaceAllString(string(page), ""), -1)
	require.GreaterOrEqual(t, len(links), 8)
	for _, m := range links {
		to := cmp.Or(m[1], name)
		_, err := os.Stat(to)
		require.NoError(t, err)
		if m[2] == "" {
			continue
		}
		text, err := os.ReadFile(to)
		require.NoError(t, err)
		var anchors []string
		for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
			plain := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
			anchors = append(anchors, strings.ReplaceAll(plain, " ", "-"))
		}
		require.Contains(t, anchors, m[2])
	}
}

func TestOperationsLinks(t *testing.T) { checkLinks(t, "operations.md") }

func TestProvidersLinks(t *testing.T) { checkLinks(t, "providers.md") }
