// Package docs checks that what the documents name is there.
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
				require.True(t, strings.Contains(sources.String(), `t.Run("`+suite+`", `), "%s names no suite", m[1])
			}
			name := strings.ReplaceAll(parts[len(parts)-1], "_", " ")
			require.True(t, strings.Contains(sources.String(), `name: "`+name+`"`), "%s is no case", m[1])
		}
	}
}
