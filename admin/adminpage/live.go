package adminpage

import (
	"bytes"
	"net/http"
	"strings"
	"time"
)

const (
	maxStreams = 16              // live pages at the same time; others can be reloaded
	liveEvery  = 2 * time.Second // how often a live page is read
	liveFor    = time.Minute     // then the browser connects again
	liveWrite  = 10 * time.Second

	refusedEvery = time.Minute // between two lines about refused pages
)

// live sends the live part of a page as server-sent events, when it has changed. It ends with Run, so that
// a server can shut down.
func (h *Handler) live(w http.ResponseWriter, r *http.Request, v viewer, read pageFunc) {
	select {
	case h.streams <- struct{}{}:
		defer func() { <-h.streams }()
	default:
		w.Header().Set("Retry-After", "60")
		if at, last := now().UnixNano(), h.refused.Load(); at-last >= int64(refusedEvery) && h.refused.CompareAndSwap(last, at) {
			h.cfg.Logger.Warn("live page refused: too many are open", "open", maxStreams)
		}
		h.fail(w, r, v, problem{http.StatusServiceUnavailable, "Too many live pages are open."})
		return
	}
	page, err := h.read(r, v, read)
	if err != nil {
		h.fail(w, r, v, err)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	conn := http.NewResponseController(w)
	send := func(event string) bool {
		_ = conn.SetWriteDeadline(now().Add(liveWrite)) // a wrapped writer may have no deadline
		_, err := w.Write([]byte(event))
		return err == nil && conn.Flush() == nil
	}
	tick, end := time.NewTicker(liveEvery), time.After(liveFor)
	defer tick.Stop()
	if !send("retry: 1000\n\n") {
		return
	}
	for last := ""; ; {
		if err == nil {
			var text bytes.Buffer
			if templates.ExecuteTemplate(&text, "update", page) != nil {
				return
			}
			event := "data: " + strings.ReplaceAll(strings.ReplaceAll(text.String(), "\r", " "), "\n", "\ndata: ") + "\n\n"
			if event == last {
				event = ": nothing new\n\n"
			} else {
				last = event
			}
			if !send(event) {
				return
			}
		}
		select {
		case <-tick.C:
		case <-end:
			return
		case <-h.ended:
			return
		case <-r.Context().Done():
			return
		}
		page, err = h.read(r, v, read) // the page stays as it is while the database does not answer
	}
}
