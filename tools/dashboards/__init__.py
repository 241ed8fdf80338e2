"""The Grafana dashboards, one module each; `shared` has what they are made of."""
