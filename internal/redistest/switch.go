package redistest

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Switch is an address that leads to one server at a time, as a DNS name or a virtual IP address
// does that follows the master.
type Switch struct {
	URL    string
	Addr   string // of URL
	mu     sync.Mutex
	server string
	conns  map[net.Conn]bool
	all    sync.WaitGroup
}

// NewSwitch returns an address that leads to s until To is called.
func NewSwitch(t testing.TB, s *Server) *Switch {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	w := &Switch{URL: "redis://" + addr + "/0", Addr: addr, server: s.Addr, conns: map[net.Conn]bool{}}
	w.all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.all.Go(func() { w.serve(c) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); w.To(nil); w.all.Wait() })
	return w
}

// To breaks all connections and leads new ones to s. With nil, new connections are closed.
func (w *Switch) To(s *Server) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.server = ""
	if s != nil {
		w.server = s.Addr
	}
	for c := range w.conns {
		_ = c.Close()
	}
}

// serve forwards requests and replies until one side closes.
func (w *Switch) serve(client net.Conn) {
	defer func() { _ = client.Close() }()
	server := w.dial(client)
	if server == nil {
		return
	}
	defer w.drop(client)
	var both sync.WaitGroup
	for to, from := range map[net.Conn]net.Conn{client: server, server: client} {
		both.Go(func() {
			_, _ = io.Copy(to, from)
			_ = to.Close()
		})
	}
	both.Wait()
}

// dial returns a connection to the server, or nil if there is none. It records the client's.
func (w *Switch) dial(client net.Conn) net.Conn {
	w.mu.Lock()
	addr := w.server
	w.mu.Unlock()
	server, err := net.Dial("tcp", addr)
	if err != nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.server != addr {
		_ = server.Close()
		return nil
	}
	w.conns[client] = true
	return server
}

func (w *Switch) drop(client net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, client)
}
