package adminpage

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const (
	sampleEvery = 10 * time.Second
	samplesKept = time.Hour
	factsKept   = time.Second     // facts that are younger are shared by pages
	doctorKept  = 5 * time.Second // findings that are older are shown, and are read again for the next page
	doctorShown = 3 * sampleEvery // findings that are older are not shown: the page waits for new ones
)

// state is what pages share.
type state struct {
	facts   shared[*admin.Facts]
	doctor  shared[provider.Diagnosis]
	mu      sync.Mutex
	samples []sample
	told    map[string]string // the notices of acts, by token
	tokens  []string          // of told, the oldest first
}

// sample is a point of the plots.
type sample struct {
	at     time.Time
	head   int64   // of the log
	lag    float64 // seconds, of the live generation that lags most
	parked int64
	open   int64 // entries
}

// shared is a value that one reader at a time renews.
type shared[T any] struct {
	turn  chan struct{} // has a place for who renews it
	mu    sync.Mutex
	value T
	read  time.Time
}

// last returns the value, and how old it is: hundreds of years if there is none yet.
func (s *shared[T]) last() (value T, age time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value, now().Sub(s.read)
}

// renewed sets the value, if renew returns no error. The caller has the turn.
func (s *shared[T]) renewed(ctx context.Context, renew func(context.Context) (T, error)) (value T, err error) {
	if value, err = renew(ctx); err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.value, s.read = value, now()
	}
	return value, err
}

// get returns a value that is younger than age.
func (s *shared[T]) get(ctx context.Context, age time.Duration, renew func(context.Context) (T, error)) (value T, err error) {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return value, ctx.Err()
	}
	defer func() { <-s.turn }()
	if value, is := s.last(); is < age {
		return value, nil
	}
	return s.renewed(ctx, renew)
}

// soon returns a value that is younger than most, as get does. One that is not younger than age is renewed for the next call.
func (s *shared[T]) soon(ctx context.Context, age, most time.Duration, renew func(context.Context) (T, error)) (T, error) {
	value, is := s.last()
	if is >= most {
		return s.get(ctx, most, renew)
	}
	if is >= age {
		select {
		case s.turn <- struct{}{}:
			go func() {
				defer func() { <-s.turn }()
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readLimit)
				defer cancel()
				_, _ = s.renewed(ctx, renew) // an error shows when the value is too old
			}()
		default: // it is being renewed
		}
	}
	return value, nil
}

func now() time.Time { return time.Now() } //nolint:forbidigo // not compared with the store's times

// facts returns the state of the service, which callers must not change.
func (h *Handler) facts(ctx context.Context) (*admin.Facts, error) {
	return h.state.facts.get(ctx, factsKept, func(ctx context.Context) (*admin.Facts, error) {
		f, err := h.ops.Facts(ctx)
		if err == nil {
			h.state.add(sampleOf(f))
		}
		return f, err
	})
}

func (h *Handler) diagnose(ctx context.Context) (provider.Diagnosis, error) {
	return h.ops.Doctor(ctx, h.cfg.Limits)
}

// Run reads the state for the plots and the findings every ten seconds, until ctx ends. It runs once.
func (h *Handler) Run(ctx context.Context) error {
	select {
	case <-h.running:
		return fmt.Errorf("page: Run called twice")
	default:
		close(h.running)
	}
	defer close(h.ended)
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for failed := false; ; {
		err := h.look(ctx)
		if err != nil && !failed && ctx.Err() == nil {
			h.cfg.Logger.Warn("page: state not read", "err", errclass.Of(err))
		}
		failed = err != nil
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (h *Handler) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	if _, err := h.facts(ctx); err != nil {
		return err
	}
	_, err := h.state.doctor.get(ctx, sampleEvery, h.diagnose)
	return err
}

// Running is closed once Run has started.
func (h *Handler) Running() <-chan struct{} { return h.running }

func sampleOf(f *admin.Facts) sample {
	one := sample{at: f.At, head: f.Log.Head}
	for _, p := range f.Projectors {
		one.parked += p.Parked.N
		if p.State == "live" {
			one.lag = max(one.lag, p.LagSeconds)
		}
	}
	for _, e := range f.Outbox {
		one.open += e.N
	}
	return one
}

// add adds a sample, unless there is one of the last seconds.
func (s *state) add(one sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.samples); n > 0 && one.at.Sub(s.samples[n-1].at) < sampleEvery*9/10 {
		return
	}
	s.samples = append(s.samples, one)
	for len(s.samples) > 0 && one.at.Sub(s.samples[0].at) > samplesKept || len(s.samples) > int(samplesKept/sampleEvery)+1 {
		s.samples = s.samples[1:]
	}
}

