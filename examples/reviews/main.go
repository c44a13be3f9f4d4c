// Command reviews is a small service on Kinora: product reviews as events, and read models that stay exact.
//
//	reviews import --db sqlite:reviews.db reviews.json.gz
//	reviews report --db sqlite:reviews.db
//	reviews serve --db sqlite:reviews.db
//	reviews relay --db postgres://…
//	reviews project --db postgres://…
//	reviews parked --db sqlite:reviews.db
//	reviews replay --db sqlite:reviews.db --seq 3 --dry-run
//	reviews skip --db sqlite:reviews.db --seq 4 --reason "…"
//	reviews demo
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

type commandLine struct {
	Import  importCmd  `cmd:"" help:"Import a file of reviews, and bring the read model up to date."`
	Report  reportCmd  `cmd:"" help:"Print the read model: reviews, stars and average of each product."`
	Serve   serveCmd   `cmd:"" help:"Serve reviews and ratings over HTTP, with a page."`
	Relay   relayCmd   `cmd:"" help:"Publish events to topics in the database until told to stop; run any number of these."`
	Project projectCmd `cmd:"" help:"Apply events from these topics to the read model until told to stop; run any number of these."`
	Parked  parkedCmd  `cmd:"" help:"List the messages that were set aside because they could not be applied, and what waits behind them."`
	Replay  replayCmd  `cmd:"" help:"Apply parked messages again, or show what that would change."`
	Skip    skipCmd    `cmd:"" help:"Give up on parked messages, so that what waits behind them goes on."`
	Demo    demoCmd    `cmd:"" help:"Show that the read model stays exact while messages are repeated and processes killed."`

	DemoWorker demoWorkerCmd `cmd:"" hidden:""`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait
	var line commandLine
	k := kong.Parse(&line, kong.Name("reviews"), kong.UsageOnError(),
		kong.Description("Product reviews on Kinora: an example of exact read models."),
		kong.Vars{"user": userName()}, kong.BindTo(ctx, (*context.Context)(nil)))
	k.FatalIfErrorf(k.Run())
}
