// Command kinora looks after services that use Kinora: it shows their state, finds what is wrong, and
// decides about what waits for a person. It needs only the database. Run kinora --help.
//
//	kinora status --db postgres://…
//	kinora doctor --db sqlite:reviews.db
//	kinora parked replay --projector ratings --key review-42-ann --reason "fixed in 1.4"
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/kinora-go/kinora/cmd/kinora/commands"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	status := commands.Main(ctx, &commands.App{Name: "kinora"}, os.Args[1:])
	stop()
	os.Exit(status)
}
