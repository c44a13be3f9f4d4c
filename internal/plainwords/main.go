// Command plainwords counts odd turns of English in Go comments and Markdown, and lists each with
// its file and line. It fails at -max or more per 1,000 words.
//
//	go run ./internal/plainwords [-max N] [-v] [PATH...]
//
// It does not read code: strings, identifiers, `code spans`, fenced and indented code. A page
// that lists odd words on purpose writes them as code spans.
package main

import (
	"flag"
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// odd matches the turns. CONTRIBUTING.md says how to write instead.
var odd = regexp.MustCompile(`(?i)\b(` + strings.Join([]string{
	`of which`, `whoever`, `nobody`, `somebody else`, `till`, `beside`, `that which`, `whereof`, `thereof`, `anew`,
	`to be had`, `in vain`, `(?:is|are|was|were|be) done with`, `as many as may be`, `under way`, `but for`,
	`not begun`, `it wants`, `wants (?:a|an|the|no|at least|to be)`, `(?:is|are|was|were|be) told`,
	`tells (?:of|how|who|that|whether|it)`, `nothing is to be`,
	`what (?:is|was|are|were|has|had|it|comes|they)`,
	`where (?:it|that|there|one|this|they|nothing|no|some|all)` +
		` (?:is|was|are|were|has|does|do|did|cannot|can|fails|may)`,
}, `|`) + `)\b`)

// code matches text that is not English: code spans, identifiers, paths and links.
var code = regexp.MustCompile("`[^`]*`" + `|https?://\S+|\]\([^)]*\)|\w*[a-z][A-Z]\w*|\w+(?:[._/]\w+)+|\w+\(\)`)

// paragraph is text of consecutive lines.
type paragraph struct {
	text  strings.Builder
	lines []int // the line of each word
}

// hit is an odd turn.
type hit struct {
	line int
	turn string
}

func main() { os.Exit(run(os.Args[1:], os.Stdout)) }

func run(args []string, out io.Writer) int {
	flags := flag.NewFlagSet("plainwords", flag.ContinueOnError)
	flags.SetOutput(out)
	limit := flags.Float64("max", 1, "fail at this many odd turns per 1,000 words")
	verbose := flags.Bool("v", false, "list the odd turns also if there are few")
	if flags.Parse(args) != nil {
		return 2
	}
	roots := flags.Args()
	if len(roots) == 0 {
		roots = []string{"."}
	}
	words, hits := 0, []string(nil)
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() {
				if path != root && slices.Contains([]string{".git", ".bin", "testdata", "vendor"}, entry.Name()) {
					return filepath.SkipDir
				}
				return nil
			}
			n, found, err := count(path)
			words += n
			for _, h := range found {
				hits = append(hits, fmt.Sprintf("%s:%d: %s", path, h.line, h.turn))
			}
			return err
		})
		if err != nil {
			_, _ = fmt.Fprintln(out, err)
			return 1
		}
	}
	rate := 1000 * float64(len(hits)) / float64(max(words, 1))
	if *verbose || rate >= *limit {
		for _, h := range hits {
			_, _ = fmt.Fprintln(out, h)
		}
	}
	_, _ = fmt.Fprintf(out, "%d odd turns in %d words: %.2f per 1,000\n", len(hits), words, rate)
	if rate >= *limit {
		_, _ = fmt.Fprintf(out, "at least %g per 1,000: write plain English, as CONTRIBUTING.md says\n", *limit)
		return 1
	}
	return 0
}

// count returns the words and the odd turns of a file. Files other than Go and Markdown have none.
func count(path string) (words int, hits []hit, err error) {
	read := map[string]func([]byte) []*paragraph{".go": comments, ".md": markdown}[filepath.Ext(path)]
	if read == nil {
		return 0, nil, nil
	}
	source, err := os.ReadFile(path)
	if err != nil {
		return 0, nil, err
	}
	for _, p := range read(source) {
		text := p.text.String()
		words += len(p.lines)
		for _, at := range odd.FindAllStringIndex(text, -1) {
			word := strings.Count(text[:at[0]], " ")
			hits = append(hits, hit{p.lines[word], text[at[0]:at[1]]})
		}
	}
	return words, hits, nil
}

// add adds a line without its code.
func (p *paragraph) add(line int, text string) {
	for _, word := range strings.Fields(text) {
		if p.text.Len() > 0 {
			p.text.WriteByte(' ')
		}
		p.text.WriteString(word)
		p.lines = append(p.lines, line)
	}
}

// comments returns the comments of Go source. Comments on consecutive lines are one paragraph.
func comments(source []byte) (all []*paragraph) {
	files := token.NewFileSet()
	file := files.AddFile("", files.Base(), len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	p, last := &paragraph{}, 0
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return append(all, p)
		}
		if tok != token.COMMENT {
			continue
		}
		begin := file.Line(pos)
		for i, line := range strings.Split(strings.TrimSuffix(lit, "*/"), "\n") {
			text := strings.TrimPrefix(strings.TrimPrefix(line, "//"), "/*")
			isCode := strings.HasPrefix(text, "\t") || strings.HasPrefix(line, "//go:") || strings.HasPrefix(line, "//nolint")
			if begin+i != last+1 || isCode || strings.TrimSpace(text) == "" {
				all, p = append(all, p), &paragraph{}
			}
			if last = begin + i; !isCode {
				p.add(last, code.ReplaceAllString(text, "x"))
			}
		}
	}
}

// markdown returns the text of a Markdown page without its code and without headings that are
// questions.
func markdown(source []byte) (all []*paragraph) {
	p, fence := &paragraph{}, ""
	for i, line := range strings.Split(string(source), "\n") {
		text := strings.TrimSpace(line)
		mark := ""
		if strings.HasPrefix(text, "```") || strings.HasPrefix(text, "~~~") {
			mark = text[:3]
		}
		question := strings.HasPrefix(text, "#") && strings.HasSuffix(text, "?")
		switch {
		case fence == "" && mark != "":
			fence = mark
		case fence != "":
			if mark == fence {
				fence = ""
			}
		case text == "" || question:
			all, p = append(all, p), &paragraph{}
		default:
			p.add(i+1, code.ReplaceAllString(text, "x"))
		}
	}
	return append(all, p)
}
