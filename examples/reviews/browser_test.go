package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// newBrowser starts a headless browser with a new profile. KINORA_SKIP=browser skips the test.
func newBrowser(t *testing.T) context.Context {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), "browser") {
		t.Skip("KINORA_SKIP=browser")
	}
	var path string
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	require.NotEmpty(t, path, "no browser: install Debian's package chromium (make test does), or set KINORA_SKIP=browser")
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.UserDataDir(t.TempDir()), chromedp.WindowSize(1100, 900), chromedp.WSURLReadTimeout(patience),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
		chromedp.ModifyCmdFunc(func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }))
	ctx, stop := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx)
	t.Cleanup(stop)
	ctx, stop = context.WithTimeout(ctx, patience)
	t.Cleanup(stop)
	return ctx
}

// TestBrowser: a user posts a review and sees it without a reload. The page is correct again after
// the service was killed and restarted.
func TestBrowser(t *testing.T) {
	t.Parallel()
	ctx := newBrowser(t)
	db := "sqlite:" + filepath.Join(t.TempDir(), "reviews.db")
	p := startServiceProcess(t, "--db", db, "--addr", "127.0.0.1:0")
	do := func(actions ...chromedp.Action[chromedp.Void]) {
		t.Helper()
		require.NoError(t, chromedp.Do(ctx, actions...))
	}
	shows := func(text string) chromedp.Action[chromedp.Void] {
		return chromedp.Poll[chromedp.Void](fmt.Sprintf(`document.getElementById("live").innerText.includes(%q)`, text), chromedp.WithPollingTimeout(patience))
	}
	says := func(id, text string) chromedp.Action[chromedp.Void] {
		return chromedp.Poll[chromedp.Void](fmt.Sprintf(`document.getElementById(%q).innerText === %q`, id, text), chromedp.WithPollingTimeout(patience))
	}
	post := func(author, stars, text string) {
		t.Helper()
		do(chromedp.SetValue(`[name=product]`, "teapot"), chromedp.SetValue(`[name=author]`, author),
			chromedp.Click(fmt.Sprintf(`[name=stars][value="%s"]`, stars)),
			chromedp.SetValue(`[name=text]`, text), chromedp.Click(`button`))
	}
	do(chromedp.Navigate(p.url), says("connection", "live"), shows("No reviews yet"), chromedp.Evaluate[chromedp.Void](`window.marked = true`))
	post("ann", "4", "It pours.\n<b>Well.</b>")
	do(says("notice", "Posted."), shows("<b>Well.</b>"), shows("4.00"), shows("ann on teapot"))
	screenshot(t, ctx, "posted")

	require.Equal(t, http.StatusCreated, call(t, "POST", p.url+"/products/kettle/reviews", reviewJSON("bob", 2, "Loud.")).status)
	do(shows("bob on kettle"))

	_ = p.stop(t, os.Kill)
	do(says("connection", "reconnecting…"))
	p = startServiceProcess(t, "--db", db, "--addr", strings.TrimPrefix(p.url, "http://"))
	require.Equal(t, http.StatusCreated, call(t, "POST", p.url+"/products/pan/reviews", reviewJSON("cid", 5, "Non-stick.")).status)
	do(shows("cid on pan"), shows("bob on kettle"), says("connection", "live"))
	post("ann", "1", "Broken already.")
	do(says("notice", "Posted."), shows("Broken already."), shows("1.00"))
	screenshot(t, ctx, "restarted")

	do(chromedp.SetValue(`[name=author]`, strings.Repeat("x", 199)), chromedp.SetValue(`[name=product]`, strings.Repeat("y", 199)), chromedp.Click(`button`),
		chromedp.WaitVisible(`#notice.error`))
	sameDocument, err := chromedp.Run(ctx, chromedp.Evaluate[bool](`window.marked === true`))
	require.NoError(t, err)
	require.True(t, sameDocument, "the page was not reloaded")
}

// screenshot saves a screenshot to the directory KINORA_SCREENSHOTS, if that is set.
func screenshot(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	dir := os.Getenv("KINORA_SCREENSHOTS")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(ctx, chromedp.FullScreenshot(100))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, name+".png"), png, 0o600))
}
