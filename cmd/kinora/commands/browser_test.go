package commands_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/kinora-go/kinora/internal/patience"
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
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.UserDataDir(t.TempDir()), chromedp.WindowSize(1100, 900), chromedp.WSURLReadTimeout(patience.Limit()),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
		chromedp.ModifyCmdFunc(func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }))
	ctx, stop := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx)
	t.Cleanup(stop)
	ctx, stop = context.WithTimeout(ctx, patience.Limit())
	t.Cleanup(stop)
	return ctx
}

// person operates a service by its page.
type person struct {
	*testing.T
	ctx     context.Context
	url     string
	scripts bool
}

func (p *person) do(actions ...chromedp.Action[chromedp.Void]) {
	p.Helper()
	require.NoError(p, chromedp.Do(p.ctx, actions...))
}

func (p *person) open(path string) { p.Helper(); p.do(chromedp.Navigate(p.url + path)) }

func (p *person) text() string {
	p.Helper()
	text, err := chromedp.Run(p.ctx, chromedp.Evaluate[string](`document.body.innerText`))
	require.NoError(p, err)
	return text
}

// sees waits until the page shows all of these texts. Without scripts a person reloads it.
func (p *person) sees(texts ...string) {
	p.Helper()
	patience.NoError(p, func() error {
		shown := p.text()
		if !slices.ContainsFunc(texts, func(t string) bool { return !strings.Contains(shown, t) }) {
			return nil
		}
		if !p.scripts {
			p.do(chromedp.Reload())
		}
		return fmt.Errorf("a page that shows %q:\n%s", texts, shown)
	})
}

// follows clicks a link.
func (p *person) follows(text string) {
	p.Helper()
	p.navigates(chromedp.Click(fmt.Sprintf(`//main//a[normalize-space()=%q]`, text)))
}

// navigates does what leads to another page, and waits for that.
func (p *person) navigates(does chromedp.Action[chromedp.Void]) {
	p.Helper()
	p.do(chromedp.Evaluate[chromedp.Void](`document.documentElement.setAttribute("data-old", "yes")`), does)
	patience.Until(p, func() bool {
		is, err := chromedp.Run(p.ctx, chromedp.Evaluate[bool](`document.readyState === "complete" && !document.documentElement.hasAttribute("data-old")`))
		return err == nil && is
	}, "the next page")
}

// submits fills in a form and submits it with the Enter key.
func (p *person) submits(action string, values ...string) {
	p.Helper()
	form := fmt.Sprintf(`form[action="./%s"]`, action)
	for i := 0; i < len(values); i += 2 {
		field := fmt.Sprintf(`%s [name=%s]`, form, values[i])
		p.do(chromedp.WaitVisible(field), chromedp.SendKeys(field, values[i+1]))
	}
	p.navigates(chromedp.SendKeys(fmt.Sprintf(`%s [name=%s]`, form, values[len(values)-2]), kb.Enter))
}

// ui serves the page by the command, and returns its address.
func (w *world) ui(args ...string) string {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	out, in := io.Pipe()
	said := &syncBuffer{}
	done := make(chan int, 1)
	go func() {
		app := &commands.App{Out: in, Err: said, Terminal: func() bool { return false }}
		done <- commands.Main(ctx, app, append([]string{"ui", "--listen", "127.0.0.1:0", "--db", w.dsn, "--json"}, args...))
		in.Close()
	}()
	var printed struct{ URL string }
	require.NoError(w, json.NewDecoder(out).Decode(&printed), said)
	go func() { _, _ = io.Copy(io.Discard, out) }()
	w.Cleanup(func() {
		cancel()
		require.Zero(w, <-done, said)
		require.NotContains(w, said.String(), canary, "the log has data of users")
	})
	return printed.URL
}

type syncBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}
func (b *syncBuffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.all.String() }

