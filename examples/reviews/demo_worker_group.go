package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
)

// inProcesses issues the commands here, and runs workers in processes of their own, to be killed: one that does
// everything, or with --processes relays and projectors.
func (d *demo) inProcesses(ctx context.Context) (kills int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	wanted := map[role]int{wholeWork: d.Kills}
	if d.Processes > 0 {
		wanted = map[role]int{relayWork: d.Kills / 2, projectWork: d.Kills - d.Kills/2}
	}
	k := newKiller(wanted, d.due)
	c := newCrew(func(ctx context.Context) error { return settle(ctx, d.broker, d.db) })
	if d.Processes == 0 {
		c.settle = func(context.Context) error { return nil } // the worker does, in whose memory messages may be
		c.projectors = append(c.projectors, d.supervisor(self, wholeWork, 0, k))
	}
	for i := range d.Processes {
		c.relays = append(c.relays, d.supervisor(self, relayWork, i, k))
		c.projectors = append(c.projectors, d.supervisor(self, projectWork, i, k))
	}
	err = d.alongside(ctx, c.stop, c.run)
	if k.missed > 0 {
		d.say("%d more kills met nothing on its way: they do not count", k.missed)
	}
	return k.total(), err
}

func (d *demo) supervisor(self string, r role, number int, k *killer) *supervisor {
	return &supervisor{
		name: fmt.Sprintf("%s %d", r, number), role: r, ledger: d.ledger, killer: k, killed: d.killed,
		command: func(life int) *exec.Cmd {
			c := exec.Command(self, "demo-worker", "--role", string(r), "--broker", d.Broker,
				"--duplicates", strconv.FormatFloat(d.Duplicates, 'g', -1, 64),
				"--seed", strconv.FormatUint(d.Seed+uint64(life)+uint64(number)<<32, 10))
			c.Env = append(os.Environ(), demoDBEnv+"="+d.DB.flag()) // it may have a password, and anybody can read arguments
			return c
		},
	}
}

func (d *demo) killed(kills int, r role) {
	what := "between a handler's start and its ack"
	if r == relayWork {
		what = "a relay between its claim and its mark"
	}
	d.say("kill %d of %d: after %d deliveries, %s", kills, d.Kills, d.ledger.total().Deliveries, what)
}

// due spreads the kills over the run: a relay's work is what it publishes, that of others what is acked.
func (d *demo) due(r role, kill, of int) bool {
	done := d.ledger.ackedMessages()
	if r == relayWork {
		done = d.ledger.publishedEntries()
	}
	return done*(of+1) >= kill*d.commander.estimate()
}
