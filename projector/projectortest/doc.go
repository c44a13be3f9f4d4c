// Package projectortest tests projectors and aggregates in the tests of an application.
//
// A Kit has an application's projector, a function that opens an empty database, and a function that
// reads the read model. Given applies events and compares the rows. ExactlyOnce applies them with
// duplicates, crashes, lost replies and rebuilds, and Commutes in other orders: the rows must be those of
// one clean pass. A failure shows the shortest history that was found. Each pass has a real runner and a
// database of its own.
//
//	var ratings = projectortest.New(openTest, Ratings, readRatings)
//
//	func TestRatings(t *testing.T)            { ratings.Given(t, events...).Then("42 | 2 | 6") }
//	func TestRatingsExactlyOnce(t *testing.T) { ratings.ExactlyOnce(t, events...) }
//
// The function Given tests an aggregate: Given(t, newReview, past...).When(decide).Then(events...).
//
// docs/reliability.md lists the mistakes that the kit finds, and those that it cannot find.
package projectortest
