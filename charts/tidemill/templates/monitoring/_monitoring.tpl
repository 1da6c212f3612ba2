{{/* Common parts of PodMonitors and ServiceMonitors. */}}

{{/* The pods with metrics: all pods of the release except those of jobs. */}}
{{- define "tidemill.scraped" -}}
matchLabels:
  app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ include "tidemill.components" . }}}
{{- end -}}

{{/* One job label per kind of process; alerts use it. */}}
{{- define "tidemill.relabelings" -}}
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component]
    targetLabel: job
    replacement: tidemill-$1
{{- with .relabelings }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}

{{/* The token that a scrape sends. The Secret is in the namespace of the monitor. */}}
{{- define "tidemill.scrapeToken" -}}
{{- with .Values.monitoring.auth }}
{{- if .enabled }}
authorization:
  type: Bearer
  credentials: {name: {{ include "tidemill.metricsSecret" $ }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end -}}
