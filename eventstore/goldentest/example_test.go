package goldentest_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/eventstore/goldentest"
)

// The field Stars is called Rating from Tuesday on. In a test, t is a *testing.T, and there is one
// directory: testdata/events.
func ExampleCheck() {
	type Posted struct {
		Author string `json:"author"`
		Rating int    `json:"rating"` // on Monday: Stars int `json:"stars"`
	}
	var t printed

	// Without an upcaster, the events of Monday would read as Rating 0.
	types := eventstore.NewTypes(eventstore.Type[Posted]("review.posted"))
	goldentest.Check(t, types, "testdata/monday")

	// With one, the test adds the file of version 2.
	rename := func(old json.RawMessage) (json.RawMessage, error) {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(old, &fields); err != nil {
			return nil, err
		}
		fields["rating"] = fields["stars"]
		delete(fields, "stars")
		return json.Marshal(fields)
	}
	types = eventstore.NewTypes(eventstore.Type[Posted]("review.posted", rename))
	goldentest.Check(t, types, "testdata/tuesday")

	// Output:
	// testdata/monday/review.posted.v1.json: goldentest_test.Posted
	// 	stored field "stars" is not read: add an upcaster that converts it, or declare Removed("stars")
	// 	field "rating" is not stored, so it decodes to its zero value: add an upcaster that sets it, or declare Added("rating")
	// 	With a new upcaster, new events have schema version 2. If no event of version 1 is stored yet, delete the file instead
}

// printed prints errors.
type printed struct{ testing.TB }

func (printed) Helper()                           {}
func (printed) Errorf(format string, args ...any) { fmt.Printf(format+"\n", args...) }
