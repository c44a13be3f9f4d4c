package mutant

// routers lists the mutants of handlers and projectors in a Watermill router.
var routers = []Mutant{
	{
		Name:  "middleware_no_marker",
		What:  "the middleware runs a handler in a transaction without a marker",
		Edits: []Edit{{File: "projector/middleware.go", Old: "Handlers: []provider.Handler{{Name: o.name}}, Mark: true,", New: "Handlers: []provider.Handler{{Name: o.name}},"}},
		Tests: []Test{{"./internal/routertest", "TestMiddlewareInARouter"}, {"./internal/routertest", "TestMiddlewareAfterAKill"}},
	},
	{
		Name:  "middleware_router_context",
		What:  "the close of a router ends the transaction of a handler in the middleware",
		Edits: []Edit{{File: "projector/middleware.go", Old: "ctx := context.WithoutCancel(of)", New: "ctx := of"}},
		Tests: []Test{{"./internal/routertest", "TestMiddlewareWhileTheRouterCloses"}},
	},
	{
		Name:  "middleware_shared",
		What:  "two handlers of a router share the markers of a middleware",
		Edits: []Edit{{File: "projector/middleware.go", Old: "user := *o.user.Load(); user != name", New: "user := *o.user.Load(); user == \"\""}},
		Tests: []Test{{"./internal/routertest", "TestMiddlewareOfTwoHandlers"}},
	},
	{
		Name: "handle_before_commit",
		What: "Runner.Handle returns as soon as a worker has the message",
		Edits: []Edit{{File: "projector/source.go", Old: `	select {
	case <-own.Acked():
		return nil
	case <-r.ended:
	}
`, New: `	if r.taking.Err() == nil {
		return nil
	}
	<-r.ended
`}},
		Tests: []Test{{"./projector", "TestHandleAppliesAsASubscriptionDoes"}, {"./internal/routertest", "TestRunnerInARouter"}},
	},
	{
		Name:  "publisher_unordered",
		What:  "the publisher in a transaction does not keep the commit order of a key",
		Edits: []Edit{{File: "outbox/message.go", Old: `OrderedKey: key != ""`, New: "OrderedKey: false"}},
		Tests: []Test{{"./internal/routertest", "TestPublisherOrdersAKey"}},
	},
}
