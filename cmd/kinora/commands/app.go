// Package commands has the commands of kinora, also for the binary of a service with its own handlers.
//
//	status := commands.Main(ctx, &commands.App{Name: "shop ops", Open: openShop}, os.Args[2:])
//
// Or embed Commands in the command line of a program that uses kong, and pass an *App to Run:
//
//	type commandLine struct {
//		Ops commands.Commands `cmd:"" help:"Look after the service."`
//	}
//
// Exit status: 0 if all is right, 1 if something was found or failed, 2 if the command line is wrong, 3 if nothing was found,
// and the doctor could not check everything.
package commands

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/sqlite"
	"golang.org/x/term"
)

// App is what the commands work with. The zero value works with any database and without handlers.
type App struct {
	// Name is how the program is called, in help and messages. Empty means "kinora".
	Name string
	// Open opens the database of --db. Nil means Open of this package.
	Open func(ctx context.Context, db Database) (*Session, error)
	// In, Out and Err are for questions and answers, results, and messages. Nil means those of the process.
	In       io.Reader
	Out, Err io.Writer
	// Terminal reports whether a person can answer questions. Nil means whether the standard input is a terminal.
	Terminal func() bool

	flags  Flags
	create bool
}

// Session is an open database.
type Session struct {
	Store admin.Store
	// Migrate brings the tables up to date.
	Migrate func(ctx context.Context) error
	// SQL returns the statements of Migrate.
	SQL func() (string, error)
	// Handlers are those of the service. Other projectors need a running runner for dry runs, verifications and replays.
	Handlers []Handlers
	Close    func() error
}

// Database is the value of --db.
type Database struct {
	Kind string // "postgres" or "sqlite"
	// Address is a connection string of PostgreSQL, or the path of a file.
	Address string
	Schema  string // of Kinora's tables on PostgreSQL
	Create  bool   // a file that does not exist is created
}

// ParseDatabase reads "postgres://…" or "sqlite:PATH".
func ParseDatabase(text, schema string) (Database, error) {
	kind, path, _ := strings.Cut(text, ":")
	switch {
	case kind == "sqlite" && path != "":
		return Database{Kind: kind, Address: path}, nil
	case (kind == "postgres" || kind == "postgresql") && strings.HasPrefix(path, "//"):
		return Database{Kind: "postgres", Address: text, Schema: schema}, nil
	}
	return Database{}, errors.New(`--db: use "postgres://…" or "sqlite:PATH"`) // not the text: it may have a password
}

// Open opens a database without handlers.
func Open(ctx context.Context, db Database) (*Session, error) {
	if db.Kind == "sqlite" {
		if _, err := os.Stat(db.Address); err != nil && !db.Create {
			return nil, fmt.Errorf("open: %w: 'migrate up' creates the file", err)
		}
		file, err := sqlite.Open(ctx, db.Address, nil)
		if err != nil {
			return nil, err
		}
		return &Session{
			Store: file, Migrate: file.Migrate, Close: file.Close,
			SQL: func() (string, error) { return sqlite.MigrationSQL(), nil },
		}, nil
	}
	pg, err := postgres.Open(ctx, db.Address, &postgres.Config{Schema: db.Schema})
	if err != nil {
		return nil, err
	}
	return &Session{
		Store: pg, Migrate: pg.Migrate, Close: func() error { pg.Close(); return nil },
		SQL: func() (string, error) { return postgres.MigrationSQL(cmp.Or(db.Schema, "kinora")) },
	}, nil
}

// Flags are the flags of all commands.
type Flags struct {
	DB     string `env:"KINORA_DB" placeholder:"URL" help:"The database: postgres://… or sqlite:PATH."`
	Schema string `env:"KINORA_SCHEMA" default:"kinora" help:"The schema of Kinora's tables on PostgreSQL."`
	JSON   bool   `help:"Print JSON."`
}

// Commands is the tree of commands. Each is a struct with its flags, whose Validate and Run kong calls.
type Commands struct {
	Flags `embed:""`

	Status     statusCmd     `cmd:"" help:"Show the state: the log, projectors, the outbox, tasks, and the services that run."`
	Doctor     doctorCmd     `cmd:"" help:"Find what is wrong, the most urgent first, each with its remedy, and say what could not be checked. The exit status is 1 if there is something, and 3 if there is nothing and not all was checked."`
	Migrate    migrateCmd    `cmd:"" help:"Create Kinora's tables, or bring them up to date."`
	Streams    streamsCmd    `cmd:"" help:"List streams, and show their events."`
	Outbox     outboxCmd     `cmd:"" help:"Entries of the outbox: list, requeue, skip or prune them, pause topics."`
	Markers    markersCmd    `cmd:"" help:"Markers of messages that took effect: list their handlers, prune or drop them."`
	Projectors projectorsCmd `cmd:"" help:"Projectors: pause, rebuild, verify and forget them."`
	Parked     parkedCmd     `cmd:"" help:"Parked messages (dead letters): list, try, replay or skip them."`
	Tasks      tasksCmd      `cmd:"" help:"Tasks: list, requeue, cancel, complete or change them."`
	Acts       actsCmd       `cmd:"" help:"What operators did, and requests that runners have not answered."`
	UI         uiCmd         `cmd:"" help:"Serve a page for operators on this machine."`
}

