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

// record is one line of a public Amazon review set, as far as we read it.
type record struct {
	Product string   `json:"asin"`
	Author  string   `json:"reviewerID"`
	Stars   *float64 `json:"overall"` // 5.0
	Summary string   `json:"summary"`
	Text    string   `json:"reviewText"`
	Unix    *int64   `json:"unixReviewTime"` // seconds
}

// maxUnix is the last second of the year 9999: later times have no form in JSON (RFC 3339).
const maxUnix = 253402300799

// parseRecord reads one line. It is read more strictly than encoding/json would: invalid UTF-8, half a
// surrogate pair or a key that stands twice make a bad line instead of a text that nobody wrote.
// The error never holds what the line says: people write reviews.
func parseRecord(line []byte) (record, error) {
	var r record
	if err := json.Unmarshal(line, &r); err != nil {
		return record{}, jsonReason(err)
	}
	switch {
	case r.Product == "":
		return record{}, errors.New("no asin")
	case r.Author == "":
		return record{}, errors.New("no reviewerID")
	case r.Stars == nil:
		return record{}, errors.New("no overall")
	case *r.Stars != math.Trunc(*r.Stars) || math.Abs(*r.Stars) > math.MaxInt32:
		return record{}, errors.New("overall is not a whole number of stars")
	case r.Unix == nil:
		return record{}, errors.New("no unixReviewTime")
	case *r.Unix < 0 || *r.Unix > maxUnix:
		return record{}, errors.New("unixReviewTime is not between 1970 and 9999")
	}
	return r, nil
}

func (r record) content() review.Content {
	return review.Content{Stars: int(*r.Stars), Summary: r.Summary, Text: r.Text}
}

func (r record) at() time.Time { return time.Unix(*r.Unix, 0).UTC() }

// jsonReason says what is wrong with a line and where, without quoting it.
func jsonReason(err error) error {
	if errors.Is(err, jsontext.ErrDuplicateName) {
		return errors.New("a key stands twice")
	}
	if e, ok := errors.AsType[*json.SemanticError](err); ok {
		if e.JSONPointer == "" {
			return errors.New("not a JSON object")
		}
		return fmt.Errorf("%s is of the wrong type", e.JSONPointer[1:]) // a field of record: others are not looked at
	}
	if e, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		return fmt.Errorf("not valid JSON at byte %d", e.ByteOffset)
	}
	return errors.New("not valid JSON")
}
