package main

import (
	"bufio"
	"encoding/gob"
	"net"
	"sync"
)

// verb is the kind of a packet.
type verb byte

const (
	hello     verb = iota + 1 // the client's name
	publish                   // letters for a topic; the broker replies
	published                 // the broker's reply to publish
	subscribe                 // to a topic, in a group
	deliver                   // a letter with its delivery number
	done                      // acked deliveries
)

// packet is the unit of communication between the broker and children.
type packet struct {
	Verb    verb
	Name    string
	Topic   string
	Group   string
	Numbers []int64
	Letters []letter
}

// letter is a message.
type letter struct {
	ID      string
	Payload []byte
	Meta    map[string]string
}

// link is one end of a connection. A goroutine writes its packets in order, so send never blocks on
// the peer.
type link struct {
	conn  net.Conn
	in    *gob.Decoder
	mu    sync.Mutex
	queue []packet
	wake  chan struct{}
	gone  chan struct{}
	once  sync.Once
}

func newLink(c net.Conn) *link {
	l := &link{conn: c, in: gob.NewDecoder(bufio.NewReaderSize(c, 64<<10)), wake: make(chan struct{}, 1), gone: make(chan struct{})}
	go l.write()
	return l
}

// read reads the next packet.
func (l *link) read() (p packet, err error) {
	err = l.in.Decode(&p)
	return p, err
}

func (l *link) send(p packet) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, p)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *link) write() {
	out := bufio.NewWriterSize(l.conn, 64<<10)
	enc := gob.NewEncoder(out)
	for {
		select {
		case <-l.wake:
		case <-l.gone:
			return
		}
		l.mu.Lock()
		queue := l.queue
		l.queue = nil
		l.mu.Unlock()
		for _, p := range queue {
			if enc.Encode(p) != nil {
				l.close()
				return
			}
		}
		if out.Flush() != nil {
			l.close()
			return
		}
	}
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.gone)
		_ = l.conn.Close()
	})
}
