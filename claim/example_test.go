package claim_test

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// Attempts wait 10s, 20s and 40s, and then a minute each. The sixth is the last.
func ExampleBackoff() {
	schedule := claim.Backoff{Base: 10 * time.Second, Max: time.Minute, Attempts: 6}
	for attempt := 1; !schedule.Exhausted(attempt); attempt++ {
		delay, err := schedule.Delay(attempt)
		if err != nil {
			panic(err)
		}
		fmt.Printf("attempt %d failed: wait %s\n", attempt, delay)
	}

	// Output:
	// attempt 1 failed: wait 10s
	// attempt 2 failed: wait 20s
	// attempt 3 failed: wait 40s
	// attempt 4 failed: wait 1m0s
	// attempt 5 failed: wait 1m0s
}

// The zero value has defaults for everything. An invalid field is claim.ErrTerms.
func ExampleTerms_WithDefaults() {
	terms, err := claim.Terms{Holder: "worker-7"}.WithDefaults()
	if err != nil {
		panic(err)
	}
	fmt.Println(terms.Lease, terms.Limit, terms.Token != claim.Token{})

	_, err = claim.Terms{Lease: time.Microsecond}.WithDefaults()
	fmt.Println(err)

	// Output:
	// 5m0s 50 true
	// invalid claim terms: lease 1µs (at least 1ms), limit 50 (at least 1)
}

// Two workers claim from one table of jobs. A guarded update, here a comparison in a map, gives
// each job to one of them.
func ExamplePortable() {
	jobs, holder := []string{"a", "b", "c"}, map[string]string{}
	claimJobs := func(who string, limit int) []string {
		terms, err := claim.Terms{Holder: who, Limit: limit}.WithDefaults()
		if err != nil {
			panic(err)
		}
		free := func(_ context.Context, limit int) (rows []string, _ error) { // select … where holder is null limit …
			for _, job := range jobs {
				if holder[job] == "" && len(rows) < limit {
					rows = append(rows, job)
				}
			}
			return rows, nil
		}
		take := func(_ context.Context, job string, t claim.Terms) (string, bool, error) { // update … where holder is null
			if holder[job] != "" {
				return job, false, nil // another worker was faster
			}
			holder[job] = t.Holder
			return job, true, nil
		}
		taken, err := claim.Portable(context.Background(), terms, free, take, nil)
		if err != nil {
			panic(err)
		}
		return taken
	}
	fmt.Println(claimJobs("ann", 2), claimJobs("ben", 2))

	// Output: [a b] [c]
}
