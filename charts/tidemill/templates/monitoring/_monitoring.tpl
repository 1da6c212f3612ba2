{{/* What monitors of pods and of Services have in common. */}}

{{/* The pods that have metrics: all of the release but those of its jobs. */}}
{{- define "tidemill.scraped" -}}
matchLabels:
  app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ include "tidemill.components" . }}}
{{- end -}}

{{/* Targets are of a job for each kind of process: alerts ask by it whether a proxy is up. */}}
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
