package adminpage

import (
	"fmt"
	"strings"
	"time"
)

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
	samples := append([]sample(nil), s.samples...)
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
