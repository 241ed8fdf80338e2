// Definitions of routes by SNI, no program.
module streamrl.io/testtools/gateway-api

go 1.25.0

require sigs.k8s.io/gateway-api v1.5.0
