package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The README shows this program. Each run prints the same output.
func Example() {
	dir, err := os.MkdirTemp("", "quickstart")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for range 3 {
		if err := run(context.Background(), filepath.Join(dir, "reviews.db")); err != nil {
			panic(err)
		}
	}
	// Output:
	// product 42: 1 review(s), 5.0 stars
	// product 42: 1 review(s), 5.0 stars
	// product 42: 1 review(s), 5.0 stars
}

func TestREADMEShowsThisProgram(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```go\n"+string(program)+"```\n") {
		t.Error("README.md does not show examples/quickstart/main.go: copy the program into its first Go block")
	}
	head := strings.SplitN(string(readme), "\n", 25)
	if !strings.Contains(strings.Join(head[:24], "\n"), "```go") {
		t.Error("README.md shows no Go code before line 25: move the program up")
	}
}
