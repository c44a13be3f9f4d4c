package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/kinora-go/kinora/task"
)

// outside are the systems that tasks call, and the audit sink. They are an HTTP server of the suite,
// so no fault ends them. Their log of calls, by key, is what the oracle judges by.
//
// A system that knows keys does the same thing once for a key, however often it is called. Here each
// call of a key gets another reference, so that the oracle notices if a task uses the result of a
// call that is not the one it recorded.
type outside struct {
	url    string
	server *http.Server
	all    sync.WaitGroup

	mu    sync.Mutex
	asked map[string]int // calls by key, those that had no effect included
	done  map[string]int // effects of a system that does not know keys, by key
	// trouble decides what a call meets. n is the number of the call among those of its key, from 1.
	trouble func(system, key string, n int) trouble
	// after, if not nil, runs in a goroutine of its own after a call took effect.
	after   func(system, key, ref string)
	delay   time.Duration       // of replies
	records map[string][]string // of the audit sink: how a task ended, by task
	sink    bool                // the audit sink is down
	refused map[string]int      // records that the sink refused, by task
}

// trouble is what a call meets.
type trouble int

const (
	works    trouble = iota
	fails            // no effect, and an error
	loses            // the effect, and no reply
	hangs            // the effect, and no reply before the caller's timeout
	isDown           // no connection
	declines         // no effect, and an error that no retry helps against
)

// systems starts the systems outside.
func (r *run) systems() *outside {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	o := &outside{
		url: "http://" + l.Addr().String(), asked: map[string]int{}, done: map[string]int{}, records: map[string][]string{}, refused: map[string]int{},
		trouble: func(string, string, int) trouble { return works },
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /call/{system}", o.call)
	mux.HandleFunc("POST /audit", o.audit)
	o.server = &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	o.all.Go(func() { _ = o.server.Serve(l) })
	r.cleanup = append(r.cleanup, func() { _ = o.server.Close(); o.all.Wait() })
	r.control = func() (wrong, byFault int) {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.control()
	}
	return o
}

// control counts the keys that were called more than once, and the calls in excess: what they would have done in a system
// that does not know keys.
func (o *outside) control() (wrong, byFault int) {
	for _, times := range o.done {
		if times > 1 {
			wrong++
			byFault += times - 1
		}
	}
	return wrong, byFault
}

func (o *outside) call(w http.ResponseWriter, q *http.Request) {
	system, key := q.PathValue("system"), q.FormValue("key")
	o.mu.Lock()
	o.asked[key]++
	t := o.trouble(system, key, o.asked[key])
	ref := ""
	if t == works || t == loses || t == hangs {
		o.done[key]++
		ref = fmt.Sprintf("%s#%d", key, o.done[key])
	}
	after, delay := o.after, o.delay
	o.mu.Unlock()
	time.Sleep(delay)
	if ref != "" && after != nil {
		o.all.Go(func() { after(system, key, ref) })
	}
	switch t {
	case works:
		_, _ = io.WriteString(w, ref)
	case hangs:
		<-q.Context().Done()
	case fails:
		w.WriteHeader(http.StatusInternalServerError)
	case declines:
		w.WriteHeader(http.StatusGone)
	case loses, isDown:
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			_ = conn.Close()
		}
	}
}

func (o *outside) audit(w http.ResponseWriter, q *http.Request) {
	var rec task.Record
	if err := json.NewDecoder(q.Body).Decode(&rec); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sink {
		o.refused[rec.Task]++
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	if rec.Task == "" { // the end of a group
		return
	}
	o.records[rec.Task] = append(o.records[rec.Task], rec.What)
}

// mostRefused returns how often the sink refused the record that it refused most often.
func (o *outside) mostRefused() (most int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, times := range o.refused {
		most = max(most, times)
	}
	return most
}

// set changes the systems while they are called.
func (o *outside) set(change func(o *outside)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(o)
}

var errDeclined = errors.New("the system declines the call")

// call calls a system outside, and returns its reference.
func (w *work) call(ctx context.Context, system, key string) (string, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, w.More["outside"]+"/call/"+system+"?key="+url.QueryEscape(key), nil)
	if err != nil {
		return "", err
	}
	res, err := w.http.Do(q)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return "", err
	case res.StatusCode == http.StatusGone:
		return "", task.Permanent(errDeclined)
	case res.StatusCode != http.StatusOK:
		return "", fmt.Errorf("%s: %s", system, res.Status)
	}
	return string(text), nil
}

// sink is the audit sink of a worker.
type sink struct{ *work }

// Append implements task.AuditSink.
func (s sink) Append(ctx context.Context, rec task.Record) error {
	text, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, s.More["outside"]+"/audit", bytes.NewReader(text))
	if err != nil {
		return err
	}
	res, err := s.http.Do(q)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("sink: %s", res.Status)
	}
	return nil
}
