package main

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/kinora-go/kinora/examples/reviews/review"
)

// record is one line of a public Amazon review set. Fields that the import does not use are left
// out.
type record struct {
	Product string   `json:"asin"`
	Author  string   `json:"reviewerID"`
	Stars   *float64 `json:"overall"` // 5.0
	Summary string   `json:"summary"`
	Text    string   `json:"reviewText"`
	Unix    *int64   `json:"unixReviewTime"` // seconds
}

// maxUnix is the last second of the year 9999: RFC 3339, the form of times in JSON, ends there.
const maxUnix = 253402300799

// parseRecord parses one line, more strictly than encoding/json: it rejects invalid UTF-8, an
// unpaired surrogate and a duplicate key, instead of changing the text. The error never contains
// text of the line, which people wrote.
func parseRecord(line []byte) (record, error) {
	var r record
	if err := json.Unmarshal(line, &r); err != nil {
		return record{}, jsonReason(err)
	}
	switch {
	case r.Product == "":
		return record{}, errors.New("asin is missing or empty")
	case r.Author == "":
		return record{}, errors.New("reviewerID is missing or empty")
	case r.Stars == nil:
		return record{}, errors.New("overall is missing")
	case *r.Stars != math.Trunc(*r.Stars) || math.Abs(*r.Stars) > math.MaxInt32:
		return record{}, errors.New("overall must be a whole number of stars")
	case r.Unix == nil:
		return record{}, errors.New("unixReviewTime is missing")
	case *r.Unix < 0 || *r.Unix > maxUnix:
		return record{}, errors.New("unixReviewTime must be between the years 1970 and 9999")
	}
	return r, nil
}

func (r record) content() review.Content {
	return review.Content{Stars: int(*r.Stars), Summary: r.Summary, Text: r.Text}
}

func (r record) at() time.Time { return time.Unix(*r.Unix, 0).UTC() }

// jsonReason returns the error of a line and its position, without quoting the line.
func jsonReason(err error) error {
	if errors.Is(err, jsontext.ErrDuplicateName) {
		return errors.New("a key appears twice")
	}
	if e, ok := errors.AsType[*json.SemanticError](err); ok {
		if e.JSONPointer == "" {
			return errors.New("must be a JSON object")
		}
		return fmt.Errorf("%s has the wrong type", e.JSONPointer[1:]) // a field of record: others are not read
	}
	if e, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		return fmt.Errorf("not valid JSON at byte %d", e.ByteOffset)
	}
	return errors.New("not valid JSON")
}
