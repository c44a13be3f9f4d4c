package commands

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

func printable(s string) string { return check.Printable(s, "") }

// show prints v as JSON with --json, and calls text otherwise.
func (a *App) show(v any, text func(w io.Writer)) error {
	if !a.flags.JSON {
		text(a.out())
		return nil
	}
	enc := json.NewEncoder(a.out())
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// list prints what find returns, as JSON or as a table.
func list[T any](ctx context.Context, a *App, head string, cells func(T) []string, find func(*Session, *admin.Admin) ([]T, error)) error {
	return a.with(ctx, func(s *Session, ops *admin.Admin) error {
		found, err := find(s, ops)
		if err != nil {
			return err
		}
		return a.show(append([]T{}, found...), func(w io.Writer) { table(w, head, found, cells) }) // [] and not null as JSON
	})
}

// table prints a row for each of a list, whose columns are aligned. The cells are made printable.
func table[T any](w io.Writer, head string, list []T, cells func(T) []string) {
	if len(list) == 0 {
		_, _ = fmt.Fprintln(w, "none")
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, strings.ReplaceAll(head, " | ", "\t"))
	for _, one := range list {
		_, _ = fmt.Fprintln(t, strings.Join(each(cells(one), printable), "\t"))
	}
	_ = t.Flush()
}

// each returns a list of what to returns.
func each[T, R any](list []T, to func(T) R) []R {
	all := make([]R, len(list))
	for i, one := range list {
		all[i] = to(one)
	}
	return all
}

// fields prints names and values, one a line, without those that have no value.
func fields(w io.Writer, pairs ...string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			_, _ = fmt.Fprintf(t, "%s\t%s\n", pairs[i], printable(pairs[i+1]))
		}
	}
	_ = t.Flush()
}

func number(c provider.Count) string {
	if c.AtLeast {
		return fmt.Sprintf("≥%d", c.N)
	}
	return fmt.Sprint(c.N)
}

func at(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.DateTime)
}

// decision are the flags of everything that changes something.
type decision struct {
	By     string `default:"${user}" help:"Who decides. It is stored."`
	Reason string `required:"" help:"Why. It is stored."`
	Yes    bool   `short:"y" help:"Do not ask for confirmation."`
}

func (d decision) decision() provider.Decision { return provider.Decision{By: d.By, Reason: d.Reason} }

// confirm asks before something that cannot be undone, which is what. Nothing is asked without it.
func (d decision) confirm(a *App, what string) error {
	if d.Yes || what == "" {
		return nil
	}
	if !a.isTerminal() {
		return usageError{fmt.Errorf("%s: this cannot be undone: add --yes", what)}
	}
	_, _ = fmt.Fprintf(a.err(), "%s.\nThis cannot be undone. Type yes to continue: ", printable(what))
	answer, _ := bufio.NewReader(cmp.Or[io.Reader](a.In, os.Stdin)).ReadString('\n')
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

// change asks for confirmation if there is a warning, changes rows, and prints how many were changed.
func (a *App) change(ctx context.Context, d decision, warning, done string, do func(*admin.Admin, provider.Decision) (int, error)) error {
	if err := d.confirm(a, warning); err != nil {
		return err
	}
	return a.with(ctx, func(_ *Session, ops *admin.Admin) error {
		n, err := do(ops, d.decision())
		if err != nil {
			return err
		}
		name := "changed"
		if done == deleted {
			name = done
		}
		if err := a.show(map[string]int{name: n}, func(w io.Writer) { _, _ = fmt.Fprintln(w, n, done) }); err != nil {
			return err
		}
		if n == 0 && done != deleted {
			return errors.New("nothing was selected")
		}
		return nil
	})
}

// changeNoted is change for an act that the store records if it keeps operations. If it keeps none, it says so.
func (a *App) changeNoted(ctx context.Context, d decision, warning, done string, do func(*admin.Admin, provider.Decision) (int, error)) error {
	return a.change(ctx, d, warning, done, func(ops *admin.Admin, d provider.Decision) (int, error) {
		n, err := do(ops, d)
		if _, none := ops.Operations(); none != nil && err == nil {
			_, _ = fmt.Fprintf(a.err(), "%s: this was not recorded\n", none)
		}
		return n, err
	})
}

// deleted: zero deleted rows are no error, because a command that prunes may run on a schedule.
const deleted = "deleted"

// meter shows progress: a bar on a terminal, else a line about every two seconds.
type meter struct {
	app  *App
	what string
	bar  *progressbar.ProgressBar
	last time.Time
	said int64
}

func (a *App) meter(what string) *meter { return &meter{app: a, what: what} }

func (m *meter) show(applied, total int64) {
	if total <= 0 {
		return
	}
	if m.app.Err == nil && term.IsTerminal(int(os.Stderr.Fd())) {
		if m.bar == nil {
			m.bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetWidth(30),
				progressbar.OptionSetPredictTime(true), progressbar.OptionShowCount(), progressbar.OptionSetDescription(m.what))
		}
		m.bar.ChangeMax64(total)
		_ = m.bar.Set64(min(applied, total))
		return
	}
	if now := time.Now(); applied != m.said && now.Sub(m.last) >= 2*time.Second {
		m.last, m.said = now, applied
		_, _ = fmt.Fprintf(m.app.err(), "%s: %d of %d events\n", m.what, applied, total)
	}
}

func (m *meter) clear() {
	if m.bar != nil {
		_ = m.bar.Clear()
	}
}

// timeLeft ends a context after a --wait; zero means at once.
func timeLeft(ctx context.Context, wait time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, max(wait, time.Millisecond))
}

// selects returns an error unless an act selects rows, by a list of package filters or, if hasAll, with --all alone.
func selects(list any, all, hasAll bool) error {
	if (filters.Selected(list) != "") != all {
		return nil
	}
	var flags []string
	for _, f := range filters.Fields(list) {
		if f.Selects {
			flags = append(flags, "--"+f.Name)
		}
	}
	last := len(flags) - 1
	message := "select with " + strings.Join(flags[:last], ", ") + " or " + flags[last]
	if hasAll {
		message += ", or use --all alone"
	}
	return fmt.Errorf("%s", message)
}
