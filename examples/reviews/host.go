package main

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// knownHosts refuses writes whose Host header is not a name or an address of this service. A
// browser sends them for a page of an attacker's name that resolves to this machine (DNS
// rebinding), and takes both for one origin. listen is --addr.
func knownHosts(listen string, next http.Handler) http.Handler {
	only := ownHosts(listen, next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions {
			next.ServeHTTP(w, r)
			return
		}
		only.ServeHTTP(w, r)
	})
}

// ownHosts is knownHosts for what is not public: it refuses reads too.
func ownHosts(listen string, next http.Handler) http.Handler {
	own := hostOf(listen)
	refuse := jsonHandler(func(_ http.ResponseWriter, r *http.Request) error {
		return &httpError{Status: http.StatusForbidden, Code: "foreign_host", Message: fmt.Sprintf(
			"host %.100q: writes and the page for operators are served at localhost, loopback addresses and the host of --addr (any address if --addr names none); start the service with the host that clients use", r.Host)}
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isOwnHost(hostOf(r.Host), own) {
			refuse.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isOwnHost reports whether host is loopback, or own. If own is the unspecified address, as in
// ":8080", every address is own.
func isOwnHost(host, own string) bool {
	if host == "localhost" || host != "" && host == own {
		return true
	}
	address, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	listens, err := netip.ParseAddr(own)
	return address.IsLoopback() || own == "" || err == nil && listens.IsUnspecified()
}

// hostOf returns the host of an address with or without a port, in lower case.
func hostOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}
