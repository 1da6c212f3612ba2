{{/* DNS in pods, which may listen on 5353, or in a cache on the node. */}}
{{- define "tidemill.egressToDns" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- end -}}

{{- define "tidemill.egressToApiServer" -}}
- ports:
{{- range .Values.networkPolicy.egress.apiServer.ports }}
    - {port: {{ . }}, protocol: TCP}
{{- end }}
{{- with .Values.networkPolicy.egress.apiServer.to }}
  to:
{{ toYaml . | indent 4 }}
{{- end }}
{{- end -}}

{{/* The policy of the jobs and the test. Nothing connects to them. */}}
{{- define "tidemill.jobsPolicy" -}}
podSelector:
  matchLabels:
    app.kubernetes.io/instance: {{ .Release.Name }}
    app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
  matchExpressions:
    - {key: app.kubernetes.io/component, operator: In, values: [certificates, check, grow, pipeline, provision, roll, test]}
{{- if .Values.networkPolicy.egress.enabled }}
policyTypes: [Ingress, Egress]
egress:
  - ports: [{port: 8080, protocol: TCP}]
    to:
      - podSelector:
          matchLabels:
{{ include "tidemill.selectorLabels" (dict "root" . "component" "admin") | indent 12 }}
  - ports: [{port: 8081, protocol: TCP}]
    to:
      - podSelector:
          matchLabels:
{{ include "tidemill.selectorLabels" (dict "root" . "component" "proxy") | indent 12 }}
{{ include "tidemill.egressToDns" . | indent 2 }}
{{ include "tidemill.egressToApiServer" . | indent 2 }}
{{- with .Values.networkPolicy.egress.extra }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- else }}
policyTypes: [Ingress]
{{- end }}
{{- end -}}
