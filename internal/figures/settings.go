package main

// settings are the numbers with a unit that were chosen, by page. The check of a page ignores them.
var settings = []setting{
	{"README.md", "Go 1.26", "the version that go.mod requires"},
	{"README.md", "counted twice", "no measurement"},
	{"README.md", "5 % of the messages are lost, 10 % delayed, 30 % doubled", "set in tests/fault/cell_broker_loses.go"},
	{"docs/performance.md", "500 messages a second meanwhile", "the load of relay/beside-open-transaction"},
	{"docs/performance.md", "2.5 s of idleness", "the pause before each burst"},
	{"docs/performance.md", "150 bytes of data", "the size of the events"},
	{"docs/performance.md", "500 events a second", "the load while latency is measured"},
	{"docs/performance.md", "polls every 10 ms", "the peer's interval"},
	{"docs/performance.md", "(5 ms;", "the interval of River and DBOS"},
	{"docs/performance.md", "asks 100 times", "the number of questions"},
}