// A poisoned service is found, understood, tried and repaired with the page alone: with a mouse, live, and
// then by forms and links without JavaScript.
func TestAPoisonedServiceIsRepairedFromThePage(t *testing.T) {
	t.Parallel()
	ctx := newBrowser(t)
	for _, scripts := range []bool{true, false} {
		t.Run(fmt.Sprintf("scripts %t", scripts), func(t *testing.T) {
			w := newWorld(t)
			w.text = "It keeps the tea warm."
			w.start(w.runner(), w.relay(&publisher{}))
			p := &person{T: t, ctx: ctx, url: w.ui("--acts", "--payload", "--by", "ann"), scripts: scripts}
			_, err := chromedp.Call(ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !scripts})
			require.NoError(t, err)
			p.open("")
			p.sees("Nothing is wrong")
			p.busy(w)
			w.rate("cup-ann", 5, 0, 4, 3)
			w.rate("tea-ben", 2)

			p.sees("Messages of the projector ratings are stuck", "2 wait behind it", "kinora parked dry-run --projector ratings --key review-cup-ann")
			p.screenshots("overview")
			p.follows("Stuck messages")
			p.sees("permanent", "ratings/rated", "review-cup-ann")
			p.follows(firstNumber(t, w))
			p.sees("when a person decides", "You act as ann.")
			p.do(chromedp.Click(`//summary[normalize-space()="Error"]`))
			p.sees("no stars: " + w.text)

			p.submits("dry-run", "reason", "look")
			p.sees("Messages that would fail", "no stars: "+w.text)
			require.Equal(t, 5, w.stars("review-cup-ann"), "a dry run changes nothing")
			w.fixed.Store(true) // a fixed program is deployed
			p.submits("dry-run", "reason", "look again")
			p.sees("Would be applied\n3", "Would fail\n0", "stars: 5", "stars: 12", "Replay")
			p.screenshots("dry-run")
			require.Equal(t, 5, w.stars("review-cup-ann"), "a dry run changes nothing")

			p.submits("replay", "reason", "fixed in 1.4")
			p.sees("3 messages are applied again", "No message is parked")
			require.Equal(t, 12, w.stars("review-cup-ann"))
			p.open("")
			p.sees("Nothing is wrong")
			p.open("acts")
			p.sees("dry-run", "look again", "ann")
			require.Contains(t, w.ok("parked", "ls", "--state", "replayed"), "ann", "who decided")
			p.isNotFooled(w)
		})
	}
}

// isNotFooled: markup in names, payloads and texts of errors is text in the browser.
func (p *person) isNotFooled(w *world) {
	p.Helper()
	const markup = `<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>`
	w.text = markup
	w.fixed.Store(false)
	w.rate(markup, 0, 1)
	w.shows([]string{"parked", "ls"}, "stuck", "waiting")
	for _, path := range []string{"parked", "message?seq=" + firstNumber(p.T, w), "stream?id=" + url.QueryEscape("review-"+markup), "streams", "outbox?status=published", ""} {
		p.open(path)
		if path == "" {
			p.sees("are stuck")
		} else if !strings.HasPrefix(path, "outbox") {
			p.sees(markup)
		}
		fooled, err := chromedp.Run(p.ctx, chromedp.Evaluate[bool](`window.pwned === 1 || document.querySelector("main img, main script") !== null`))
		require.NoError(p, err)
		require.False(p, fooled, path)
	}
}

func firstNumber(t *testing.T, w *world) string {
	t.Helper()
	list := decode[[]struct{ Seq int64 }](w, w.ok("parked", "ls", "--state", "stuck", "--json"))
	require.Len(t, list, 1)
	return fmt.Sprint(list[0].Seq)
}

// busy is some work, so that the plots of screenshots have something to show.
func (p *person) busy(w *world) {
	p.Helper()
	if os.Getenv("KINORA_SCREENSHOTS") == "" || !p.scripts {
		return
	}
	for i := range 200 {
		for range rand.IntN(8 + 6*(i/40%3)) {
			w.rate(fmt.Sprintf("pot-%d", rand.IntN(500)), 1+rand.IntN(5))
		}
		time.Sleep(time.Second) // the plots show a rate over time
	}
}

// screenshots saves the page, for a wide screen and for a phone, to the directory KINORA_SCREENSHOTS, if
// that is set.
func (p *person) screenshots(name string) {
	p.Helper()
	dir := os.Getenv("KINORA_SCREENSHOTS")
	if dir == "" || !p.scripts {
		return
	}
	for _, screen := range []struct {
		name          string
		width, height int64
		scheme        string
	}{{"", 1100, 760, "light"}, {"-dark", 1100, 760, "dark"}, {"-phone", 390, 844, "light"}} {
		_, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: screen.scheme}}})
		require.NoError(p, err)
		p.do(chromedp.EmulateViewport(screen.width, screen.height))
		picture, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
		require.NoError(p, err)
		require.Less(p, len(picture), 150_000)
		require.NoError(p, os.WriteFile(filepath.Join(dir, "operators-"+name+screen.name+".png"), picture, 0o644))
	}
	p.do(chromedp.EmulateViewport(1100, 900))
}
