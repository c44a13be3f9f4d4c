package main

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kinora-go/kinora/internal/pgtest"
)

// loser makes a proxy lose replies to commits: the server commits, but the client gets no reply.
type loser struct {
	// pick decides by a round trip's statements whether its reply is lost. It returns nil if not;
	// otherwise the counter to increase once the server confirms the commit.
	pick func(statements []string) *atomic.Int64
}

// requests are the statements that a client sent since it last waited for the server.
type requests struct {
	prepared   map[string]string // by name
	statements []string
}

// record records a client message and reports whether the client now waits for the server.
func (q *requests) record(kind byte, body []byte) (waits bool) {
	switch kind {
	case 'P':
		name, rest := cString(body)
		q.prepared[name], _ = cString(rest)
	case 'B':
		_, rest := cString(body)
		name, _ := cString(rest)
		q.statements = append(q.statements, q.prepared[name])
	case 'Q':
		sql, _ := cString(body)
		q.statements = append(q.statements, sql)
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

// serve forwards like proxyConn.copy, but message by message.
func (l *loser) serve(c *proxyConn) {
	var losing atomic.Pointer[atomic.Int64]
	var both sync.WaitGroup
	both.Go(func() {
		defer func() { _ = c.server.Close() }()
		q := requests{prepared: map[string]string{}}
		for first := true; ; first = false {
			kind, raw, err := pgtest.Message(c.client, first)
			if err != nil {
				return
			}
			if !first && q.record(kind, raw[5:]) {
				if len(q.statements) > 0 {
					if counts := l.pick(q.statements); counts != nil {
						losing.Store(counts)
					}
				}
				q.statements = nil
			}
			if _, err := c.server.Write(raw); err != nil {
				return
			}
		}
	})
	both.Go(func() {
		defer func() { _ = c.client.Close() }()
		l.replies(c.server, c.client, &losing)
	})
	both.Wait()
}

// replies forwards the server's messages until a reply is to be lost. Then it waits until the
// server has finished the request, and closes the connection.
func (*loser) replies(server, client net.Conn, losing *atomic.Pointer[atomic.Int64]) {
	for well := true; ; {
		kind, raw, err := pgtest.Message(server, false)
		if err != nil {
			return
		}
		counts := losing.Load()
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
