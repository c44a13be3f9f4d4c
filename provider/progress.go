package provider

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/kinora-go/kinora/claim"
)

// Progress records how far projectors have applied a log. Each method is a separate transaction.
type Progress interface {
	// Checkpoint returns the checkpoint of a generation as of one moment. If it has none, only Generation is set.
	Checkpoint(ctx context.Context, b Build) (Checkpoint, error)

	// SetCheckpoint replaces the checkpoint. For a new mode, a new Split, and the first checkpoint, it waits
	// for all open units of the projector, and units that open later see the new one. Otherwise it waits
	// only for units with Unit.Reader or Unit.Advance. It returns false, and changes nothing, if the
	// checkpoint has ModeEnded, or if its position, mode, token or Splits are not those of from. to must have a mode; its
	// Generation and Segments are ignored, and so are its Handlers if they are those of from: the stored ones stay.
	// Segments below those of to.Splits are deleted.
	SetCheckpoint(ctx context.Context, b Build, from, to Checkpoint) (bool, error)

	// TakeSegment makes token the one that moves a segment of the current Split, and returns it as it was, or as it
	// was created, at the place of the checkpoint. It returns false, and changes nothing, if the Split does not have
	// it, or the mode is not ModeCatchUp. It waits for units with Unit.Segment of the same segment.
	TakeSegment(ctx context.Context, b Build, number int, token claim.Token) (Segment, bool, error)

	// Unapplied reports for each message whether a unit could find it fresh: it is behind the checkpoint or
	// has no position, and one of its handlers has no marker of it. Lane, Mark and Parked are ignored.
	Unapplied(ctx context.Context, b Build, messages []Message) ([]bool, error)

	// PruneApplied deletes at most limit markers of handlers whose position is not behind the checkpoint. It returns
	// their number: zero means that none is left, except those that other transactions are deleting.
	PruneApplied(ctx context.Context, b Build, handlers []string, limit int) (int, error)
}

// Checkpoint is how far a projector has applied the events of a log.
type Checkpoint struct {
	Generation int // whose checkpoint it is, as Progress.Checkpoint returns it
	// Restored: the read model may have gone back to an earlier state since the checkpoint was stored
	// elsewhere, so events behind it may be applied again. Progress.SetCheckpoint ignores it.
	Restored bool
	// Lost is the position up to which events may have been applied before: until the checkpoint
	// reaches it, the read model has less than it had. Zero in stores that lose nothing.
	Lost int64
	// Restoring: the reader applies the events of Restorer.Lost. Until then parked messages wait.
	Restoring bool
	// Place is that of a settled event: every event of Handlers at or before it is applied or parked. If
	// its Position is zero or was chosen by a person, the rest may be zero.
	Place   LogPlace
	Lineage string // LogID.Lineage of the log
	Mode    Mode   // zero if there is no checkpoint
	Token   claim.Token
	// Handlers has the events that the projector takes, and behind which position each handler does.
	Handlers []Began
	// Splits are the ranges of segments that apply the events behind Place. The first one is current. The
	// segments of the others do not move any more; they stay until Place has passed them, so that what they
	// have applied is not applied again. Empty: the projector was never split.
	Splits []Split
	// Segments are those of Splits that exist, in order of number.
	Segments []Segment
}

// Began says that a handler takes the events of a type behind a position.
type Began struct {
	Handler  string   `json:"handler"`       // the full name
	Was      []string `json:"was,omitempty"` // its earlier full names, by which older programs know it
	Type     string   `json:"type"`
	Position int64    `json:"position"`
}

func (b Began) equal(c Began) bool {
	return b.Handler == c.Handler && b.Type == c.Type && b.Position == c.Position && slices.Equal(b.Was, c.Was)
}

// Is reports whether a handler has one of the names.
func (b *Began) Is(h Handler) bool {
	return h.Name == b.Handler || slices.Contains(h.Was, b.Handler) || slices.Contains(b.Was, h.Name)
}

