// Package admin has the facts and the acts of operators. The command kinora uses it, and so can a page
// or a health check of a service.
//
//	ops, err := admin.New(db)
//	facts, err := ops.Facts(ctx)
//	d, err := ops.Doctor(ctx, provider.DiagnosisLimits{})
//	n, err := ops.Replay(ctx, projector.ParkedFilter{Key: "review-42-ann"}, projector.Decision{By: "ann", Reason: "fixed in 1.4"})
//
// Facts changes nothing, and its cost does not depend on how much is stored: numbers above the limit of
// a count have AtLeast. Its JSON form is stable: fields may be added.
//
// A store that keeps no projectors, tasks or operations can be looked after too: see Missing.
//
// Each act requires a Decision: who decides, and why. It is stored with the parked message, the task or
// the generation, and for everything else in a list of acts (Acts). Acts that need the handlers of a
// projector (DryRun, Verify, Rebuild) are requests: a running runner takes them up within about a second.
// Await waits for the outcome.
package admin
