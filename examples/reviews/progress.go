package main

import (
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

const (
	drawEvery = 100 * time.Millisecond
	logEvery  = 10 * time.Second
)

// progress shows the progress of an import. If stderr is a terminal, it shows two bars, first for
// the file and then for the read model. Otherwise it logs at intervals. The counters are safe for
// concurrent use.
type progress struct {
	size, read atomic.Int64 // bytes of the file; size is 0 if unknown, as for a pipe
	line       atomic.Int64 // number of the last line read
	changed    atomic.Int64 // lines that posted or edited a review
	bad        atomic.Int64 // bad lines
	open       atomic.Int64 // events that are not applied yet; set when all lines are read

	bar      atomic.Pointer[progressbar.ProgressBar]
	applying bool
}

func (p *progress) String() string {
	line, changed, bad := p.line.Load(), p.changed.Load(), p.bad.Load()
	return fmt.Sprintf("%d lines: %d posted or edited a review, %d changed nothing, %d were bad",
		line, changed, line-changed-bad, bad)
}

// show shows the progress until stop is called.
func (p *progress) show() (stop func()) {
	every, show := logEvery, p.log
	if term.IsTerminal(int(os.Stderr.Fd())) {
		every, show = drawEvery, p.draw
		p.bar.Store(newBar(p.size.Load(), progressbar.OptionShowBytes(true)))
	}
	ticker, done, ended := time.NewTicker(every), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-ticker.C:
				show()
			case <-done:
				return
			}
		}
	}()
	return func() {
		ticker.Stop()
		close(done)
		<-ended
		p.clear()
	}
}

func newBar(total int64, more ...progressbar.Option) *progressbar.ProgressBar {
	if total <= 0 {
		total = -1 // a spinner
	}
	return progressbar.NewOptions64(total, append(more, progressbar.OptionSetWriter(os.Stderr),
		progressbar.OptionSetWidth(30), progressbar.OptionSetPredictTime(true))...)
}

func (p *progress) draw() {
	open := p.open.Load()
	if open > 0 && !p.applying {
		p.applying = true
		p.clear()
		p.bar.Store(newBar(open, progressbar.OptionShowCount()))
	}
	bar := p.bar.Load()
	if p.applying {
		bar.Describe("applying events")
		_ = bar.Set64(bar.GetMax64() - open)
		return
	}
	bar.Describe(fmt.Sprintf("%d lines", p.line.Load()))
	_ = bar.Set64(p.read.Load())
}

// clear removes the bar before other output. The next draw shows it again.
func (p *progress) clear() {
	if bar := p.bar.Load(); bar != nil {
		_ = bar.Clear()
	}
}

// log logs the progress if stderr is not a terminal.
func (p *progress) log() {
	attrs := []any{"lines", p.line.Load(), "bad", p.bad.Load(), "events_to_apply", p.open.Load()}
	if size := p.size.Load(); size > 0 {
		attrs = append(attrs, "percent_read", p.read.Load()*100/size)
	}
	slog.Info("import progress", attrs...)
}