// Taker returns the handler.
func (b Began) Taker() Handler { return Handler{Name: b.Handler, Was: b.Was} }

// Compare orders by handler, then by type.
func (b Began) Compare(c Began) int {
	return cmp.Or(cmp.Compare(b.Handler, c.Handler), cmp.Compare(b.Type, c.Type))
}

// Mode says who applies the events of a log that a projector with a checkpoint takes.
type Mode int

const (
	// ModeCatchUp: only the reader of the log. Units leave delivered events to it (Found.Left).
	ModeCatchUp Mode = iota + 1
	// ModeClosing: the reader applies the last events, and units of deliveries fail with CodeClosing.
	ModeClosing
	// ModeLive: deliveries, and the reader the others. Applied events have markers until the checkpoint passes.
	ModeLive
	// ModeEnded: none. The generation is retired: all its units fail with ErrEnded.
	ModeEnded
)

var modes = [...]string{"", "catch-up", "closing", "live", "ended"}

// String returns "catch-up", "closing", "live" or "ended", and "" for any other mode.
func (m Mode) String() string { return wordOf(modes[:], m, 0) }

// ParseMode is the inverse of String. Any other text is a mode that no reader has.
func ParseMode(s string) Mode { return Mode(slices.Index(modes[:], s)) }

// CanSetCheckpoint reports whether SetCheckpoint replaces stored, if the caller names from.
func CanSetCheckpoint(stored, from Checkpoint) bool {
	return stored.Mode != ModeEnded && stored.Place.Position == from.Place.Position && stored.Mode == from.Mode && stored.Token == from.Token &&
		slices.Equal(stored.Splits, from.Splits)
}

// KeepsHandlers reports whether SetCheckpoint leaves the stored handlers as they are: the caller has not changed those that it
// has read. Another program may have.
func KeepsHandlers(from, to Checkpoint) bool {
	return from.Mode != 0 && slices.EqualFunc(from.Handlers, to.Handlers, Began.equal)
}

// Unapplied returns what Progress.Unapplied returns if c is the checkpoint, and marked reports which markers exist.
func (c *Checkpoint) Unapplied(messages []Message, marked func(Marker) bool) []bool {
	unapplied := make([]bool, len(messages))
	for i, m := range messages {
		if m.Position > 0 && m.Position <= c.Place.Position {
			continue
		}
		unapplied[i] = slices.ContainsFunc(m.Handlers, func(h Handler) bool {
			return !slices.ContainsFunc(h.Names(), func(name string) bool { return marked(Marker{Handler: name, MessageID: m.ID}) })
		})
	}
	return unapplied
}

// Reader identifies a reader of the log by the mode and the token that it has set in the checkpoint.
type Reader struct {
	Mode  Mode
	Token claim.Token
}

// Advance makes a unit move the checkpoint.
type Advance struct {
	From  int64    // its position now
	To    LogPlace // its new place
	Mode  Mode     // its mode
	Token claim.Token
}

// ErrFenced: the checkpoint is not as Unit.Advance or Unit.Reader says. Nothing was committed.
var ErrFenced = errors.New("the checkpoint was changed by another reader")

// ErrEnded: the generation of the unit is retired (ModeEnded). Nothing was committed.
var ErrEnded = errors.New("the generation is retired")

// Codes of an Error that concern a checkpoint. The class is ClassTransient.
const (
	CodeEnded   = "ended"   // ErrEnded
	CodeFenced  = "fenced"  // ErrFenced
	CodeClosing = "closing" // the projector is in ModeClosing
)

// Split is a range of segments that share the streams of a generation, and that several readers apply at
// the same time. Every event up to the checkpoint is applied, whatever its stream. See docs/adr/0028.
type Split struct {
	// First is the number of the first segment. Numbers are never used again: each new Split of a
	// generation begins behind the last number of the one before.
	First int `json:"first"`
	Count int `json:"count"` // of segments; zero: one reader applies all events
}

