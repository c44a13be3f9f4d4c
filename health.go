package kinora

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"time"
)

// defaultLate is how late a loop may be. It is longer than publishers usually wait for a broker.
const defaultLate = time.Minute

// LoopState is a loop of a service, as the body of Healthy has it.
type LoopState struct {
	Name string  `json:"name"`         // such as "relay", "projector ratings", "handler ratings/posted"
	Late float64 `json:"late_seconds"` // for how long it should have moved; 0: it moves
	OK   bool    `json:"ok"`
}

// Healthy returns a handler for liveness probes: it replies 200 while the loops of the services move,
// and 503 if one is late for longer than late. Zero means 1m. Restart the process then: nothing else
// ends a call that does not return.
//   - A relay is late during a Publish call. The time of each call counts alone, so a slow broker is not late.
//   - A runner or a worker is late if a handler has not returned after the end of its context, and if
//     an observer does not return. A slow handler is not late, and a database that is down makes
//     nothing late.
//   - A service whose Run has returned an error is late.
//   - Other services are late if they have a method Late() map[string]time.Duration, as these have,
//     and it says so.
//
// The body is JSON: {"ok":true,"loops":[{"name":"relay","late_seconds":0,"ok":true}]}. It has names
// of projectors and handlers. A probe queries no database and never waits.
func Healthy(late time.Duration, services ...Service) http.Handler {
	if late <= 0 {
		late = defaultLate
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		all := map[string]time.Duration{}
		for _, s := range services {
			if s, ok := s.(interface {
				Late() map[string]time.Duration
			}); ok {
				for name, d := range s.Late() {
					all[name] = max(all[name], d)
				}
			}
		}
		body := struct {
			OK    bool        `json:"ok"`
			Loops []LoopState `json:"loops"`
		}{true, []LoopState{}}
		for _, name := range slices.Sorted(maps.Keys(all)) {
			one := LoopState{Name: name, Late: all[name].Seconds(), OK: all[name] <= late}
			body.Loops, body.OK = append(body.Loops, one), body.OK && one.OK
		}
		reply(w, r, body.OK, body)
	})
}

// reply replies to a probe.
func reply(w http.ResponseWriter, r *http.Request, ok bool, body any) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(body) // an error means that the client is gone
}
