package review

import (
	"time"

	"github.com/kinora-go/kinora/eventstore"
)

// Posted is the event of an author who reviews a product for the first time, or again after
// withdrawing the review.
type Posted struct {
	Product    string    `json:"product"`
	Author     string    `json:"author"`
	Stars      int       `json:"stars"`
	Summary    string    `json:"summary,omitempty"`
	Text       string    `json:"text,omitempty"`
	ReviewedAt time.Time `json:"reviewed_at"`
}

// Edited is the event of a posted review that gets new content. WasStars is the replaced value:
// projections need it and would otherwise have to read the review.
type Edited struct {
	Product    string    `json:"product"`
	Author     string    `json:"author"`
	Stars      int       `json:"stars"`
	WasStars   int       `json:"was_stars"`
	Summary    string    `json:"summary,omitempty"`
	Text       string    `json:"text,omitempty"`
	ReviewedAt time.Time `json:"reviewed_at"`
}

// Withdrawn is the event of an author who withdraws a review.
type Withdrawn struct {
	Product     string    `json:"product"`
	Author      string    `json:"author"`
	WasStars    int       `json:"was_stars"`
	WithdrawnAt time.Time `json:"withdrawn_at"`
}

// Hidden is the event of a review that a moderator has rejected. The author may post another one.
type Hidden struct {
	Product  string    `json:"product"`
	Author   string    `json:"author"`
	WasStars int       `json:"was_stars"`
	Reason   string    `json:"reason,omitempty"`
	HiddenAt time.Time `json:"hidden_at"`
}

// Types maps the events to their stored names. A stored name never changes. The Go type may be
// renamed.
var Types = eventstore.NewTypes(
	eventstore.Type[Posted]("review.posted"),
	eventstore.Type[Edited]("review.edited"),
	eventstore.Type[Withdrawn]("review.withdrawn"),
	eventstore.Type[Hidden]("review.hidden"),
)
