package main

import (
	"os"
	"path/filepath"
	"testing"
)

// The plots of the documents are those of the results. Otherwise run make figures.
func TestThePlotsAreThoseOfTheResults(t *testing.T) {
	dir := t.TempDir()
	if err := run("../results.json", dir); err != nil {
		t.Fatal(err)
	}
	drawn, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil || len(drawn) < 2 {
		t.Fatalf("%d plots were drawn: %v", len(drawn), err)
	}
	for _, path := range drawn {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("../../docs/plots", filepath.Base(path)))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("docs/plots/%s is not that of bench/results.json: run make figures", filepath.Base(path))
		}
	}
}
