package commands

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/provider"
)

type uiCmd struct {
	Listen  string        `default:"127.0.0.1:8042" help:"The address. Others than those of this machine must be named explicitly: anyone who reaches the page can use it."`
	Acts    bool          `help:"Allow acts, such as replay and pause. Without it the page is read-only."`
	Payload bool          `help:"Show payloads, headers, rows and texts of errors, which may be data of users."`
	By      string        `default:"${user}" help:"Who acts. It is stored."`
	Lag     time.Duration `default:"30s" help:"How old the first event that is not applied may be."`
}

func (c *uiCmd) Validate() error {
	if host, _, err := net.SplitHostPort(c.Listen); err != nil || host == "" {
		return errors.New("--listen: use HOST:PORT, such as 127.0.0.1:8042, or 0.0.0.0:8042 for all addresses")
	}
	if c.Acts && c.By == "" {
		return errors.New("--by is missing")
	}
	return nil
}

func (c *uiCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(s *Session, _ *admin.Admin) error {
		logger := slog.New(slog.NewTextHandler(app.err(), nil))
		cfg := adminpage.Config{Limits: provider.DiagnosisLimits{Lag: c.Lag}, Logger: logger, Payloads: func(*http.Request) bool { return c.Payload }}
		if c.Acts {
			cfg.Who = func(*http.Request) string { return c.By }
		}
		handler, err := adminpage.New(s.Store, cfg)
		if err != nil {
			return err
		}
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Listen)
		if err != nil {
			return err
		}
		err = app.show(map[string]string{"url": "http://" + listener.Addr().String() + "/"}, func(w io.Writer) {
			_, _ = fmt.Fprintf(w, "http://%s/ (Ctrl-C stops)\n", listener.Addr())
		})
		if err != nil {
			return errors.Join(err, listener.Close())
		}
		return serve(ctx, listener, handler, logger)
	})
}

// serve serves a page, and takes its samples, until ctx ends.
func serve(ctx context.Context, listener net.Listener, handler *adminpage.Handler, logger *slog.Logger) error {
	server := &http.Server{
		Handler: ownHost(listener.Addr(), handler), ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	sampling, stop := context.WithCancel(ctx)
	defer stop()
	sampled, served := make(chan error, 1), make(chan error, 1)
	go func() { sampled <- handler.Run(sampling) }()
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		stop()
		return errors.Join(err, <-sampled)
	case <-ctx.Done():
	}
	err := <-sampled // live pages end with it
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if server.Shutdown(end) != nil {
		err = errors.Join(err, server.Close())
	}
	if failed := <-served; !errors.Is(failed, http.ErrServerClosed) {
		err = errors.Join(err, failed)
	}
	return err
}

// ownHost refuses requests for other hosts if only this machine can reach the page. A page of another site
// could else name its host like this address, and read the page.
func ownHost(addr net.Addr, next http.Handler) http.Handler {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || !tcp.IP.IsLoopback() {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		host = strings.Trim(host, "[]")
		if ip := net.ParseIP(host); !strings.EqualFold(host, "localhost") && (ip == nil || !ip.IsLoopback()) {
			http.Error(w, "this page is for localhost", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
