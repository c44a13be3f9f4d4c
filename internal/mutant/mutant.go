// Package mutant lists the mechanisms whose loss a test must notice, and removes them. Each Mutant
// is a few edits of the source. The edits reach the compiler through the flag -overlay of go build
// and go test, so the product does not contain them.
package mutant

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/kinora-go/kinora/internal/patience"
)

// Mutant is Kinora without one mechanism.
type Mutant struct {
	Name  string
	What  string // how Kinora then behaves
	Edits []Edit
	Tests []Test   // each of them fails with the mutant
	Cells []string // cells of tests/fault, the one most likely to fail first
}

// Edit replaces Old by New in File.
type Edit struct {
	File  string // relative to the module root
	Old   string
	New   string
	Count int // how often Old occurs in File; zero means once
}

// Test names a test of a package.
type Test struct {
	Package string // such as "./projector"
	Name    string // a subtest is written as "TestA/b"
}

// Named returns the mutant with this name.
func Named(name string) (Mutant, error) {
	for _, m := range All {
		if m.Name == name {
			return m, nil
		}
	}
	return Mutant{}, fmt.Errorf("unknown mutant %q: see package internal/mutant", name)
}

// Apply returns the text of the files that m edits, by absolute path. root is the module root.
// Apply returns an error if the old text of an edit does not occur as often as the edit says.
func (m Mutant) Apply(root string) (map[string]string, error) {
	files := map[string]string{}
	for _, e := range m.Edits {
		path := filepath.Join(root, e.File)
		text, ok := files[path]
		if !ok {
			b, err := os.ReadFile(path)
			if err != nil {
				return nil, fmt.Errorf("mutant %s no longer applies: %w", m.Name, err)
			}
			text = string(b)
		}
		switch n := strings.Count(text, e.Old); {
		case n == 0:
			return nil, fmt.Errorf("mutant %s no longer applies: text not found in %s: %q", m.Name, e.File, e.Old)
		case n != max(e.Count, 1):
			return nil, fmt.Errorf("mutant %s no longer applies: text found %d times in %s, want %d: %q", m.Name, n, e.File, max(e.Count, 1), e.Old)
		}
		files[path] = strings.ReplaceAll(text, e.Old, e.New)
	}
	return files, nil
}

// Overlay writes files to dir, keyed by the paths that they replace or add. It returns the path of
// the file for the flag -overlay.
func Overlay(dir string, files map[string]string) (string, error) {
	replace := map[string]string{}
	for path, text := range files {
		replace[path] = filepath.Join(dir, strconv.Itoa(len(replace))+"-"+filepath.Base(path))
		if err := os.WriteFile(replace[path], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o600)
}

// Root returns the module root, found from the working directory.
func Root(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/kinora-go/kinora").Output()
	if err != nil {
		return "", fmt.Errorf("find the module's root: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Run runs t with an overlay. It returns go test's line about the failure, and the whole output.
// The line is empty if the test passed or did not run.
func (t Test) Run(ctx context.Context, root, overlay string) (failure, output string) {
	var run []string
	for name := range strings.SplitSeq(t.Name, "/") {
		run = append(run, "^"+regexp.QuoteMeta(name)+"$")
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-count=10", "-failfast", "-timeout=60m", "-overlay", overlay, "-run", strings.Join(run, "/"),
		"-vet=off", "-ldflags=-s", t.Package) // vet and debug information take a third of the build
	cmd.Dir = root
	cmd.Env = append(os.Environ(), patience.Env+"=30s") // the symptom of many mutants is that something never happens
	out, _ := cmd.CombinedOutput()                      // the output contains more than the error
	failed := regexp.MustCompile(`(?m)^\s*--- FAIL: ` + regexp.QuoteMeta(t.Name) + ` .*`)
	return strings.TrimSpace(failed.FindString(string(out))), string(out)
}
