// Package model has what the parts of a runner share: the projectors without their type parameter, the
// messages that they take, and the runner's store, log and configuration.
package model

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/lease"
	"github.com/kinora-go/kinora/provider"
)

// Host is what the parts of one runner share.
type Host struct {
	Config
	ID     string // of the runner
	Store  Store
	Log    provider.Log // of the events; nil: there is none
	LogID  atomic.Pointer[provider.LogID]
	Leases lease.Keeper
	Loops  pulse.Loops
	Follow pauses.Signal // requests a look at the generations
	Scan   pauses.Signal // requests a scan of parked messages that are due
	Head   Head
	// Workers is the number of workers of units that were created.
	Workers atomic.Int64
	// End ends the runner with an error. It is set before anything is applied.
	End func(error)
	// Halt ends the runner if a message of a projector with Halt is stuck.
	Halt func(context.Context)
	// Paused reports whether an operator has paused a projector.
	Paused func(projector string) bool
	// Others returns the services that are alive. nil: the store does not know them.
	Others func(ctx context.Context) ([]provider.ServiceReport, error)
}

// Able returns whether another program that is alive has all that a projector of this one has, feeds the generation too,
// and also has a need. An error of the store counts as no.
func (h *Host) Able(ctx context.Context, p *Projector, g *generation.Row, needs string) bool {
	return h.Meets(ctx, p, g, strings.Join(append([]string{needs}, p.Has...), "\n"))
}

// Meets returns whether another program that is alive feeds the generation too, and has what one of some messages needs
// (provider.Parked.Needs). An error of the store counts as no.
func (h *Host) Meets(ctx context.Context, p *Projector, g *generation.Row, needs ...string) bool {
	if h.Others == nil {
		return false
	}
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	all, _ := h.Others(ctx)
	return slices.ContainsFunc(all, func(s provider.ServiceReport) bool {
		c := s.Capability(p.Name)
		return s.ID != h.ID && c != nil && g.Takes(c.Version) && slices.ContainsFunc(needs, c.Meets)
	})
}

// Store is a provider without Units.
type Store interface {
	provider.Parking
	provider.Liveness
	provider.Records
	provider.Progress
	provider.Builds
	provider.Leases
}

// Config is what the parts of a runner read of its RunnerConfig.
type Config struct {
	Concurrency, Batch            int // Batch 0: the defaults
	Timeout, Grace, Lease, Record time.Duration
	Retry                         claim.Backoff
	Careful, LogErrors            bool
	Version                       string
	Classify                      func(error) provider.Class
	Observer                      Observer
	Clock                         func() time.Time
	Logger                        *slog.Logger
}

// Observer has the fields of projector.RunnerObserver, so that each converts to the other.
type Observer struct {
	Processing func(projector string, messages []eventstore.Raw) (values context.Context, ended func(err error))
	Emitting   func(ctx context.Context, handler string, output []outbox.Message)
	Handled    func(handler string, skipped bool, waited, took time.Duration, err error)
	Unit       func(projector string, messages int, took time.Duration, err error)
	Retried    func(projector string, class provider.Class, after time.Duration)
	Parked     func(projector, handler string, class provider.Class, code string)
	Replayed   func(projector string)
	Pruned     func(rows int)
	Completed  func(projector, reason string)
	Unmarked   func(handler string)
}

// The default sizes of units, and the greatest.
const (
	DeliveryBatch = 32
	LogBatch      = 500
	MaxBatch      = 10_000
)

// Report logs a message with the class and the code of an error. It logs the error's text only with
// LogErrors.
func (c *Config) Report(level slog.Level, what string, err error, attrs ...any) {
	attrs = append(attrs, "class", provider.ClassOf(err).String(), "code", provider.CodeOf(err))
	if c.LogErrors {
		attrs = append(attrs, "err", err)
	}
	c.Logger.Log(context.Background(), level, what, attrs...)
}

// Wait waits for d, or until ctx ends.
func Wait(ctx context.Context, d time.Duration) { pauses.Wait(ctx, d) }

// Pauses of the parts of a runner.
const (
	Soon      = 5 * time.Millisecond   // more may come
	LookAgain = 200 * time.Millisecond // something else goes on first
)

// Limited returns a context for one statement of the store.
func (h *Host) Limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, h.Timeout)
}

