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

// proxy stands between children and the server, and makes a bad network of the way there and back.
type proxy struct {
	dsn    string // the server's, through the proxy
	server string
	listen net.Listener
	all    sync.WaitGroup
	delay  atomic.Int64 // how long what arrives may wait, at most
	slices atomic.Bool  // what arrives goes on in small pieces
	serve  func(c *crossing)

	mu    sync.Mutex
	open  []*crossing
	ended bool
}

// crossing is one connection through it.
type crossing struct {
	*proxy
	client, server net.Conn
	mute           atomic.Bool // half-open: nothing gets through, and nobody hangs up
}

// through makes a proxy before the cell's database. serve, if it is not nil, passes on what is said in a crossing.
func (r *run) through(serve func(c *crossing)) *proxy {
	u, err := url.Parse(r.dsn)
	r.must(err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	p := &proxy{server: u.Host, listen: l, serve: serve}
	if serve == nil {
		p.serve = (*crossing).copy
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
	c := &crossing{proxy: p, client: client, server: server}
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

// some is one crossing in the order of n, and nil where there is none.
func (p *proxy) some(n int) *crossing {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.open) == 0 {
		return nil
	}
	return p.open[n%len(p.open)]
}

// reset breaks both connections at once, so that peers get an RST and no end of file.
func (c *crossing) reset() {
	for _, conn := range []net.Conn{c.client, c.server} {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = conn.Close()
	}
}

// halfOpen makes it one that nothing comes through any more. Whoever has set TCP_USER_TIMEOUT, or keep-alives, hears of
// it after a while; a while of zero is never.
func (c *crossing) halfOpen(while time.Duration) {
	c.mute.Store(true)
	if while > 0 {
		time.AfterFunc(while, c.reset)
	}
}

// copy passes on bytes, whatever they mean.
func (c *crossing) copy() {
	var both sync.WaitGroup
	both.Go(func() { c.pass(c.client, c.server) })
	both.Go(func() { c.pass(c.server, c.client) })
	both.Wait()
}

// pass passes on what one side says. When it hangs up, so does the other, unless nothing gets through.
func (c *crossing) pass(from, to net.Conn) {
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

// write writes in the weather that there is.
func (c *crossing) write(to net.Conn, b []byte) error {
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
			time.Sleep(50 * time.Microsecond) // the kernel is not to put the pieces together again
		}
	}
	return nil
}
