// Command quickstart posts a review and reads it back from a read model, in one SQLite file.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Events are plain structs; one table gives them their stored names.
type ReviewPosted struct {
	Product, Author string
	Stars           int
}

var types = eventstore.NewTypes(eventstore.Type[ReviewPosted]("review.posted"))

// An aggregate folds its past in Apply, and decides by returning new events.
type Review struct{ posted bool }

func (r *Review) Apply(event any) {
	if _, ok := event.(ReviewPosted); ok {
		r.posted = true
	}
}

func (r *Review) Post(product, author string, stars int) ([]any, error) {
	if stars < 1 || stars > 5 {
		return nil, fmt.Errorf("%d stars: want 1 to 5", stars)
	}
	if r.posted {
		return nil, nil // nothing new: nothing is written
	}
	return []any{ReviewPosted{product, author, stars}}, nil
}

// A handler writes the read model in the transaction that it is given; its marker is in there too.
func onPosted(ctx context.Context, tx *sql.Tx, e eventstore.Event[ReviewPosted]) error {
	_, err := tx.ExecContext(ctx, `
		insert into ratings (product, reviews, stars) values (?1, 1, ?2)
		on conflict (product) do update set reviews = reviews + 1, stars = stars + ?2`,
		e.Data.Product, e.Data.Stars)
	return err
}

var ratings = projector.Define("product-ratings", types, projector.Options{Markers: true},
	projector.On("posted", onPosted)) // "product-ratings/posted", for ever

func run(ctx context.Context, path string) (err error) {
	db, err := sqlite.Open(ctx, path, &sqlite.Config{Route: outbox.ByCategory})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.Migrate(ctx); err != nil {
		return err
	}
	const table = `create table if not exists ratings (product text primary key, reviews int, stars int)`
	if _, err := db.SQL().ExecContext(ctx, table); err != nil {
		return err
	}

	// A broker in memory must wait for acks: what it lost in a crash would be marked as published.
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	reviews, err1 := eventstore.NewRepository(db, types, "review", func(string) *Review { return &Review{} }, nil)
	runner, err2 := projector.NewRunner(db, projector.Subscribe(broker, "review"), projector.RunnerConfig{}, ratings)
	relay, err3 := outbox.NewRelay(db, broker, nil)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	app, err := kinora.Start(ctx, runner, relay) // consumers first
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, app.Stop(), broker.Close()) }() // the relay stops first, the database closes last

	id := eventstore.JoinID("42", "ann")
	at, err := reviews.Update(ctx, id, func(r *Review) ([]any, error) { return r.Post("42", "ann", 5) })
	if err != nil {
		return err
	}
	if err := ratings.Wait(ctx, db, at); err != nil { // read your write
		return err
	}
	var n, stars int
	if err := db.SQL().QueryRowContext(ctx, `select reviews, stars from ratings where product = '42'`).Scan(&n, &stars); err != nil {
		return err
	}
	fmt.Printf("product 42: %d review(s), %.1f stars\n", n, float64(stars)/float64(n))
	return nil
}

func main() {
	if err := run(context.Background(), "quickstart.db"); err != nil {
		log.Fatal(err)
	}
}
