package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// outcome is the result of a command as its producer received it.
type outcome byte

const (
	ambiguous outcome = '?' // unknown; also the outcome if none is recorded
	acked     outcome = 'a'
	rejected  outcome = 'r'
)

// command is a producer's intent: the n-th event of a stream.
type command struct {
	ID      string
	Stream  string
	N       int
	Amount  int64
	outcome outcome
}

// ledger is a producer's record outside the database. Intents are synced to disk before their
// commands begin. An outcome counts once it is synced.
type ledger struct {
	file *os.File
	mu   sync.Mutex
	next *page
	kick chan struct{}
}

// page is a group of lines that are synced together.
type page struct {
	lines  []byte
	synced chan struct{}
}

func newPage() *page { return &page{synced: make(chan struct{})} }

// openLedger creates a ledger. Each life of a producer has its own, because the last line of the
// previous one may be torn.
func openLedger(dir, name string, life int) (*ledger, error) {
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("ledger-%s-%d", name, life)), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	l := &ledger{file: f, next: newPage(), kick: make(chan struct{}, 1)}
	go l.write()
	return l, nil
}

func (l *ledger) intend(c command) { <-l.add("i %s %s %d %d\n", c.ID, c.Stream, c.N, c.Amount) }

func (l *ledger) outcome(c command, o outcome) { l.add("o %s %c\n", c.ID, o) }

// close returns when all added lines are on disk.
func (l *ledger) close() {
	<-l.add("")
	close(l.kick)
}

func (l *ledger) add(format string, args ...any) (synced <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next.lines = fmt.Appendf(l.next.lines, format, args...)
	select {
	case l.kick <- struct{}{}:
	default:
	}
	return l.next.synced
}

// write writes page after page. Lines that are added meanwhile go to the next page.
func (l *ledger) write() {
	for range l.kick {
		l.mu.Lock()
		p := l.next
		l.next = newPage()
		l.mu.Unlock()
		_, err := l.file.Write(p.lines)
		if err = errors.Join(err, l.file.Sync()); err != nil {
			// Without the ledger, nothing that follows can be judged.
			fmt.Fprintln(os.Stderr, "the ledger:", err)
			os.Exit(1)
		}
		close(p.synced)
	}
}

// readLedgers reads the ledgers of all producers and lives.
func readLedgers(dir string) (map[string]*command, error) {
	files, err := filepath.Glob(filepath.Join(dir, "ledger-*"))
	if err != nil {
		return nil, err
	}
	all := map[string]*command{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		err = readLedger(f, all)
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return all, nil
}

// readLedger adds the commands that it reads to all. A torn last line was never acted on.
func readLedger(from io.Reader, all map[string]*command) error {
	r := bufio.NewReader(from)
	for {
		line, err := r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		c := command{outcome: ambiguous}
		switch line[0] {
		case 'i':
			_, err = fmt.Sscanf(line, "i %s %s %d %d\n", &c.ID, &c.Stream, &c.N, &c.Amount)
			all[c.ID] = &c
		case 'o':
			_, err = fmt.Sscanf(line, "o %s %c\n", &c.ID, &c.outcome)
			if was := all[c.ID]; was != nil {
				was.outcome = c.outcome
			} else if err == nil {
				err = errors.New("outcome without an intent")
			}
		default:
			err = errors.New("neither an intent nor an outcome")
		}
		if err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
	}
}
