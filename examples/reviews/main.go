// Command reviews is a small service on Kinora: product reviews as events, and exact read models.
//
//	reviews import --db sqlite:reviews.db reviews.json.gz
//	reviews report --db sqlite:reviews.db
//	reviews serve --db sqlite:reviews.db
//	reviews project --db sqlite:reviews.db
//	reviews relay --db postgres://…
//	reviews project --db postgres://… --broker sql
//	reviews serve --db sqlite:reviews.db --broker nats --broker-url nats://…
//	reviews parked --db sqlite:reviews.db
//	reviews replay --db sqlite:reviews.db --seq 3 --dry-run
//	reviews skip --db sqlite:reviews.db --seq 4 --reason "…"
//	reviews rebuild --db sqlite:reviews.db --reason "…"
//	reviews verify --db sqlite:reviews.db
//	reviews tasks --db sqlite:reviews.db
//	reviews ops doctor --db sqlite:reviews.db
//	reviews demo
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/kinora-go/kinora/cmd/kinora/commands"
)

type commandLine struct {
	Import  importCmd         `cmd:"" help:"Import a file of reviews and bring the read model up to date."`
	Report  reportCmd         `cmd:"" help:"Print the read model: reviews, stars and average of each product."`
	Serve   serveCmd          `cmd:"" help:"Serve reviews and ratings over HTTP, as an API and as a web page."`
	Relay   relayCmd          `cmd:"" help:"Publish events to a broker until stopped. Any number of processes may run."`
	Project projectCmd        `cmd:"" help:"Apply events from the log, or from a broker, to the read model until stopped. Any number of processes may run."`
	Parked  parkedCmd         `cmd:"" help:"List parked messages (dead letters): those that could not be applied, and those that wait behind them."`
	Replay  replayCmd         `cmd:"" help:"Apply parked messages again, or show the changes with --dry-run."`
	Skip    skipCmd           `cmd:"" help:"Skip parked messages for good, so that the messages behind them are applied."`
	Rebuild rebuildCmd        `cmd:"" help:"Rebuild the read model from the events, and control rebuilds."`
	Verify  verifyCmd         `cmd:"" help:"Compare the read model with the events, and repair it. The exit status is 1 if rows differ."`
	Tasks   tasksCmd          `cmd:"" help:"List the tasks that moderate reviews, or requeue or cancel them."`
	Ops     commands.Commands `cmd:"" help:"The commands of kinora, with the handlers of this program: status, doctor, parked and others."`
	Demo    demoCmd           `cmd:"" help:"Show that the read model stays exact while messages are repeated and processes are killed."`

	DemoWorker demoWorkerCmd `cmd:"" hidden:""`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	var line commandLine
	k := kong.Parse(&line, kong.Name("reviews"), kong.UsageOnError(),
		kong.Description("Product reviews on Kinora: an example of exact read models."),
		commands.Vars(), kong.Bind(&commands.App{Name: "reviews ops", Open: openOps}), kong.BindTo(ctx, (*context.Context)(nil)))
	k.FatalIfErrorf(k.Run())
}
