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

// outcome is what a producer was told about a command.
type outcome byte

const (
	ambiguous outcome = '?' // nobody knows; so it is also where no outcome is written down
	acked     outcome = 'a'
	rejected  outcome = 'r'
)

// command is what a producer wanted: the n-th of a stream.
type command struct {
	ID      string
	Stream  string
	N       int
	Amount  int64
	outcome outcome
}

// ledger is a producer's account, outside of the database. Intents are on disk before their commands begin; an outcome
// counts once it is.
type ledger struct {
	file *os.File
	mu   sync.Mutex
	next *page
	kick chan struct{}
}

// page is lines that are synced together.
type page struct {
	lines  []byte
	synced chan struct{}
}

func newPage() *page { return &page{synced: make(chan struct{})} }

// openLedger begins one: each life of a producer has its own, since the last line of the one before may be torn.
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

// close returns when all that was added is on disk.
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

// write writes page after page, and whatever comes meanwhile into the next one.
func (l *ledger) write() {
	for range l.kick {
		l.mu.Lock()
		p := l.next
		l.next = newPage()
		l.mu.Unlock()
		_, err := l.file.Write(p.lines)
		if err = errors.Join(err, l.file.Sync()); err != nil {
			fmt.Fprintln(os.Stderr, "the ledger:", err) // without it nothing that happens here counts
			os.Exit(1)
		}
		close(p.synced)
	}
}

// readLedgers reads those of all producers and lives.
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

// readLedger adds what it reads to all. A last line that is torn was never acted upon.
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
				err = errors.New("an outcome without an intent")
			}
		default:
			err = errors.New("neither intent nor outcome")
		}
		if err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
	}
}
