package pgtest

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// Proxy sits between a client and a server. It counts round trips and loses replies.
type Proxy struct {
	DSN   string // the server's connection string through the proxy
	lose  atomic.Pointer[func(kind byte, body []byte) bool]
	lost  atomic.Int64
	trips atomic.Int64
	fatal atomic.Bool
	mutes atomic.Int64
	away  atomic.Bool
	deaf  atomic.Bool
	conns sync.WaitGroup
	mu    sync.Mutex
	open  map[net.Conn]bool
}

// LoseReply makes the proxy lose the whole reply to the next message for which when returns true,
// and close the connection: the server executes the request, but the client gets no reply. It
// happens once.
func (p *Proxy) LoseReply(when func(kind byte, body []byte) bool) { p.lose.Store(&when) }

// AnswerFatal makes the proxy send FATAL 08P01 in place of lost replies, as a pooler does whose
// connection to the server broke.
func (p *Proxy) AnswerFatal() { p.fatal.Store(true) }

// Mute makes the existing connections half-open: the server's replies are lost from now on, and no
// side closes.
func (p *Proxy) Mute() { p.mutes.Add(1) }

// IgnoreCancels makes the proxy drop requests to cancel a statement. pgx sends one when it loses a
// connection.
func (p *Proxy) IgnoreCancels() { p.deaf.Store(true) }

const cancelCode = 80877102 // of a first message

// Away makes the server unreachable, or reachable again. Existing connections break, and new ones
// are closed.
func (p *Proxy) Away(away bool) {
	p.away.Store(away)
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		if away {
			_ = c.Close()
		}
	}
}

// keep records a client's connection until the returned function is called.
func (p *Proxy) keep(c net.Conn) func() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[c] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, c)
	}
}

// Lost returns the number of lost replies.
func (p *Proxy) Lost() int { return int(p.lost.Load()) }

// RoundTrips counts how often clients have waited for the server: their Sync and Query messages.
func (p *Proxy) RoundTrips() int { return int(p.trips.Load()) }

// NewProxy starts a proxy in front of the server of dsn, which must contain sslmode=disable.
func NewProxy(t testing.TB, dsn string) *Proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	server := u.Host
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.Host = l.Addr().String()
	p := &Proxy{DSN: u.String(), open: map[net.Conn]bool{}}
	p.conns.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.conns.Go(func() { p.serve(client, server) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); p.conns.Wait() })
	return p
}

func (p *Proxy) serve(client net.Conn, address string) {
	defer func() { _ = client.Close() }()
	defer p.keep(client)()
	if p.away.Load() {
		return
	}
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	var losing atomic.Bool // replies are lost from now on
	var both sync.WaitGroup
	both.Go(func() {
		defer func() { _ = server.Close() }()
		p.requests(client, server, &losing)
	})
	both.Go(func() {
		defer func() { _ = client.Close() }()
		p.replies(server, client, &losing)
	})
	both.Wait()
}

// requests forwards the client's messages. The first message has no kind byte.
func (p *Proxy) requests(client io.Reader, server io.Writer, losing *atomic.Bool) {
	for first := true; ; first = false {
		kind, raw, err := Message(client, first)
		if err != nil {
			return
		}
		if first && p.deaf.Load() && binary.BigEndian.Uint32(raw[4:]) == cancelCode {
			return
		}
		if kind == 'S' || kind == 'Q' {
			p.trips.Add(1)
		}
		if when := p.lose.Load(); when != nil && !first && (*when)(kind, raw[5:]) && p.lose.CompareAndSwap(when, nil) {
			losing.Store(true)
		}
		if _, err := server.Write(raw); err != nil {
			return
		}
	}
}

// replies forwards the server's messages until a reply is to be lost. Then it waits until the
// server is ready for the next request, so that this one is completed, and closes the connection.
func (p *Proxy) replies(server io.Reader, client io.Writer, losing *atomic.Bool) {
	for mutes := p.mutes.Load(); ; {
		kind, raw, err := Message(server, false)
		if err != nil {
			return
		}
		if p.mutes.Load() != mutes {
			continue
		}
		if losing.Load() {
			if kind == 'Z' {
				p.lost.Add(1)
				if p.fatal.Load() {
					fields := []byte("SFATAL\x00VFATAL\x00C08P01\x00Mserver conn crashed?\x00\x00")
					answer := binary.BigEndian.AppendUint32([]byte{'E'}, uint32(len(fields)+4))
					_, _ = client.Write(append(answer, fields...))
				}
				return
			}
			continue
		}
		if _, err := client.Write(raw); err != nil {
			return
		}
	}
}

// Message reads one protocol message. A client's first message has no kind byte.
func Message(r io.Reader, first bool) (kind byte, raw []byte, err error) {
	head := make([]byte, 5)
	if first {
		head = head[:4]
	}
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, nil, err
	}
	size := int(binary.BigEndian.Uint32(head[len(head)-4:])) - 4
	raw = append(head, make([]byte, size)...)
	if !first {
		kind = head[0]
	}
	_, err = io.ReadFull(r, raw[len(head):])
	return kind, raw, err
}