// Of returns the number of the segment that has a stream. Count must be at least 1.
func (s Split) Of(stream string) int { return s.First + SegmentOf(stream, s.Count) }

// Has reports whether a segment is one of s.
func (s Split) Has(number int) bool { return number >= s.First && number < s.First+s.Count }

// SegmentOf returns which of count shares has a stream: the first four bytes of LaneOfKey(stream), as a
// big-endian number, modulo count. This never changes: programs of all versions must agree.
func SegmentOf(stream string, count int) int {
	lane := LaneOfKey(stream)
	return int(binary.BigEndian.Uint32(lane[:4]) % uint32(count))
}

// Segment is how far a segment has applied the events of its streams.
type Segment struct {
	Number int
	Place  LogPlace    // every event of its streams at or before it is applied or parked
	Token  claim.Token // of the reader that moves it
}

// Applied reports whether the event of a stream at a position is applied or parked: the checkpoint, or the
// segment of its stream in one of the Splits, is at or behind the event.
func (c *Checkpoint) Applied(stream string, position int64) bool {
	if position <= c.Place.Position {
		return true
	}
	return slices.ContainsFunc(c.Splits, func(s Split) bool {
		if s.Count == 0 {
			return false
		}
		i, has := c.segment(s.Of(stream))
		return has && position <= c.Segments[i].Place.Position
	})
}

// segment returns the place of a segment in c.Segments, and whether it is there.
func (c *Checkpoint) segment(number int) (int, bool) {
	return slices.BinarySearchFunc(c.Segments, number, func(is Segment, n int) int { return cmp.Compare(is.Number, n) })
}

// Split returns the current one of the Splits.
func (c *Checkpoint) Split() Split {
	if len(c.Splits) == 0 {
		return Split{First: 1}
	}
	return c.Splits[0]
}

// InSegment returns the checkpoint with the place and the token of a segment, for Unit.Segment; zero returns c. If the
// segment does not exist in the current Split, there is no checkpoint, unless c has ModeEnded.
func (c Checkpoint) InSegment(number int) Checkpoint {
	if number == 0 || c.Mode == ModeEnded {
		return c
	}
	i, has := c.segment(number)
	if split := c.Split(); !has || !split.Has(number) {
		return Checkpoint{Generation: c.Generation}
	}
	c.Place, c.Token = c.Segments[i].Place, c.Segments[i].Token
	return c
}

// Oldest returns the lowest number of a segment that the Splits have.
func (c *Checkpoint) Oldest() int {
	oldest := c.Split().First
	for _, s := range c.Splits {
		oldest = min(oldest, s.First)
	}
	return oldest
}

// SetSegment replaces a segment, or adds it.
func (c *Checkpoint) SetSegment(to Segment) {
	c.Segments = slices.Clone(c.Segments)
	i, has := c.segment(to.Number)
	if !has {
		c.Segments = slices.Insert(c.Segments, i, to)
	}
	c.Segments[i] = to
}

// TakeSegment is the rule of Progress.TakeSegment. It returns false if c is unchanged.
func (c *Checkpoint) TakeSegment(number int, token claim.Token) (was Segment, ok bool) {
	if c.Mode != ModeCatchUp || !c.Split().Has(number) {
		return was, false
	}
	was = Segment{Number: number, Place: c.Place}
	if i, has := c.segment(number); has {
		was = c.Segments[i]
	}
	c.SetSegment(Segment{Number: number, Place: was.Place, Token: token})
	return was, true
}

// Becomes returns the checkpoint of a generation that gets a new state, and whether it changes.
func (c Checkpoint) Becomes(state GenerationState) (_ Checkpoint, changes bool) {
	switch {
	case state == GenerationStandby && c.Mode != 0:
		c.Mode, c.Token, c.Segments = ModeCatchUp, claim.Token{}, slices.Clone(c.Segments)
		for i := range c.Segments {
			c.Segments[i].Token = claim.Token{}
		}
		return c, true
	case state == GenerationRetired:
		c.Mode = ModeEnded
		return c, true
	}
	return c, false
}
