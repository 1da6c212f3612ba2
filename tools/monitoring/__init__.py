"""What shows and tells how a cluster is: Grafana's dashboards and Prometheus's alerts (ADR 0038).

    vocabulary  what a dashboard is made of, in a few words of ours
    pages       the dashboards, one module each: this is what people change
    grafana     a page as Grafana's JSON, by Grafana's own library
    alerts      the alerts of the chart, with the thresholds of its values

`make dashboards` writes what is generated; a test fails while it differs.
"""
