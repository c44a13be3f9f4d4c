package mutant

// pages lists the mutants of the page for operators.
var pages = []Mutant{
	{
		Name:  "page_payloads",
		What:  "the page shows data of users without being allowed to",
		Edits: []Edit{{File: "admin/adminpage/page.go", Old: `v.payloads = h.cfg.Payloads != nil && h.cfg.Payloads(r)`, New: `v.payloads = h.cfg.Payloads == nil || h.cfg.Payloads(r)`}},
		Tests: []Test{{"./admin/adminpage", "TestDataOfUsersIsHiddenUnlessItIsAllowed"}},
	},
	{
		Name:  "page_markup",
		What:  "text of users is markup",
		Edits: []Edit{{File: "admin/adminpage/page.go", Old: `"html/template"`, New: `"text/template"`}, {File: "admin/adminpage/page.go", Old: `template.CSS(style), template.JS(script)`, New: `style, script`}, {File: "admin/adminpage/view.go", Old: "	\"html/template\"\n", New: ""}, {File: "admin/adminpage/view.go", Old: "template.CSS", New: "string"}, {File: "admin/adminpage/view.go", Old: "template.JS", New: "string"}},
		Tests: []Test{{"./admin/adminpage", "TestTextOfUsersIsText"}},
	},
	{
		Name:  "page_foreign",
		What:  "the page takes forms of other sites",
		Edits: []Edit{{File: "admin/adminpage/do.go", Old: `switch err := h.csrf.Check(r); {`, New: `switch err := error(nil); {`}},
		Tests: []Test{{"./admin/adminpage", "TestForeignFormsDoNothing"}},
	},
	{
		Name:  "page_reader",
		What:  "a person who may only read changes something",
		Edits: []Edit{{File: "admin/adminpage/do.go", Old: `case v.by == "":`, New: `case v.by == "\x00":`}, {File: "admin/adminpage/do.go", Old: `By: v.by, Reason`, New: `By: v.by + "x", Reason`}},
		Tests: []Test{{"./admin/adminpage", "TestForeignFormsDoNothing"}},
	},
	{
		Name:  "page_confirm",
		What:  "what cannot be undone needs no confirmation",
		Edits: []Edit{{File: "admin/adminpage/do.go", Old: `if q.err == nil && show(strings`, New: `if q.err == nil && want == "" && show(strings`}},
		Tests: []Test{{"./admin/adminpage", "TestSomeActsAreConfirmed"}},
	},
	{
		Name:  "page_streams",
		What:  "there is no limit of live pages",
		Edits: []Edit{{File: "admin/adminpage/page.go", Old: `maxStreams = 16 `, New: `maxStreams = 1600 `}},
		Tests: []Test{{"./admin/adminpage", "TestLivePages"}},
	},
}
