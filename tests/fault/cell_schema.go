package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kinora-go/kinora/providers/postgres"
)

var schemaCell = &cell{
	// Promise: O6.1
	name: "schema", number: 45,
	summary: "the program of the commit before the last migration next to this one, under load and kill -9: before, during and after the migration",
	full:    time.Minute, short: 2 * time.Second, alone: true, fails: true,
	requires: []string{"new_on_old", "old_on_new", "migrated", "parked_on_old", "parked_on_new"}, run: runSchema,
}

// harmSQL lets handlers fail for the streams in a table.
const harmSQL = `
create table harmed (stream text);
create function refuse_harmed() returns trigger language plpgsql as $$
begin
	if exists (select from harmed where stream = new.stream) then
		raise exception 'harmed';
	end if;
	return new;
end
$$;
create trigger refuse_harmed before insert on lists for each row execute function refuse_harmed()`

func runSchema(r *run) {
	old, err := r.suite.buildBefore(r.dir)
	r.must(err)
	r.serverWith(brokerConfig{Duplicate: 0.02}, old.migrate)
	_, err = r.pool.Exec(r.suite.ctx, harmSQL)
	r.must(err)
	r.readerTables(2)
	both := func(as role, change func(*settings)) {
		for _, program := range []string{"", old.child} {
			r.child(as, func(s *settings) {
				s.Program = program
				if change != nil {
					change(s)
				}
			})
		}
	}
	both(producing, func(s *settings) { s.Alone, s.Streams, s.Hot = false, 100, 0 })
	both(relaying, nil)
	both(running, nil)
	both(reading, func(s *settings) { s.More = map[string]string{"projectors": "2"} })
	for _, p := range r.all {
		p.awaitReady()
	}
	w := r.watchProgress(2)
	r.prove(func() {
		w.fed.Store(false)
		stop := r.flow()
		if !r.has("migrated") {
			r.restarts("old")
			r.migrateUnderLoad()
		}
		r.restarts("new")
		w.fed.Store(true) // the readers let commands flow too
		stop()
		r.waitDrained(20 * lease)
	})
	r.awaitRead(w)
	for _, p := range r.all {
		p.stop()
	}
	var v verdict
	_, h := r.judgeAppends(&v)
	r.judgeProjectors(2, false, h, &v)
	r.judge()
}

// restarts kills processes of both programs, on a version of the schema. Handlers fail meanwhile, for some streams.
func (r *run) restarts(version string) {
	_, err := r.pool.Exec(r.suite.ctx, `insert into harmed select stream from lists order by random() limit 3`)
	r.must(err)
	for begin, n := time.Now(), 0; n < len(r.all) || time.Since(begin) < r.span/2; n++ {
		r.sleep(r.between(50*time.Millisecond, 300*time.Millisecond))
		p := r.all[n%len(r.all)]
		p.restart()
		p.awaitReady()
		switch {
		case version == "old" && p.Program == "":
			r.inject("new_on_old", 1)
		case version == "new" && p.Program != "":
			r.inject("old_on_new", 1)
		}
	}
	r.await("a message is parked", func() bool {
		_, err := r.pool.Exec(r.suite.ctx, `insert into harmed select stream from lists order by random() limit 1`)
		r.must(err)
		return r.countOf(openParked) > 0
	})
	r.inject("parked_on_"+version, r.countOf(openParked))
	_, err = r.pool.Exec(r.suite.ctx, `delete from harmed`)
	r.must(err)
}

// migrateUnderLoad runs the migrations that the old program does not know.
func (r *run) migrateUnderLoad() {
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	before, known, err := db.SchemaVersion(r.suite.ctx)
	r.must(err)
	if before != known-1 {
		r.fail("the schema of the program before has version %d, and this one knows %d", before, known)
	}
	r.must(db.Migrate(r.suite.ctx))
	r.inject("migrated", 1)
}

// oldProgram is the program of the commit before the last migration.
type oldProgram struct{ child, kinora string }

// buildBefore builds it, from the history of git.
func (s *suite) buildBefore(dir string) (old oldProgram, err error) {
	const migrations = ":/providers/postgres/migrations"
	last, err := exec.CommandContext(s.ctx, "git", "log", "--diff-filter=A", "-1", "--format=%H", "--", migrations).Output()
	if err == nil && len(last) == 0 {
		err = errors.New("no commit adds one")
	}
	if err != nil {
		return old, fmt.Errorf("find the last migration in the history of git: %w", err)
	}
	source := filepath.Join(dir, "before")
	if err := os.Mkdir(source, 0o700); err != nil {
		return old, err
	}
	run := func(in, name string, args ...string) {
		if err != nil {
			return
		}
		cmd := exec.CommandContext(s.ctx, name, args...)
		cmd.Dir = in
		if out, failed := cmd.CombinedOutput(); failed != nil {
			err = fmt.Errorf("build the program before the last migration, which needs the history of git: %w\n%s", failed, out)
		}
	}
	archive := filepath.Join(dir, "before.tar")
	old = oldProgram{child: filepath.Join(dir, "child-before"), kinora: filepath.Join(dir, "kinora-before")}
	root, err := exec.CommandContext(s.ctx, "git", "rev-parse", "--show-toplevel").Output()
	run(strings.TrimSpace(string(root)), "git", "archive", "-o", archive, strings.TrimSpace(string(last))+"^")
	run(source, "tar", "-xf", archive)
	run(source, "go", append(append([]string{"build", "-o", old.child}, s.flags...), "github.com/kinora-go/kinora/tests/fault")...)
	run(source, "go", "build", "-o", old.kinora, "github.com/kinora-go/kinora/cmd/kinora")
	_, _ = os.Remove(archive), os.RemoveAll(source)
	return old, err
}

// migrate makes the schema that the old program knows.
func (o oldProgram) migrate(ctx context.Context, dsn string) error {
	if out, err := exec.CommandContext(ctx, o.kinora, "--db", dsn, "migrate", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("migrate by the old program: %w\n%s", err, out)
	}
	return nil
}
