// Package fingerprint names a state of the code. Records of long runs keep it, so that a run that was interrupted continues,
// and a record of other code does not count.
package fingerprint

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// outside are the directories whose code the records do not depend on.
var outside = []string{"docs/", "bench/", "examples/", "cmd/",
	"internal/exported/", "internal/figures/", "internal/mutant/", "internal/plainwords/", "internal/promises/", "internal/steady/", "internal/testrun/"}

// Of returns 12 hex digits of the SHA-256 of the code in the Git checkout at root: the sorted paths and contents of its
// tracked Go, SQL and Lua files, and of go.mod and go.sum. Files in docs, bench, examples, cmd, and of commands for the
// developers do not count, and the texts of the mutants do not either. Tests count if tests is true.
func Of(ctx context.Context, root string, tests bool) (string, error) {
	cmd := exec.CommandContext(ctx, "git", "ls-files", "-z")
	cmd.Dir = root
	list, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("list the tracked files of %s: %w", root, err)
	}
	paths := strings.Split(string(bytes.TrimRight(list, "\x00")), "\x00")
	slices.Sort(paths)
	sum := sha256.New()
	for _, name := range paths {
		if !counts(name) || !tests && strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if os.IsNotExist(err) { // deleted, and not committed yet
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read the code: %w", err)
		}
		_, _ = fmt.Fprintf(sum, "%s %d\n%s", name, len(text), text)
	}
	return hex.EncodeToString(sum.Sum(nil))[:12], nil
}

// counts reports whether a file is code that the records depend on.
func counts(name string) bool {
	if slices.ContainsFunc(outside, func(dir string) bool { return strings.HasPrefix(name, dir) }) {
		return false
	}
	base := path.Base(name)
	return slices.Contains([]string{".go", ".sql", ".lua"}, path.Ext(base)) || base == "go.mod" || base == "go.sum"
}
