package review

import (
	"time"

	"github.com/kinora-go/kinora/eventstore"
)

// Posted says that an author reviewed a product for the first time, or anew after withdrawing.
type Posted struct {
	Product    string    `json:"product"`
	Author     string    `json:"author"`
	Stars      int       `json:"stars"`
	Summary    string    `json:"summary,omitempty"`
	Text       string    `json:"text,omitempty"`
	ReviewedAt time.Time `json:"reviewed_at"`
}

// Edited says that a review that stands has new content. It carries what it replaces as far as projections need it,
// so that none has to look the review up.
type Edited struct {
	Product    string    `json:"product"`
	Author     string    `json:"author"`
	Stars      int       `json:"stars"`
	WasStars   int       `json:"was_stars"`
	Summary    string    `json:"summary,omitempty"`
	Text       string    `json:"text,omitempty"`
	ReviewedAt time.Time `json:"reviewed_at"`
}

// Withdrawn says that the author took the review back.
type Withdrawn struct {
	Product     string    `json:"product"`
	Author      string    `json:"author"`
	WasStars    int       `json:"was_stars"`
	WithdrawnAt time.Time `json:"withdrawn_at"`
}

// Types gives the events their stored names. A name, once stored, stays; the Go type may be renamed.
var Types = eventstore.NewTypes(
	eventstore.Type[Posted]("review.posted"),
	eventstore.Type[Edited]("review.edited"),
	eventstore.Type[Withdrawn]("review.withdrawn"),
)
