package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/task"
)

type serveCmd struct {
	DB         database      `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"The database: sqlite:PATH or postgres://…. Missing files and tables are created."`
	Addr       string        `default:"127.0.0.1:8080" help:"Address to listen on."`
	StrongWait time.Duration `default:"5s" help:"How long a write with strong consistency waits for the read model."`

	Operator bool `help:"Serve the page for operators under /operator/, read-only."`

	Moderator         string        `placeholder:"URL" help:"The moderator of new reviews, an HTTP endpoint. Without it a local rule hides reviews with links."`
	ModerationTimeout time.Duration `default:"24h" help:"How long to wait for a verdict that the moderator sends later. After that the review stays visible."`

	projectionFlags `embed:""`
	pipelineFlags   `embed:""`
}

// Validate is called by kong.
func (c *serveCmd) Validate() error {
	if c.StrongWait <= 0 || c.StrongWait >= requestLimit {
		return fmt.Errorf("--strong-wait is %s: use more than 0s and less than %s", c.StrongWait, requestLimit)
	}
	if c.ModerationTimeout <= 0 {
		return fmt.Errorf("--moderation-timeout is %s: use more than 0s", c.ModerationTimeout)
	}
	if u, err := url.Parse(c.Moderator); c.Moderator != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("--moderator is %q: use an http or https URL", c.Moderator)
	}
	return nil
}

// shutdownTimeout is how long requests in flight may take after the service starts to stop.
const shutdownTimeout = 10 * time.Second

// Run serves until ctx ends or the pipeline ends. It then takes no more requests, finishes those in
// flight, drains the pipeline, and closes the database, in this order.
func (c *serveCmd) Run(ctx context.Context) (err error) {
	if err := c.check(c.DB); err != nil {
		return err
	}
	db, err := c.of(c.DB).create(ctx, c.Broker)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	moderating, err := db.moderation(moderation{ask: newModerator(c.Moderator), timeout: c.ModerationTimeout, worker: task.WorkerConfig{Lease: lease}})
	if err != nil {
		return err
	}
	pipe, err := c.start(ctx, c.DB, db, moderating...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pipe.Stop()) }()
	stopping, stop := context.WithCancel(ctx)
	defer stop()
	handler, err := newService(stopping, db, pipe, c.StrongWait, c.Addr)
	if err != nil {
		return err
	}
	if c.Operator {
		ops, err := newOperatorPage(db)
		if err != nil {
			return err
		}
		sampled, err := kinora.Start(stopping, ops)
		if err != nil {
			return err
		}
		defer func() { stop(); err = errors.Join(err, sampled.Stop()) }()
		all := http.NewServeMux()
		all.Handle("/", handler)
		all.Handle("/operator/", ownHosts(c.Addr, http.StripPrefix("/operator", ops)))
		handler = all
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Addr)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: requestLimit,
		WriteTimeout: requestLimit + shutdownTimeout, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	fmt.Fprintf(os.Stderr, "reviews: http://%s on %s\n", listener.Addr(), c.of(c.DB))
	select {
	case <-ctx.Done():
	case <-pipe.Ended(): // Stop returns the reason
		slog.Error("pipeline ended unexpectedly")
	case err := <-served:
		return err
	}
	stop()
	shutdownCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if server.Shutdown(shutdownCtx) != nil {
		slog.Warn("requests in flight canceled after the shutdown timeout", "timeout", shutdownTimeout)
		return server.Close()
	}
	return nil
}

// newOperatorPage returns the page for operators, which changes nothing.
func newOperatorPage(db serviceStore) (*adminpage.Handler, error) {
	store, ok := db.(admin.Store)
	if !ok {
		return nil, errors.New("--operator: this database has no facts for operators")
	}
	return adminpage.New(store, adminpage.Config{Name: "Reviews"})
}

// newService returns the handler of the whole service, which listens on the address listen. It
// reports not ready once stopping has ended.
func newService(
	stopping context.Context, db serviceStore, pipe *pipeline, strongWait time.Duration, listen string,
) (http.Handler, error) {
	commands, err := review.NewCommands(db)
	if err != nil {
		return nil, err
	}
	a := &api{db: db, commands: commands, clock: time.Now, strongWait: strongWait, stopping: stopping}
	p := &page{api: a}
	p.live = newLive(stopping.Done(), p.fragment)
	mux := http.NewServeMux()
	a.routes(mux)
	p.routes(mux)
	mux.Handle("GET /healthz", jsonHandler(func(w http.ResponseWriter, _ *http.Request) error {
		return writeJSON(w, http.StatusOK, map[string]string{"status": "alive"})
	}))
	mux.Handle("GET /readyz", jsonHandler(func(w http.ResponseWriter, r *http.Request) error {
		return ready(w, r, db, pipe, stopping.Done())
	}))
	return front(mux, listen), nil
}

const readyLimit = 2 * time.Second // for the database to answer

// ready answers 503 while the service stops, after the pipeline has ended, or if the database does
// not answer.
func ready(w http.ResponseWriter, r *http.Request, db serviceStore, pipe *pipeline, stopping <-chan struct{}) error {
	notReady := func(why string) error {
		return &httpError{Status: http.StatusServiceUnavailable, Code: "not_ready", Message: why}
	}
	select {
	case <-stopping:
		return notReady("the service is stopping")
	case <-pipe.Ended():
		return notReady("the pipeline has ended")
	default:
	}
	ctx, cancel := context.WithTimeout(r.Context(), readyLimit)
	defer cancel()
	_, err := db.products(ctx, "", 1)
	if err == nil { // the events may be in another database
		_, err = db.LogPosition(ctx, eventstore.From{Now: true})
	}
	if err != nil {
		return notReady("the database does not answer")
	}
	return writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
}
