package adminpage_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Two programs share a database, and only one has what a message needs. The pages say what, and which.
func TestThePagesShowWhatProgramsCan(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner())
	drafts, err := types.Encode(t.Context(), Rated{Stars: 1})
	require.NoError(t, err)
	drafts[0].Schema = 2
	_, err = w.db.Append(t.Context(), "review-cup", eventstore.Any, drafts)
	require.NoError(t, err)
	patience.Until(t, func() bool {
		rows, err := w.db.Parked(t.Context(), projector.ParkedFilter{})
		require.NoError(t, err)
		return len(rows) == 1
	}, "a parked message")

	ops, err := admin.New(w.db)
	require.NoError(t, err)
	id, err := ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "ratings"}, by)
	require.NoError(t, err)

	const need = "event review.rated 2"
	at := w.serve(adminpage.Config{}, "")
	projectors := w.get(at + "projectors").body
	require.Contains(t, projectors, "What messages need")
	require.Contains(t, projectors, `<td>`+need+`</td>`)
	require.Contains(t, projectors, `<td class="bad">none is alive</td>`)
	require.Contains(t, w.get(at).body, `<a href="./projectors">What they need</a>`)
	require.Contains(t, w.get(at+"parked?class=unable").body, `<td>`+need+`</td>`)
	message := w.get(at + "message?seq=1").body
	require.Contains(t, message, need)
	require.Contains(t, message, "when a program runs that meets its needs")
	require.Contains(t, w.get(at+"projector?name=ratings").body, "<dt>Versions of its programs</dt><dd>1</dd>")

	require.Contains(t, w.get(fmt.Sprint(at, "act?id=", id)).body, "The request waits. No living runner has what it needs.")
	require.Contains(t, w.get(at).body, fmt.Sprintf("<code>kinora acts cancel %d ", id))

	newer := provider.ServiceReport{ID: "2", Kind: "runner", Holder: "host/2", Process: "host/2", Version: "1.5", Clock: time.Now(), Can: []provider.Capability{
		{Projector: "ratings", Version: 1, Has: []string{"event kinora.ended 1", "event review.rated 1", need}}, {Projector: "stock", Version: 3}}}
	require.NoError(t, w.db.Report(t.Context(), newer, time.Hour))
	at = w.serve(adminpage.Config{}, "") // it has read no facts
	services := w.get(at + "services").body
	require.Contains(t, services, `<th scope="col">Program</th><th scope="col">Version</th><th scope="col">ratings</th><th scope="col">stock</th>`)
	require.Contains(t, services, `<td class="bad">version 1, lacks `+need+`</td><td>-</td>`)
	require.Regexp(t, `<td>host/2</td><td>1\.5</td><td class="bad">version 1, lacks handler ratings/rated of review\.rated[^<]*</td><td>version 3</td>`, services)
	require.Contains(t, w.get(at+"projectors").body, `<td>host/2</td>`, "it has what the message needs")
	for process, kinds := range map[string][]string{"host/2": {"orders/pay", "orders/ship"}, "host/3": {"orders/pay"}} {
		require.NoError(t, w.db.Report(t.Context(), provider.ServiceReport{
			ID: process + "w", Kind: "worker", Holder: process, Process: process, Version: "1.6", Clock: time.Now(), Kinds: kinds}, time.Hour))
	}
	services = w.get(w.serve(adminpage.Config{}, "") + "services").body
	require.Contains(t, services, `<th scope="col">stock</th><th scope="col">tasks of orders</th>`)
	require.Contains(t, services, `<td>version 3</td><td>all kinds</td>`)
	require.Contains(t, services, `<td>host/3</td><td>1.6</td><td>-</td><td>-</td><td class="bad">lacks orders/ship</td>`)
	newer.Can[0].Version = 2
	require.NoError(t, w.db.Report(t.Context(), newer, time.Hour))
	require.Contains(t, w.get(w.serve(adminpage.Config{}, "")+"projectors").body, "1 (&#43;1 of another version)")
}
