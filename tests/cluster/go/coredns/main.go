// CoreDNS with the plugins of a test cluster alone: the stock build compiles the clients of three clouds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
)

func main() {
	// The order in which plugins see a query, as in CoreDNS's own plugin.cfg.
	dnsserver.Directives = []string{
		"reload", "health", "ready", "errors", "log", "cache", "hosts", "kubernetes", "loop", "forward",
	}
	coremain.Run()
}
