// Command plot draws the series in bench/results.json as SVG. Lines whose names end in "=" and a
// number are the points of one series.
//
//	go run ./plot -in results.json -out ../docs/plots
package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

type result struct {
	Name              string
	Unit              string
	Ours, Peer, Limit float64
	PeerName          string `json:"peer_name"`
}

type point struct{ x, y float64 }

// curve is one series in a plot.
type curve struct {
	name, color string
	points      []point
}

func main() {
	in := flag.String("in", "results.json", "results that bench wrote")
	out := flag.String("out", "../docs/plots", "directory for the plots")
	flag.Parse()
	if err := run(*in, *out); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(in, out string) error {
	text, err := os.ReadFile(in)
	if err != nil {
		return err
	}
	var report struct{ Results []result }
	if err := json.Unmarshal(text, &report); err != nil {
		return fmt.Errorf("read %s: %w", in, err)
	}
	series := map[string][]result{}
	var names []string
	for _, r := range report.Results {
		name, _, ok := strings.Cut(r.Name, "=")
		if !ok {
			continue
		}
		if series[name] == nil {
			names = append(names, name)
		}
		series[name] = append(series[name], r)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	for _, name := range names {
		svg, err := draw(name, series[name])
		if err != nil {
			return err
		}
		file := filepath.Join(out, strings.NewReplacer("/", "-", " ", "-").Replace(name)+".svg")
		if err := os.WriteFile(file, []byte(svg), 0o644); err != nil {
			return err
		}
		fmt.Println(file)
	}
	return nil
}

func curves(rs []result) ([]curve, error) {
	all := []curve{{name: "Kinora", color: "#a4410e"}, {color: "#3465a4"}, {name: "hand-written limit", color: "#777"}}
	for _, r := range rs {
		_, text, _ := strings.Cut(r.Name, "=")
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.Name, err)
		}
		all[1].name = cmp.Or(r.PeerName, all[1].name)
		for i, y := range []float64{r.Ours, r.Peer, r.Limit} {
			if y > 0 {
				all[i].points = append(all[i].points, point{x, y})
			}
		}
	}
	return slices.DeleteFunc(all, func(c curve) bool { return len(c.points) == 0 }), nil
}

const (
	width, height                    = 640, 360
	left, right, top, bottom         = 70, 20, 40, 50
	plotWidth, plotHeight    float64 = width - left - right, height - top - bottom
)

// draw draws a plot with a logarithmic x axis and a y axis that starts at 0.
func draw(name string, rs []result) (string, error) {
	all, err := curves(rs)
	if err != nil {
		return "", err
	}
	minX, maxX, maxY := math.Inf(1), 0.0, 0.0
	for _, c := range all {
		for _, p := range c.points {
			minX, maxX, maxY = min(minX, p.x), max(maxX, p.x), max(maxY, p.y)
		}
	}
	step := math.Pow(10, math.Floor(math.Log10(maxY)))
	if maxY/step < 3 {
		step /= 5
	}
	maxY = math.Ceil(maxY/step) * step
	at := func(p point) (x, y float64) {
		span := math.Log(maxX) - math.Log(minX)
		if span == 0 {
			span = 1
		}
		return left + plotWidth*(math.Log(p.x)-math.Log(minX))/span, top + plotHeight*(1-p.y/maxY)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	_, axis, _ := strings.Cut(name, "/")
	fmt.Fprintf(&b, `<text x="%d" y="20" font-size="14">%s, against %s</text>`+"\n", left, rs[0].Unit, axis)
	for y := 0.0; y <= maxY; y += step {
		_, py := at(point{minX, y})
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			left, width-right, py, py, left-6, py+4, short(y))
	}
	marked := map[float64]bool{}
	for ci, c := range all {
		var line []string
		for _, p := range c.points {
			x, y := at(p)
			line = append(line, fmt.Sprintf("%.1f,%.1f", x, y))
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x, y, c.color)
			if !marked[p.x] {
				marked[p.x] = true
				fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", x, height-bottom+18, short(p.x))
			}
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(line, " "), c.color)
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", left+ci*190, height-10, c.color, c.name)
	}
	b.WriteString("</svg>\n")
	return b.String(), nil
}

func short(n float64) string {
	switch {
	case n >= 1e6:
		return strconv.FormatFloat(n/1e6, 'g', 3, 64) + "M"
	case n >= 1e3:
		return strconv.FormatFloat(n/1e3, 'g', 3, 64) + "k"
	}
	return strconv.FormatFloat(n, 'g', 3, 64)
}