// open returns the number of entries that are not published.
func open(f *admin.Facts, of ...outbox.Status) (n provider.Count) {
	for _, e := range f.Outbox {
		if slices.Contains(of, e.Status) {
			n.N, n.AtLeast = n.N+e.N, n.AtLeast || e.AtLeast
		}
	}
	return n
}

// plot is a quantity in the last hour, or since the first sample.
type plot struct {
	Title, Now, Most string
	Since            string
	Lines            []string // of points; there is more than one if samples are missing between them
}

const plotWidth, plotHeight = 360.0, 64.0

// plots draws the samples of the hour before last, which is the last point.
func (s *state) plots(last sample) []plot {
	s.mu.Lock()
	samples := slices.Clone(s.samples)
	s.mu.Unlock()
	end := last.at
	if n := len(samples); n > 0 && samples[n-1].at.Before(end) {
		samples = append(samples, last)
	}
	whole := func(v float64) string { return digits(int64(v + .5)) }
	return []plot{
		draw("Appended per second", samples, end, func(v float64) string {
			if v < 10 {
				return fmt.Sprintf("%.1f", v)
			}
			return whole(v)
		}, func(before, is sample) (float64, bool) {
			seconds := is.at.Sub(before.at).Seconds()
			return max(float64(is.head-before.head), 0) / seconds, !before.at.IsZero() && seconds >= 1 && seconds < 5*sampleEvery.Seconds()
		}),
		draw("Lag of projectors", samples, end, func(v float64) string { return span(time.Duration(v * float64(time.Second))) },
			func(_, is sample) (float64, bool) { return is.lag, true }),
		draw("Parked messages", samples, end, whole, func(_, is sample) (float64, bool) { return float64(is.parked), true }),
		draw("Entries not published", samples, end, whole, func(_, is sample) (float64, bool) { return float64(is.open), true }),
	}
}

func draw(title string, samples []sample, end time.Time, say func(float64) string, value func(before, is sample) (float64, bool)) plot {
	type point struct {
		x, y float64
		gap  bool // samples are missing before it
	}
	var points []point
	most := 0.0
	whole := 2 * time.Minute // of the axis
	if len(samples) > 0 {
		whole = min(max(whole, end.Sub(samples[0].at)), samplesKept)
	}
	for i, is := range samples {
		var before sample
		if i > 0 {
			before = samples[i-1]
		}
		v, ok := value(before, is)
		x := plotWidth * (1 - end.Sub(is.at).Seconds()/whole.Seconds())
		if !ok || x < 0 {
			continue
		}
		most = max(most, v)
		points = append(points, point{x, v, i == 0 || is.at.Sub(before.at) > 5*sampleEvery})
	}
	p := plot{Title: title, Now: "–", Most: say(most), Since: span(whole) + " ago"}
	var line strings.Builder
	flush := func() {
		if line.Len() > 0 {
			p.Lines = append(p.Lines, strings.TrimSpace(line.String()))
			line.Reset()
		}
	}
	for _, at := range points {
		if at.gap {
			flush()
		}
		y := plotHeight - 1
		if most > 0 {
			y -= at.y / most * (plotHeight - 4)
		}
		if line.Len() == 0 { // a single point is visible too
			fmt.Fprintf(&line, "%.1f,%.1f ", max(at.x-1, 0), y)
		}
		fmt.Fprintf(&line, "%.1f,%.1f ", at.x, y)
	}
	flush()
	if n := len(points); n > 0 {
		p.Now = say(points[n-1].y)
	}
	return p
}