// AfterApply is called by kong.
func (c *Commands) AfterApply(app *App) error {
	app.flags = c.Flags
	return nil
}

// Vars are the variables that the flags of Commands use. A program that embeds Commands passes them to kong.
func Vars() kong.Vars {
	vars := kong.Vars(filters.Vars())
	vars["user"] = ""
	if u, err := user.Current(); err == nil {
		vars["user"] = u.Username
	}
	return vars
}

// usageError is the error of a command line that cannot be carried out. The exit status is 2.
type usageError struct{ error }

func (usageError) ExitCode() int { return 2 }

// foundError says that a check has found something. The exit status is 1, and nothing is printed.
type foundError struct {
	unchecked bool // it has found nothing, and could not look everywhere: the exit status is 3
}

func (foundError) Error() string { return "something was found, or not checked" }

func (e foundError) ExitCode() int {
	if e.unchecked {
		return 3
	}
	return 1
}

// Main runs a command line and returns the exit status.
func Main(ctx context.Context, app *App, args []string) int {
	var line Commands
	exited := -1
	parser, err := kong.New(&line, kong.Name(cmp.Or(app.Name, "kinora")), Vars(), kong.Bind(app), kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Description("Look after services that use Kinora. Exit status: 0 if all is right, 1 if something was found or failed, 2 if the command line is wrong, 3 if nothing was found, and the doctor could not check everything."),
		kong.Writers(app.out(), app.err()), kong.ConfigureHelp(kong.HelpOptions{Compact: true}), kong.Exit(func(code int) { exited = code }))
	if err != nil {
		_, _ = fmt.Fprintln(app.err(), err)
		return 2
	}
	parsed, err := parser.Parse(args)
	if exited >= 0 { // --help
		return exited
	}
	if err != nil {
		_, _ = fmt.Fprintf(app.err(), "%s: %s\nRun with --help to see the commands and flags.\n", cmp.Or(app.Name, "kinora"), err)
		return 2
	}
	err = parsed.Run(ctx, app)
	if err == nil {
		return 0
	}
	if _, found := errors.AsType[foundError](err); !found {
		_, _ = fmt.Fprintf(app.err(), "%s: %s\n", cmp.Or(app.Name, "kinora"), printable(err.Error()))
	}
	if e, ok := errors.AsType[interface {
		error
		ExitCode() int
	}](err); ok {
		return e.ExitCode()
	}
	return 1
}

func (a *App) out() io.Writer { return cmp.Or[io.Writer](a.Out, os.Stdout) }

func (a *App) err() io.Writer { return cmp.Or[io.Writer](a.Err, os.Stderr) }

func (a *App) isTerminal() bool {
	if a.Terminal != nil {
		return a.Terminal()
	}
	return a.In == nil && term.IsTerminal(int(os.Stdin.Fd()))
}

// with opens the database and calls do.
func (a *App) with(ctx context.Context, do func(s *Session, ops *admin.Admin) error) (err error) {
	if a.flags.DB == "" {
		return usageError{errors.New("--db or KINORA_DB is missing: postgres://… or sqlite:PATH")}
	}
	db, err := ParseDatabase(a.flags.DB, a.flags.Schema)
	if err != nil {
		return usageError{err}
	}
	db.Create = a.create
	open := a.Open
	if open == nil {
		open = Open
	}
	s, err := open(ctx, db)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	ops, err := admin.New(s.Store)
	if err != nil {
		return err
	}
	return do(s, ops)
}

// Handlers are those of a projector, in the binary of a service. Create them with HandlersOf.
type Handlers interface {
	Name() string // of the projector
	DryRun(ctx context.Context, f projector.ParkedFilter) (provider.DryRunReport, error)
	Verify(ctx context.Context, v projector.Verification) (provider.VerifyReport, error)
	ApplyParked(ctx context.Context) error
}

// HandlersOf returns the handlers of p, which work on db. A nil cfg means the default.
func HandlersOf[Tx any](p *projector.Projector[Tx], db provider.Units[Tx], cfg *projector.RunnerConfig) Handlers {
	return handlersOf[Tx]{p, db, cfg}
}

type handlersOf[Tx any] struct {
	p   *projector.Projector[Tx]
	db  provider.Units[Tx]
	cfg *projector.RunnerConfig
}

func (h handlersOf[Tx]) Name() string { return h.p.Name() }

func (h handlersOf[Tx]) DryRun(ctx context.Context, f projector.ParkedFilter) (provider.DryRunReport, error) {
	d, err := h.p.DryRun(ctx, h.db, f, h.cfg)
	if err != nil {
		return provider.DryRunReport{}, err
	}
	return d.Report(), nil
}

func (h handlersOf[Tx]) Verify(ctx context.Context, v projector.Verification) (provider.VerifyReport, error) {
	done, err := h.p.Verify(ctx, h.db, v, h.cfg)
	if err != nil {
		return provider.VerifyReport{}, err
	}
	return done.Report(), nil
}

func (h handlersOf[Tx]) ApplyParked(ctx context.Context) error {
	return h.p.ApplyParked(ctx, h.db, h.cfg)
}

// handlers returns the handlers of a projector, or nil.
func (s *Session) handlers(projector string) Handlers {
	for _, h := range s.Handlers {
		if h.Name() == projector {
			return h
		}
	}
	return nil
}
