// Command promises writes docs/evidence.md: for each promise of docs/guarantees.md the tests that prove it, the
// cells of tests/fault that attack it, and the mutants that its tests detect.
//
//	go run ./internal/promises [ROOT]
//
// A comment line names the promises of a test. It stands in the doc comment of a Test or Fuzz function, or above
// the name of a case of providers/providertest or of a cell of tests/fault:
//
//	// Promise: G1.3, T4.1
//
// Command promises writes nothing and fails if a promise has no test, if two promises have one number, if a
// comment names a promise that does not exist, or if it belongs to no test.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout)) }

func run(args []string, out io.Writer) int {
	root := "."
	if len(args) > 0 {
		root = args[0]
	}
	text, err := evidence(root)
	if err == nil {
		err = os.WriteFile(filepath.Join(root, evidencePage), []byte(text), 0o644)
	}
	if err != nil {
		_, _ = fmt.Fprintln(out, err)
		return 1
	}
	return 0
}
