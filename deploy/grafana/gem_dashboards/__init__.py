"""What to watch in a run, as data. deploy/grafana/generate.py makes Grafana's dashboards of it."""
