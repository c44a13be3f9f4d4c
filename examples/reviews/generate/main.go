// Command generate writes review lines like those of the public Amazon review sets, for tests and
// measurements: new reviews, later edits, repeats, records out of order, and bad lines of every
// kind. The same seed writes the same file. The command does not use Kinora.
//
//	go run ./examples/reviews/generate -lines 100000 -gzip > reviews.json.gz
package main

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"strings"
)

func main() {
	count := flag.Int("lines", 100_000, "number of lines")
	seed := flag.Uint64("seed", 1, "seed of the generator: the same seed writes the same file")
	bad := flag.Float64("bad", 0.005, "share of bad lines")
	mark := flag.Bool("mark", false, "write the numbers of the bad lines to standard error")
	zip := flag.Bool("gzip", false, "compress the output with gzip")
	flag.Parse()

	buffered := bufio.NewWriterSize(os.Stdout, 1<<20)
	var out io.Writer = buffered
	done := buffered.Flush
	if *zip {
		z := gzip.NewWriter(buffered)
		out, done = z, func() error {
			if err := z.Close(); err != nil {
				return err
			}
			return buffered.Flush()
		}
	}
	g := generator{rnd: rand.New(rand.NewPCG(*seed, 0)), products: max(5, *count/50), authors: max(20, *count/10), bad: *bad}
	for n := range *count {
		text, good := g.line()
		if _, err := fmt.Fprintf(out, "%s\n", text); err != nil {
			log.Fatal(err)
		}
		if *mark && !good {
			fmt.Fprintln(os.Stderr, n+1)
		}
	}
	if err := done(); err != nil {
		log.Fatal(err)
	}
}

// line has all fields of a line of the public sets, including those that the import ignores.
type line struct {
	ReviewerID     string  `json:"reviewerID"`
	ASIN           string  `json:"asin"`
	ReviewerName   string  `json:"reviewerName,omitempty"`
	Helpful        [2]int  `json:"helpful"`
	ReviewText     string  `json:"reviewText"`
	Overall        float64 `json:"overall"`
	Summary        string  `json:"summary"`
	UnixReviewTime int64   `json:"unixReviewTime"`
	ReviewTime     string  `json:"reviewTime"`
}

type generator struct {
	rnd               *rand.Rand
	products, authors int
	bad               float64
	recent            []line // reviews that may be edited or repeated
	badKind           int
}

const remembered = 5000

func (g *generator) line() (text string, good bool) {
	if g.rnd.Float64() < g.bad {
		return g.badLine(), false
	}
	l := g.newLine()
	if len(g.recent) > 0 && g.rnd.Float64() < 0.35 {
		l = g.repeat(g.recent[g.rnd.IntN(len(g.recent))])
	}
	if len(g.recent) < remembered {
		g.recent = append(g.recent, l)
	} else {
		g.recent[g.rnd.IntN(remembered)] = l
	}
	return encode(l), true
}

func (g *generator) newLine() line {
	// The product of two random numbers makes a few products popular.
	product := int(float64(g.products) * g.rnd.Float64() * g.rnd.Float64())
	at := 1_300_000_000 + g.rnd.Int64N(100_000_000)
	l := line{
		ReviewerID:   fmt.Sprintf("A%010X", g.rnd.IntN(g.authors)*7919),
		ASIN:         fmt.Sprintf("B%09d", product),
		ReviewerName: "some \"one\"", UnixReviewTime: at, ReviewTime: "03 14, 2013",
	}
	if product%10 == 7 { // parts that are ambiguous if joined by "-" without escaping
		l.ASIN, l.ReviewerID = "B-7~"+l.ASIN, "-"+l.ReviewerID
	}
	g.content(&l)
	return l
}

// repeat returns another record of an earlier review: an edit, a repeat, or an outdated record.
func (g *generator) repeat(l line) line {
	switch g.rnd.IntN(5) {
	case 0: // the same line
	case 1: // the same time, other content
		g.content(&l)
	case 2: // older
		l.UnixReviewTime -= 1 + g.rnd.Int64N(1_000_000)
		g.content(&l)
	case 3: // newer, the same content
		l.UnixReviewTime += 1 + g.rnd.Int64N(1_000_000)
	default: // newer
		l.UnixReviewTime += 1 + g.rnd.Int64N(1_000_000)
		g.content(&l)
	}
	return l
}

var words = strings.Fields(`the a very good poor great café naïve works broke after two weeks battery screen 日本 strings
	guitar sounds price cheap quality would not buy again recommended gift son <b>love</b> it & "this" 👍 ok\fine`)

func (g *generator) content(l *line) {
	l.Overall = float64(1 + g.rnd.IntN(5))
	l.Summary = g.text(1 + g.rnd.IntN(6))
	l.ReviewText = g.text(5 + g.rnd.IntN(120))
}

func (g *generator) text(n int) string {
	var b strings.Builder
	for range n {
		b.WriteString(words[g.rnd.IntN(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}

func encode(l line) string {
	b, err := json.Marshal(l)
	if err != nil {
		log.Fatal(err)
	}
	return string(b)
}

// badLine returns the kinds of bad lines in turn. The last kind, a line of 5 MiB, occurs once in a
// file.
func (g *generator) badLine() string {
	l := g.newLine()
	good := encode(l)
	with := func(old, to string) string { return strings.Replace(good, old, to, 1) }
	kinds := []func() string{
		func() string { return "{not json" },
		func() string { return good[:len(good)/2] },
		func() string { return good + good },
		func() string { return "[1,2]" },
		func() string { return "\"text\"" },
		func() string { l.Overall = 0; return encode(l) },
		func() string { l.Overall = 6; return encode(l) },
		func() string { l.Overall = 4.5; return encode(l) },
		func() string { return with(`"overall":`, `"overall":"`+"5"+`","x":`) },
		func() string { return with(`"overall"`, `"Overall"`) },
		func() string { return with(`"asin"`, `"isbn"`) },
		func() string { return with(`"reviewerID"`, `"reviewer"`) },
		func() string { return with(`"unixReviewTime"`, `"time"`) },
		func() string { return with(`"unixReviewTime":`, `"unixReviewTime":-`) },
		func() string { return with(`"unixReviewTime":`, `"unixReviewTime":99999999`) },
		func() string { l.ASIN = ""; return encode(l) },
		func() string { l.ASIN = strings.Repeat("x", 300); return encode(l) },
		func() string { l.ReviewerID = strings.Repeat("-", 130); return encode(l) },
		func() string { l.ASIN = "tab\there"; return encode(l) },
		func() string { l.ReviewText = "nul\x00here"; return encode(l) },
		func() string { return with(`"reviewText":"`, `"reviewText":"`+"\xff\xfe") },
		func() string { return with(`"reviewText":"`, `"reviewText":"\ud83d`) },
		func() string { return with(`{`, `{"asin":"twice",`) },
		func() string { l.ReviewText = strings.Repeat("long ", 60_000); return encode(l) },
		func() string { g.badKind = 1 << 20; return strings.Repeat("z", 5<<20) }, // only once
	}
	kind := g.badKind
	if g.badKind++; kind >= len(kinds) {
		kind %= len(kinds) - 1
	}
	return kinds[kind]()
}
