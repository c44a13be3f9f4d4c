package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/go-json-experiment/json"

	"github.com/kinora-go/kinora/provider"
)

// newModerator returns the moderator at a URL, or the local rule if it is empty.
func newModerator(url string) moderator {
	if url == "" {
		return localRule
	}
	return (&httpModerator{url: url, client: http.DefaultClient}).ask
}

// localRule hides advertising: texts with links.
func localRule(_ context.Context, _ string, q question) (verdict, error) {
	for _, text := range []string{q.Summary, q.Text} {
		if strings.Contains(text, "http://") || strings.Contains(text, "https://") {
			return verdict{verdictHide, "it has a link"}, nil
		}
	}
	return verdict{verdictPublish, ""}, nil
}

// httpModerator posts questions as JSON, with the key in the header Idempotency-Key. The response is
// 200 with a verdict, or 202: the moderator sends the verdict later.
type httpModerator struct {
	url    string
	client *http.Client
}

const verdictMax = 64 << 10 // bytes of a response

func (m *httpModerator) ask(ctx context.Context, key string, q question) (verdict, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return verdict{}, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, m.url, bytes.NewReader(body))
	if err != nil {
		return verdict{}, err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", key)
	res, err := m.client.Do(r)
	if err != nil {
		return verdict{}, err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(res.Body, verdictMax))
	if err != nil {
		return verdict{}, err
	}
	switch {
	case res.StatusCode == http.StatusAccepted:
		return verdict{verdictLater, ""}, nil
	case res.StatusCode == http.StatusOK:
		var v verdict
		if err := json.Unmarshal(text, &v); err != nil || v.Verdict != verdictPublish && v.Verdict != verdictHide {
			return verdict{}, permanent("verdict", errors.New("the moderator's response has no verdict"))
		}
		return v, nil
	case res.StatusCode >= 400 && res.StatusCode < 500 && res.StatusCode != http.StatusTooManyRequests && res.StatusCode != http.StatusRequestTimeout:
		return verdict{}, permanent(fmt.Sprint("http_", res.StatusCode), fmt.Errorf("the moderator refuses the question: %s", res.Status))
	}
	return verdict{}, &provider.Error{
		Class: provider.ClassUnknown, Code: fmt.Sprint("http_", res.StatusCode), Err: fmt.Errorf("the moderator answers %s", res.Status),
	}
}

// permanent returns an error that no retry can help: the task is abandoned with the code.
func permanent(code string, err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}
