package main

import (
	"bufio"
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// span is the time in which a unit of work processed a message.
type span struct{ begin, end int64 }

// concurrently counts the messages that two units of work, in any processes, processed at the same
// time.
func concurrently(dir string) (n int, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "trace-runner*"))
	if err != nil {
		return 0, err
	}
	spans := map[string][]span{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return 0, err
		}
		err = readSpans(bufio.NewScanner(f), spans)
		_ = f.Close()
		if err != nil {
			return 0, err
		}
	}
	for of := range maps.Values(spans) {
		slices.SortFunc(of, func(a, b span) int { return int(a.begin - b.begin) })
		for i := 1; i < len(of); i++ {
			if of[i].begin < of[i-1].end {
				n++
				break
			}
		}
	}
	return n, nil
}

// readSpans reads the spans of one process. A unit that did not end, because its process was
// killed, has none.
func readSpans(lines *bufio.Scanner, spans map[string][]span) error {
	open := map[string][]int64{}
	for lines.Scan() {
		line := lines.Bytes()
		f := bytes.Fields(line)
		if len(f) == 2 && string(f[1]) == "life" {
			clear(open)
		}
		if len(f) < 3 {
			continue
		}
		what := string(f[1])
		if what != "begin" && what != "end" {
			continue
		}
		at, err := strconv.ParseInt(string(f[0]), 10, 64)
		if err != nil {
			continue
		}
		for _, field := range f[2:] {
			id := string(field)
			if what == "begin" {
				open[id] = append(open[id], at)
			} else if of := open[id]; len(of) > 0 {
				spans[id] = append(spans[id], span{of[0], at})
				open[id] = of[1:]
			}
		}
	}
	return lines.Err()
}
