// Command bench compares Kinora with its peers and with hand-written limits: programs that do the
// same durable work on the same server with the fewest statements known. The programs run
// alternately on one fresh database of a private PostgreSQL with fsync and synchronous_commit on.
// The medians count, and only ratios within one run are meaningful.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/pgtest"
)

// line is one row of results: the rates of Kinora, a peer and the limit.
type line struct {
	name, unit, peerName string
	ours, peer, limit    program // peer and limit may be empty
}

// program is work and its preparation, which is not timed.
type program struct {
	prepare func(ctx context.Context) error // may be nil
	work    work
}

// work runs on the given bed until ctx ends or nothing is left to do, and returns how much it did.
type work func(ctx context.Context, b *bed) (done int64, err error)

// bed is the environment of the programs.
type bed struct {
	dsn     string
	pool    *pgxpool.Pool
	open    time.Duration // how long the transaction of an ageing snapshot stays open
	profile string        // directory for Kinora's CPU profiles; empty writes none
	data    string        // directory of the server's data
	redis   int           // process of Redis; 0 before it is started
	crowded int           // events of the schema with many
}

// result is a row of bench/results.json.
type result struct {
	Name     string  `json:"name"`
	Unit     string  `json:"unit"`
	Ours     float64 `json:"ours"`
	Peer     float64 `json:"peer,omitempty"`
	PeerName string  `json:"peer_name,omitempty"`
	Limit    float64 `json:"limit,omitempty"`
	VsPeer   float64 `json:"vs_peer,omitempty"`
	VsLimit  float64 `json:"vs_limit,omitempty"`
	Rounds   int     `json:"rounds"`
	Date     string  `json:"date,omitempty"`
	CPU      string  `json:"cpu,omitempty"`
}

