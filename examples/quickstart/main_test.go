package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// README.md shows parts of this program. Each run prints the same output.
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

// The Go code that README.md shows is part of this program.
func TestREADMEShowsThisProgram(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	indent := regexp.MustCompile(`(?m)^(.)`)
	blocks := regexp.MustCompile("(?ms)^```go\n(.*?)^```$").FindAllStringSubmatch(string(readme), -1)
	if len(blocks) != 2 {
		t.Errorf("README.md has %d blocks of Go, want 2", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(string(program), b[1]) && !strings.Contains(string(program), indent.ReplaceAllString(b[1], "\t$1")) {
			t.Errorf("README.md shows code that examples/quickstart/main.go does not have:\n%s", b[1])
		}
	}
	head := strings.SplitN(string(readme), "\n", 25)
	if !strings.Contains(strings.Join(head[:24], "\n"), "```go") {
		t.Error("README.md shows no Go code before line 25: move the program up")
	}
}
