"""Sources of the Grafana dashboards and the Prometheus alerts (ADR 0038).

    vocabulary  classes of a dashboard: page, row, panel, query
    pages       the dashboards, one module each; edit these
    grafana     conversion of a page to Grafana's JSON
    alerts      the alerts of the chart, with the thresholds of its values

`make dashboards` generates the files; a test fails if a file is out of date.
"""
