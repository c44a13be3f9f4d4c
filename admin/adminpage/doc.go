// Package adminpage is an http.Handler that shows operators what is wrong, and what to do about it.
//
//	ops, err := adminpage.New(db, adminpage.Config{})
//	mux.Handle("/operator/", signedIn(http.StripPrefix("/operator", ops)))
//	kinora.Run(ctx, runner, relay, ops)
//
// It works under any prefix and in any middleware, without JavaScript, and loads nothing from elsewhere.
// It does not know who may see it: put it behind the sign-in of your service.
//
// By default it changes nothing, and shows no data of users. Config.Who allows acts, and Config.Payloads
// shows payloads, headers, metadata, rows of read models and texts of errors. Ids of streams, messages
// and tasks, keys and topics are always shown.
//
// Each request reads a limited number of rows, and ends after five seconds.
package adminpage