// ReadLogID reads the id of the log, and keeps it in LogID.
func (h *Host) ReadLogID(ctx context.Context) (provider.LogID, error) {
	id, err := h.Log.LogID(ctx)
	if err == nil {
		h.LogID.Store(&id)
	}
	return id, err
}

// Generations reads the generations of a projector.
func (h *Host) Generations(ctx context.Context, projector string) ([]*generation.Row, error) {
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	return generation.All(ctx, h.Store, projector)
}

// Generation reads a generation. It returns ErrGeneration if there is none.
func (h *Host) Generation(ctx context.Context, b provider.Build) (*generation.Row, error) {
	all, err := h.Generations(ctx, b.Projector)
	if err != nil {
		return nil, err
	}
	if g := generation.Find(all, func(g *generation.Row) bool { return g.Build == b }); g != nil {
		return g, nil
	}
	return nil, fmt.Errorf("%w: %s does not exist", ErrGeneration, b)
}

// Page reads a page of the log.
func (h *Host) Page(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	return h.Log.LogPage(ctx, q)
}

// headAge is how old the head of the log may be that readers without work compare with.
const headAge = 100 * time.Millisecond

// Head is the position of the last visible event, for all readers of a runner that have no work: then a
// hundred projectors ask no more than one.
type Head struct {
	mu       sync.Mutex
	position int64
	read     time.Time
}

// Position returns the position. It is at most headAge old.
func (o *Head) Position(ctx context.Context, h *Host) (int64, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := h.Clock(); o.read.IsZero() || now.Sub(o.read) >= headAge {
		limited, cancel := h.Limited(ctx)
		defer cancel()
		position, err := h.Log.LogPosition(limited, eventstore.From{Now: true})
		if err != nil {
			return 0, err
		}
		o.position, o.read = position, now
	}
	return o.position, nil
}

// EachParked calls each with the parked messages that a filter selects, whose Limit is the size of a page.
func EachParked(ctx context.Context, s provider.Parking, f provider.ParkedFilter, each func(provider.Parked)) error {
	for {
		rows, err := s.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		for _, row := range rows {
			each(row)
			f.After = row.Seq
		}
	}
}

// Codes of parked messages. Others are SQLSTATEs and codes of providers.
const (
	CodeMalformed    = "malformed"    // the headers are not those of a published event, or the Decoder failed
	CodeNoDecoder    = "no_decoder"   // a Decoder has read it before, and this runner has none
	CodeUnregistered = "unregistered" // the type or its schema version is not registered
	CodeUndecodable  = "undecodable"  // the data cannot be decoded as its type
	CodeNoHandler    = "no_handler"   // it was parked for a handler that this program does not have
	CodeNoEvent      = "no_event"     // the log does not have the event: it was restored from a backup, or the message is forged
	CodePanic        = "panic"
	CodeGoexit       = "goexit"  // the handler called runtime.Goexit
	CodeStuck        = "stuck"   // the handler did not return after its timeout
	CodeCrashed      = "crashed" // a process ended while it processed the message
)

// Errors of package projector, which documents them.
var (
	ErrHalted     = errors.New("the projector is halted: replay or skip the stuck message")
	ErrLogChanged = errors.New("the log has changed")
	ErrNoRebuild  = errors.New("the projector cannot be rebuilt")
	ErrGeneration = errors.New("the generation does not allow this")
)

// Reasons why a message is set aside.
var (
	ErrNoEvent  = permanent(CodeNoEvent, "the log no longer has the event: it was probably restored from a backup")
	ErrNotInLog = permanent(CodeNoEvent, "the log has no event with this id: the message is forged, or its source must not be Untrusted")
)

func permanent(code, text string) *provider.Error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: errors.New(text)}
}

// What this program lacks to apply a message.
var (
	ErrNoType    = unable(CodeUnregistered, "this program does not have the type of the event, or not its schema version")
	ErrNoHandler = unable(CodeNoHandler, "this program does not have the handler of the message")
	ErrNoDecoder = unable(CodeNoDecoder, "the message is of other software: set RunnerConfig.Decode to the decoder of its runner")
)

func unable(code, text string) *provider.Error {
	return &provider.Error{Class: provider.ClassUnable, Code: code, Err: errors.New(text)}
}

// Undecodable returns the error of an event that this program cannot decode, nil if err is nil.
func Undecodable(err error) error {
	if err == nil {
		return nil
	}
	code := CodeUndecodable
	if errors.Is(err, eventstore.ErrUnregistered) {
		code = CodeUnregistered
	}
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}
