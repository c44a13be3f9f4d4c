package main

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// proxy sits between children and the server and disturbs the network in both directions.
type proxy struct {
	dsn    string // the server's address through the proxy
	server string
	listen net.Listener
	all    sync.WaitGroup
	delay  atomic.Int64 // upper bound of the delay of received bytes
	slices atomic.Bool  // forward received bytes in small slices
	serve  func(c *proxyConn)

	mu    sync.Mutex
	open  []*proxyConn
	ended bool
}

// proxyConn is one connection through the proxy.
type proxyConn struct {
	*proxy
	client, server net.Conn
	mute           atomic.Bool // half-open: nothing is forwarded, and neither side is closed
}

// through starts a proxy in front of the cell's database. serve forwards the bytes of a connection;
// nil means proxyConn.copy.
func (r *run) through(serve func(c *proxyConn)) *proxy {
	u, err := url.Parse(r.dsn)
	r.must(err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	p := &proxy{server: u.Host, listen: l, serve: serve}
	if serve == nil {
		p.serve = (*proxyConn).copy
	}
	u.Host = l.Addr().String()
	p.dsn = u.String()
	p.all.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.all.Go(func() { p.cross(client) })
		}
	})
	r.cleanup = append(r.cleanup, p.close)
	return p
}

func (p *proxy) close() {
	_ = p.listen.Close()
	p.mu.Lock()
	p.ended = true
	for _, c := range p.open {
		c.reset()
	}
	p.mu.Unlock()
	p.all.Wait()
}

func (p *proxy) cross(client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	c := &proxyConn{proxy: p, client: client, server: server}
	p.mu.Lock()
	if p.open = append(p.open, c); p.ended {
		c.reset()
	}
	p.mu.Unlock()
	p.serve(c)
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.open {
		if other == c {
			p.open = append(p.open[:i], p.open[i+1:]...)
			return
		}
	}
}

// some returns the n-th connection, modulo their number, or nil if there is none.
func (p *proxy) some(n int) *proxyConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.open) == 0 {
		return nil
	}
	return p.open[n%len(p.open)]
}

// reset breaks both connections at once, so that both peers get an RST instead of an end of file.
func (c *proxyConn) reset() {
	for _, conn := range []net.Conn{c.client, c.server} {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = conn.Close()
	}
}

// halfOpen stops forwarding and resets the connection after while, as TCP_USER_TIMEOUT or
// keep-alives would. Zero means that it stays half-open.
func (c *proxyConn) halfOpen(while time.Duration) {
	c.mute.Store(true)
	if while > 0 {
		time.AfterFunc(while, c.reset)
	}
}

// copy forwards bytes without interpreting them.
func (c *proxyConn) copy() {
	var both sync.WaitGroup
	both.Go(func() { c.pass(c.client, c.server) })
	both.Go(func() { c.pass(c.server, c.client) })
	both.Wait()
}

// pass forwards what one side sends. When that side closes, pass closes the other, unless the
// connection is half-open.
func (c *proxyConn) pass(from, to net.Conn) {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		if !c.mute.Load() && n > 0 {
			err = errors.Join(err, c.write(to, buffer[:n]))
		}
		if err != nil {
			if from == c.client || !c.mute.Load() {
				_ = to.Close()
			}
			return
		}
	}
}

// write writes with the current delay and slicing.
func (c *proxyConn) write(to net.Conn, b []byte) error {
	if most := c.delay.Load(); most > 0 {
		time.Sleep(time.Duration(rand.Int64N(most)))
	}
	for len(b) > 0 {
		n := len(b)
		if c.slices.Load() {
			n = min(n, 1+rand.IntN(200))
		}
		if _, err := to.Write(b[:n]); err != nil {
			return err
		}
		if b = b[n:]; len(b) > 0 && rand.IntN(8) == 0 {
			time.Sleep(50 * time.Microsecond) // so that the kernel does not join the slices again
		}
	}
	return nil
}
