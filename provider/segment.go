package provider

import (
	"encoding/binary"
	"slices"

	"github.com/kinora-go/kinora/claim"
)

// A projector that reads only the log may be split into segments: shares of the streams, which
// several readers apply at the same time. Each segment has a position of its own. The checkpoint
// stays: every event up to it is applied, whatever its stream. See docs/adr/0028.

// Split is a range of segments that share the streams of a generation.
type Split struct {
	// First is the number of the first segment. Numbers are never used again: each new Split of a
	// generation begins behind the last number of the one before.
	First int `json:"first"`
	// Count is the number of segments. Zero: one reader applies all events.
	Count int `json:"count"`
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

// Applied reports whether the event of a stream at a position is applied or parked: the checkpoint,
// or the segment of its stream in one of the Splits, is at or behind the event. c must have its
// Segments.
func (c *Checkpoint) Applied(stream string, position int64) bool {
	if position <= c.Place.Position {
		return true
	}
	for _, s := range c.Splits {
		if s.Count == 0 {
			continue
		}
		number := s.Of(stream)
		if i := slices.IndexFunc(c.Segments, func(is Segment) bool { return is.Number == number }); i >= 0 && position <= c.Segments[i].Place.Position {
			return true
		}
	}
	return false
}

// Split returns the current one of the Splits.
func (c *Checkpoint) Split() Split {
	if len(c.Splits) == 0 {
		return Split{First: 1}
	}
	return c.Splits[0]
}

// InSegment returns the checkpoint as a unit with Unit.Segment compares it: with the place and the
// token of the segment, which must be in c.Segments. If the current Split does not have the segment,
// or the segment does not exist, the result is like that of no checkpoint, unless c has ModeEnded.
// Zero returns c.
func (c Checkpoint) InSegment(number int) Checkpoint {
	if number == 0 || c.Mode == ModeEnded {
		return c
	}
	i := slices.IndexFunc(c.Segments, func(is Segment) bool { return is.Number == number })
	if split := c.Split(); i < 0 || !split.Has(number) {
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
