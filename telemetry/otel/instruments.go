package otel

import (
	"errors"

	"go.opentelemetry.io/otel/metric"
)

// instruments are the metrics that observers record. Those of Watch are in watch.go.
type instruments struct {
	updateTime          metric.Float64Histogram
	appended, conflicts metric.Int64Counter

	sent                        metric.Int64Counter
	sendTime                    metric.Float64Histogram
	claimTime, markTime         metric.Float64Histogram
	entryWait                   metric.Float64Histogram
	marks, lateMarks, pauses    metric.Int64Counter
	heldEntries, deletedEntries metric.Int64Counter
	emptyClaims, suspects       metric.Int64Counter

	consumed                                        metric.Int64Counter
	processTime, handlerTime, delay                 metric.Float64Histogram
	handled, retries, parkings, replays             metric.Int64Counter
	completed, unmarked, pruned                     metric.Int64Counter
	taskClaimTime, stepTime, runTime                metric.Float64Histogram
	changeTime, countTime                           metric.Float64Histogram
	claimedTasks, fenced, deletedTasks, watchErrors metric.Int64Counter
	emptyTaskClaims, vanished                       metric.Int64Counter
}

// Boundaries of histograms, in seconds: those of the conventions, and wider ones for messages that
// wait.
var (
	short = metric.WithExplicitBucketBoundaries(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
	long  = metric.WithExplicitBucketBoundaries(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 3600, 21600, 86400)
)

func (m *instruments) create(meter metric.Meter) error {
	var errs []error
	for _, c := range []struct {
		to               *metric.Int64Counter
		name, unit, text string
	}{
		{&m.appended, "kinora.append.events", "{event}", "Events that updates have appended"},
		{&m.conflicts, "kinora.append.conflicts", "{conflict}", "Conflicts of updates, after which they decided again or failed"},
		{&m.sent, "messaging.client.sent.messages", "{message}", "Messages that relays attempted to publish"},
		{&m.marks, "kinora.relay.marks", "{entry}", "Entries that relays have marked, by their new status: claimed is a renewal, pending a release"},
		{&m.lateMarks, "kinora.relay.late_marks", "{entry}", "Marks that changed nothing, because another relay had taken the entry over"},
		{&m.emptyClaims, "kinora.relay.empty_claims", "{claim}", "Claims that found no entry, or lost each race for one"},
		{&m.suspects, "kinora.relay.suspects", "{entry}", "Claimed entries whose earlier claim ended with its lease"},
		{&m.pauses, "kinora.relay.pauses", "{pause}", "Pauses of topics whose publishes all failed"},
		{&m.heldEntries, "kinora.relay.held", "{entry}", "Entries that were held behind others that wait for long"},
		{&m.deletedEntries, "kinora.relay.deleted", "{entry}", "Entries that were deleted at the end of their retention"},
		{&m.consumed, "messaging.client.consumed.messages", "{message}", "Messages of committed units"},
		{&m.handled, "kinora.projector.handled", "{message}", "Messages that handlers have applied, skipped or failed to apply"},
		{&m.retries, "kinora.projector.retries", "{unit}", "Units that failed for a reason outside of their messages, and are tried again"},
		{&m.parkings, "kinora.projector.parkings", "{message}", "Messages that were parked, or stay parked after a failed attempt"},
		{&m.replays, "kinora.projector.replays", "{message}", "Parked messages that were applied"},
		{&m.completed, "kinora.projector.completed", "{message}", "Events that were read from the log because the broker had not delivered them"},
		{&m.unmarked, "kinora.projector.unmarked", "{message}", "Messages that were applied in a store that keeps no markers"},
		{&m.pruned, "kinora.projector.pruned", "{row}", "Old markers, and replayed and skipped messages, that were deleted"},
		{&m.claimedTasks, "kinora.task.claimed", "{task}", "Tasks that workers have claimed"},
		{&m.emptyTaskClaims, "kinora.task.empty_claims", "{claim}", "Claims that found no task, or lost each race for one"},
		{&m.vanished, "kinora.task.vanished", "{task}", "Claimed tasks whose earlier claim ended with its lease"},
		{&m.fenced, "kinora.task.fenced", "{change}", "Changes that came too late, because another worker had taken the task over"},
		{&m.deletedTasks, "kinora.task.deleted", "{task}", "Tasks that were deleted at the end of their retention"},
		{&m.watchErrors, "kinora.watch.errors", "{query}", "Queries of Watch that failed: their gauges have no value"},
	} {
		var err error
		*c.to, err = meter.Int64Counter(c.name, metric.WithUnit(c.unit), metric.WithDescription(c.text))
		errs = append(errs, err)
	}
	for _, h := range []struct {
		to         *metric.Float64Histogram
		name, text string
		buckets    metric.HistogramOption
	}{
		{&m.updateTime, "kinora.append.duration", "Duration of updates: loading, deciding and appending", short},
		{&m.sendTime, "messaging.client.operation.duration", "Duration of Publish calls", short},
		{&m.claimTime, "kinora.relay.claim.duration", "Duration of claims of entries", short},
		{&m.markTime, "kinora.relay.mark.duration", "Duration of statements that mark entries", short},
		{&m.entryWait, "kinora.relay.wait", "Time from the append of an entry to its claim", long},
		{&m.processTime, "messaging.process.duration", "Duration of units", short},
		{&m.handlerTime, "kinora.projector.handler.duration", "Duration of handlers", short},
		{&m.delay, "kinora.projector.delay", "Time from the recording of an event to the commit of its effect", long},
		{&m.taskClaimTime, "kinora.task.claim.duration", "Duration of claims of tasks", short},
		{&m.stepTime, "kinora.task.step.duration", "Duration of steps", short},
		{&m.runTime, "kinora.task.run.duration", "Duration of runs of tasks, by the status that they lead to", short},
		{&m.changeTime, "kinora.task.change.duration", "Duration of statements that change tasks", short},
		{&m.countTime, "kinora.task.count.duration", "Duration of counting a task in its group", short},
	} {
		var err error
		*h.to, err = meter.Float64Histogram(h.name, metric.WithUnit("s"), metric.WithDescription(h.text), h.buckets)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
