package redis_test

import (
	"bytes"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// proxy is a network between a client and a server. It can lose the reply to an EXEC or a script that the
// server has executed.
type proxy struct {
	addr   string
	server string
	mu     sync.Mutex
	lose   func(client net.Conn) // called once instead of forwarding the reply to an EXEC
	conns  []net.Conn
	all    sync.WaitGroup
}

func newProxy(t testing.TB, server string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{addr: l.Addr().String(), server: server}
	p.all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.all.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.mu.Lock()
		for _, c := range p.conns {
			_ = c.Close()
		}
		p.mu.Unlock()
		p.all.Wait()
	})
	return p
}

// loseReply loses the reply to the next EXEC: it calls how with the client's connection.
func (p *proxy) loseReply(how func(client net.Conn)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = how
}

// lost returns the function that loses the reply to request, once.
func (p *proxy) lost(request []byte) func(net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	request = bytes.ToLower(request)
	if p.lose == nil || !bytes.Contains(request, []byte("exec\r\n")) && !bytes.Contains(request, []byte("evalsha\r\n")) {
		return nil
	}
	how := p.lose
	p.lose = nil
	return how
}

// serve forwards requests and replies, one at a time. Those of the tests are shorter than its
// buffer.
func (p *proxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		_ = client.Close()
		return
	}
	defer server.Close()
	p.mu.Lock()
	p.conns = append(p.conns, client)
	p.mu.Unlock()
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		how := p.lost(buf[:n])
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
		if n, err = server.Read(buf); err != nil {
			_ = client.Close()
			return
		}
		if how != nil {
			how(client)
			continue
		}
		if _, err := client.Write(buf[:n]); err != nil {
			return
		}
	}
}