type report struct {
	Machine  map[string]string `json:"machine"`
	Settings map[string]string `json:"settings"`
	Results  []result          `json:"results"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	only := flag.String("only", "", "run only lines whose name begins with this; the results of other lines are kept")
	rounds := flag.Int("rounds", 5, "rounds of each program, after one warm-up round")
	length := flag.Duration("length", 2*time.Second, "length of a round")
	open := flag.Duration("open", 10*time.Minute, "how long a transaction stays open before relay/beside-open-transaction and flat/old-snapshot")
	crowded := flag.Int("crowd", 10_000_000, "events of flat/crowd, with a tenth as many streams; needs 8 GB of disk")
	out := flag.String("out", "results.json", "file for the results")
	profile := flag.String("profile", "", "directory for CPU profiles of Kinora's last round of each line")
	flag.Parse()
	if err := run(ctx, *only, *rounds, *length, *open, *crowded, *out, *profile); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, rounds int, length, open time.Duration, crowded int, out, profile string) error {
	server, err := pgtest.Start("fsync=on", "full_page_writes=on", "synchronous_commit=on", "jit=on", "shared_buffers=512MB",
		"max_wal_size=4GB", "checkpoint_timeout=30min", "autovacuum_naptime=1min")
	if err != nil {
		return err
	}
	defer server.Stop()
	pool, err := pgxpool.New(ctx, server.DSN+"&pool_max_conns=16")
	if err != nil {
		return err
	}
	defer pool.Close()
	b := &bed{server.DSN, pool, open, profile, server.Dir, 0, crowded}
	r := report{Machine: machine(), Settings: map[string]string{"rounds": fmt.Sprint(rounds), "round": length.String()}}
	for _, name := range []string{"server_version", "fsync", "synchronous_commit", "shared_buffers", "full_page_writes"} {
		var v string
		if err := pool.QueryRow(ctx, "select current_setting($1)", name).Scan(&v); err != nil {
			return err
		}
		r.Settings[name] = v
	}
	lines, projected, tasked, err := allLines(ctx, b)
	if err != nil {
		return err
	}
	inRedis := newRedisBed(projected)
	defer inRedis.close()
	lines = append(lines, inRedis.lines()...)
	beds, err := newCrowdBeds(ctx, b)
	if err != nil {
		return err
	}
	lines = append(lines, beds.lines()...)
	for _, l := range lines {
		if !strings.HasPrefix(l.name, only) {
			continue
		}
		res, err := measure(ctx, b, l, rounds, length)
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, err)
		}
		r.Results = append(r.Results, res)
		// After each line, so that an interrupted run keeps its results.
		if err := r.write(out); err != nil {
			return err
		}
	}
	others, err := beds.others(ctx, only)
	if err != nil {
		return err
	}
	r.Results = append(r.Results, others...)
	if strings.HasPrefix("prune", only) {
		pruned, err := pruning(ctx, b)
		if err != nil {
			return err
		}
		r.Results = append(r.Results, pruned)
	}
	if strings.HasPrefix("rebuild/heap-1M", only) {
		heap, err := rebuildHeap(ctx, b, rounds)
		if err != nil {
			return err
		}
		r.Results = append(r.Results, heap)
	}
	for _, broker := range []bool{false, true} {
		if !strings.HasPrefix(besideName(broker), only) {
			continue
		}
		beside, err := besideRebuild(ctx, b, broker, rounds)
		if err != nil {
			return err
		}
		r.Results = append(r.Results, beside)
	}
	if strings.HasPrefix("task/timers-50k", only) {
		due, err := tasked.timers(ctx)
		if err != nil {
			return err
		}
		r.Results = append(r.Results, due)
	}
	if strings.HasPrefix("latency/append-to-visible", only) {
		seen, err := projected.visible(ctx, rounds)
		if err != nil {
			return err
		}
		r.Results = append(r.Results, seen)
	}
	if strings.HasPrefix("latency", only) {
		times, err := latencies(ctx, b)
		if err != nil {
			return err
		}
		r.Results = append(r.Results, times...)
	}
	print(r.Results)
	return r.write(out)
}

// allLines returns the lines that are measured by turns, and the beds of others.
func allLines(ctx context.Context, b *bed) ([]line, *projectorBed, *taskBed, error) {
	lines, err := appendLines(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	relays, err := relayLines(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	projected, err := newProjectorBed(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	projectors, err := projected.lines()
	if err != nil {
		return nil, nil, nil, err
	}
	logs, err := logLines(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	tasked, err := newTaskBed(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	tasks, err := tasked.lines(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	rebuilt, err := rebuildLines(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	return slices.Concat(lines, relays, projectors, logs, rebuilt, tasks, sqliteLines()), projected, tasked, nil
}

// write writes the report, merged with an earlier run's results for lines that this run did not
// measure.
func (r report) write(out string) error {
	r.Results = slices.Clone(r.Results)
	for i := range r.Results {
		r.Results[i].Date, r.Results[i].CPU = time.Now().Format(time.DateOnly), r.Machine["cpu"]
	}
	if err := r.keepOthers(out); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

// keepOthers adds the lines of an earlier run that this run did not measure: lines are independent.
func (r *report) keepOthers(out string) error {
	text, err := os.ReadFile(out)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var before report
	if err == nil {
		err = json.Unmarshal(text, &before)
	}
	if err != nil {
		return fmt.Errorf("read the earlier results: %w", err)
	}
	for _, old := range before.Results {
		if !slices.ContainsFunc(r.Results, func(now result) bool { return now.Name == old.Name }) {
			r.Results = append(r.Results, old)
		}
	}
	return nil
}

// measure runs a line's programs alternately.
func measure(ctx context.Context, b *bed, l line, rounds int, length time.Duration) (result, error) {
	programs := []program{l.ours, l.peer, l.limit}
	rates := make([][]float64, len(programs))
	for round := range rounds + 1 {
		for i, p := range programs {
			if p.work == nil {
				continue
			}
			profile := ""
			if i == 0 && round == rounds && b.profile != "" {
				profile = filepath.Join(b.profile, strings.ReplaceAll(l.name, "/", "-")+".pprof")
			}
			rate, err := once(ctx, b, p, length, profile)
			if err != nil {
				return result{}, err
			}
			slog.Info("round", "name", l.name, "program", [...]string{"kinora", "peer", "limit"}[i], "rate", int(rate.perSecond),
				"own_cpu_us", rate.own, "server_cpu_us", rate.server, "redis_cpu_us", rate.redis)
			if round > 0 {
				rates[i] = append(rates[i], rate.perSecond)
			}
		}
	}
	r := result{Name: l.name, Unit: l.unit, PeerName: l.peerName, Rounds: rounds,
		Ours: median(rates[0]), Peer: median(rates[1]), Limit: median(rates[2])}
	if r.Peer > 0 {
		r.VsPeer = r.Ours / r.Peer
	}
	if r.Limit > 0 {
		r.VsLimit = r.Ours / r.Limit
	}
	return r, nil
}

// rate is the rate of a round, and the CPU times of this process, of PostgreSQL and of Redis per unit of
// work, in µs.
type rate struct{ perSecond, own, server, redis float64 }

func once(ctx context.Context, b *bed, p program, length time.Duration, profile string) (r rate, err error) {
	if p.prepare != nil {
		if err := p.prepare(ctx); err != nil {
			return r, fmt.Errorf("prepare: %w", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	if profile != "" {
		f, err := os.Create(profile)
		if err != nil {
			return r, err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return r, err
		}
		defer pprof.StopCPUProfile()
	}
	begin, before := time.Now(), b.cpu()
	done, err := p.work(ctx, b)
	if err != nil {
		return r, err
	}
	r.perSecond = float64(done) / time.Since(begin).Seconds()
	r.own, r.server, r.redis = b.cpu().since(before, done)
	return r, nil
}

func median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	slices.SortFunc(xs, cmp.Compare[float64])
	return xs[len(xs)/2]
}

func print(rs []result) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "name\tours\tpeer\tlimit\tvs peer\tvs limit\tunit\t")
	number := func(x float64, format string) string {
		if x == 0 {
			return "-"
		}
		return fmt.Sprintf(format, x)
	}
	for _, r := range rs {
		ours := fmt.Sprintf("%.0f", r.Ours)
		if r.Ours < 100 {
			ours = fmt.Sprintf("%.1f", r.Ours)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", r.Name, ours, number(r.Peer, "%.0f"), number(r.Limit, "%.0f"),
			number(r.VsPeer, "%.2f"), number(r.VsLimit, "%.2f"), r.Unit)
	}
	_ = w.Flush()
}

func machine() map[string]string {
	m := map[string]string{"go": runtime.Version(), "os": runtime.GOOS + "/" + runtime.GOARCH, "cores": fmt.Sprint(runtime.NumCPU())}
	cpu, _ := os.ReadFile("/proc/cpuinfo")
	for l := range strings.Lines(string(cpu)) {
		if k, v, ok := strings.Cut(l, ":"); ok && strings.TrimSpace(k) == "model name" {
			m["cpu"] = strings.TrimSpace(v)
			break
		}
	}
	return m
}
