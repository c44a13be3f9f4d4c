package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// load keeps four loops busy until stop is called.
func load() (stop func()) {
	var loops []*exec.Cmd
	for range 4 {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if cmd.Start() == nil {
			loops = append(loops, cmd)
		}
	}
	return func() {
		for _, cmd := range loops {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
}

// cold returns the command of a run with empty caches. As root on Debian it runs in a fresh Debian system, which has only
// git, make and their requirements. on names the system.
func cold(ctx context.Context, dir, clone string) (cmd *exec.Cmd, on string, err error) {
	debian, err := exec.CommandContext(ctx, "sh", "-c", `. /etc/os-release && [ "$ID" = debian ] && [ "$(id -u)" = 0 ] && echo "$VERSION_CODENAME"`).Output()
	if err != nil {
		cmd = exec.CommandContext(ctx, "make", "-C", clone, "test")
		cmd.Env = append(os.Environ(), "GOCACHE="+filepath.Join(dir, "build"), "GOMODCACHE="+filepath.Join(dir, "modules"))
		return cmd, "this system, with empty caches", nil
	}
	release, root := strings.TrimSpace(string(debian)), filepath.Join(dir, "debian")
	if text, err := exec.CommandContext(ctx, "sh", "-euc", install, "sh", root, release, clone).CombinedOutput(); err != nil {
		return nil, "", fmt.Errorf("make a Debian system: %w\n%s", err, text)
	}
	return exec.CommandContext(ctx, "sh", "-euc", inside, "sh", root), "Debian " + release + ", fresh", nil
}

// install makes a Debian system in a directory, with a clone, and with the names and certificates that the machine trusts.
const install = `
root=$1 release=$2 clone=$3
command -v debootstrap > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap; } > /dev/null
debootstrap --variant=minbase --include=git,make,ca-certificates "$release" "$root" > "$root.log" 2>&1 || { tail "$root.log"; exit 1; }
mkdir -p "$root/usr/local/go"
cp -r "$clone" "$root/kinora"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
`

// inside runs the tests in that system. The mounts are those of a namespace of the script, so they end with it, and so do all
// processes.
const inside = `
export root=$1 go=$(go env GOROOT)
exec unshare --mount --pid --fork --kill-child sh -c '
	mount --make-rprivate / && mount --bind "$go" "$root/usr/local/go" && mount --rbind /dev "$root/dev" &&
	mount -t tmpfs tmpfs "$root/dev/shm" && mount -t proc proc "$root/proc" || exit 1
	exec chroot "$root" env -u GOFLAGS -u GOCACHE -u GOMODCACHE HOME=/root PATH=/usr/local/go/bin:/usr/sbin:/usr/bin:/sbin:/bin make -C /kinora test
'
`

// remove removes a directory. The files of Go's module cache are read-only.
func remove(dir string) error {
	if text, err := exec.Command("sh", "-c", `chmod -R u+w "$1" && rm -rf "$1"`, "sh", dir).CombinedOutput(); err != nil {
		return fmt.Errorf("remove %s: %w\n%s", dir, err, text)
	}
	return nil
}
