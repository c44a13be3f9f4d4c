package main

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kinora-go/kinora/internal/pgtest"
)

// loser makes a proxy lose replies to what commits: the server has carried it out, and the client does not hear.
type loser struct {
	// pick returns nil, or if the reply to this round trip of these statements is to be lost, what counts that once the server
	// says that it has committed.
	pick func(said []string) *atomic.Int64
}

// requests is what a client has said since it last waited for the server.
type requests struct {
	prepared map[string]string // by name
	said     []string
}

// hear takes note of a message, and tells whether the client waits for the server now.
func (q *requests) hear(kind byte, body []byte) (waits bool) {
	switch kind {
	case 'P':
		name, rest := cString(body)
		q.prepared[name], _ = cString(rest)
	case 'B':
		_, rest := cString(body)
		name, _ := cString(rest)
		q.said = append(q.said, q.prepared[name])
	case 'Q':
		sql, _ := cString(body)
		q.said = append(q.said, sql)
		return true
	case 'S':
		return true
	}
	return false
}

func cString(b []byte) (text string, rest []byte) {
	text, more, _ := strings.Cut(string(b), "\x00")
	return text, []byte(more)
}

// serve is copy, by message.
func (l *loser) serve(c *crossing) {
	var deaf atomic.Pointer[atomic.Int64]
	var both sync.WaitGroup
	both.Go(func() {
		defer func() { _ = c.server.Close() }()
		q := requests{prepared: map[string]string{}}
		for first := true; ; first = false {
			kind, raw, err := pgtest.Message(c.client, first)
			if err != nil {
				return
			}
			if !first && q.hear(kind, raw[5:]) {
				if len(q.said) > 0 {
					if counts := l.pick(q.said); counts != nil {
						deaf.Store(counts)
					}
				}
				q.said = nil
			}
			if _, err := c.server.Write(raw); err != nil {
				return
			}
		}
	})
	both.Go(func() {
		defer func() { _ = c.client.Close() }()
		l.replies(c.server, c.client, &deaf)
	})
	both.Wait()
}

// replies passes on what the server says, until that is to be lost: then it waits until the server has done what it was
// asked for, and hangs up.
func (*loser) replies(server, client net.Conn, deaf *atomic.Pointer[atomic.Int64]) {
	for well := true; ; {
		kind, raw, err := pgtest.Message(server, false)
		if err != nil {
			return
		}
		counts := deaf.Load()
		if counts == nil {
			if _, err := client.Write(raw); err != nil {
				return
			}
			continue
		}
		well = well && kind != 'E'
		if kind != 'Z' {
			continue
		}
		if well && raw[5] == 'I' {
			counts.Add(1)
		}
		return
	}
}
