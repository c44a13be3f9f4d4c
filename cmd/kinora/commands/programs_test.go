package commands_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Two programs share a database, and only one has what a message needs. The commands say what, and which.
func TestWhatMessagesNeedIsShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner())
	drafts, err := types.Encode(t.Context(), Rated{Stars: 1})
	require.NoError(t, err)
	drafts[0].Schema = 2
	_, err = w.db.Append(t.Context(), "review-cup", eventstore.Any, drafts)
	require.NoError(t, err)

	const need = "event review.rated 2"
	status := []string{"status"}
	require.Contains(t, w.shows(status, "MESSAGES WAIT FOR A PROGRAM THAT HAS WHAT THEY NEED", need), "(UTC)")
	require.NotContains(t, w.ok(status...), "PROGRAMS", "there is only one")
	w.shows([]string{"doctor"}, "Messages of the projector ratings wait for a program that meets their needs", "- needs: "+need)
	require.Contains(t, w.ok("parked", "ls", "--class", "unable"), need)
	require.Contains(t, w.ok("parked", "ls", "--class", "permanent"), "none")
	require.Contains(t, w.ok("parked", "show", "1"), need)
	try := []string{"parked", "dry-run", "--projector", "ratings", "--all", "--reason", "look", "--wait", "100ms"}
	require.Contains(t, w.fails(1, try...), "waits: No living runner has what it needs.")
	require.Contains(t, w.fails(1, "parked", "replay", "--seq", "1", "--reason", "r"), "lists them, and what they need")

	ops, err := admin.New(w.db)
	require.NoError(t, err)
	id, err := ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "ratings"}, provider.Decision{By: "ann", Reason: "look"})
	require.NoError(t, err)
	w.shows([]string{"doctor"}, fmt.Sprintf("Nobody can answer request %d: dry-run of ratings", id), fmt.Sprintf("> kinora acts cancel %d --reason", id))
	require.Contains(t, w.ok("acts", "cancel", fmt.Sprint(id), "--reason", "r"), "1 canceled")

	newer := provider.ServiceReport{ID: "2", Kind: "runner", Holder: "host/2", Process: "host/2", Version: "1.5", Clock: time.Now(), Can: []provider.Capability{
		{Projector: "ratings", Version: 1, Has: []string{"event kinora.ended 1", "event review.rated 1", need}}, {Projector: "other", Version: 3}}}
	require.NoError(t, w.db.Report(t.Context(), newer, time.Hour))
	out := w.shows(status, "PROGRAMS", "version 1, lacks "+need, "host/2")
	require.Regexp(t, `host/2 +1\.5 +version 3 +version 1, lacks handler ratings/rated of review\.rated`, out, "each lacks something")
	w.shows([]string{"doctor"}, "Nothing is wrong.")
	newer.Can[0].Version = 2
	require.NoError(t, w.db.Report(t.Context(), newer, time.Hour))
	require.Regexp(t, `ratings +1 +live +1 .* 1 \(\+1 of another version\)`, w.ok("projectors", "ls"))
}
