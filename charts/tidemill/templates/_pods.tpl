{{/* Common parts of the pods of all processes. */}}

{{- define "tidemill.image" -}}
{{- $image := merge (default dict .of.image) .root.Values.image -}}
{{- $repository := $image.repository -}}
{{- if and .root.Values.image.perProcess (not (default dict .of.image).repository) -}}
{{- $repository = printf "%s-%s" $repository .process -}}
{{- end -}}
{{- with $image.registry -}}{{ . }}/{{- end -}}
{{- $repository -}}
{{- if $image.digest -}}@{{ $image.digest }}{{- else -}}:{{ default .root.Chart.AppVersion $image.tag }}{{- end -}}
{{- end -}}

{{/* Bytes of a quantity such as 512Mi, 1e9 or 0.5Gi. */}}
{{- define "tidemill.bytes" -}}
{{- if not (kindIs "string" .) -}}
{{- int64 . -}}
{{- else -}}
{{- $quantity := . -}}
{{- $units := dict "m" 0.001 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "E" 1000000000000000000 "" 1 -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $quantity -}}
{{- mulf (float64 $number) (float64 (get $units (trimPrefix $number $quantity))) | int64 -}}
{{- end -}}
{{- end -}}

{{/* Longest duration of a stop in seconds: (dict "of" component "config" settings "delayMs" ms "timeoutMs" ms
"moreSeconds" s), and for a broker that writes a checkpoint first "checkpointMs" ms. */}}
{{- define "tidemill.grace" -}}
{{- $ms := add (int64 (dig "drain_delay_ms" .delayMs .config)) (int64 (dig "drain_timeout_ms" .timeoutMs .config)) -}}
{{- $longest := add $ms (.checkpointMs | default 0) -}}
{{- if .of.terminationGracePeriodSeconds -}}
{{- if lt (mul (int64 .of.terminationGracePeriodSeconds) 1000) $longest -}}
{{- $parts := empty .checkpointMs | ternary "drain_delay_ms and drain_timeout_ms" "drain_delay_ms, drain_timeout_ms and a checkpoint" -}}
{{- fail (printf "terminationGracePeriodSeconds is %v, and a stop may take %d ms (%s): the process would be killed while it drains" .of.terminationGracePeriodSeconds $longest $parts) -}}
{{- end -}}
{{- .of.terminationGracePeriodSeconds -}}
{{- else -}}
{{- add (ceil (divf $ms 1000)) .moreSeconds -}}
{{- end -}}
{{- end -}}

{{/* Number of proxies. With autoscaling it is empty, except for an upgrade by Helm: if a field is missing
in the new manifest and was in the old one, Helm sets its default, which is one proxy. Then it is the
current number. */}}
{{- define "tidemill.proxies" -}}
{{- if .Values.proxy.autoscaling.enabled -}}
{{- $standing := lookup "apps/v1" "Deployment" .Release.Namespace (include "tidemill.name" (list . "proxy")) -}}
{{- with $standing -}}
{{- max (dig "spec" "replicas" 1 . | int) (int $.Values.proxy.autoscaling.minReplicas) -}}
{{- end -}}
{{- else -}}
{{- int .Values.proxy.replicas -}}
{{- end -}}
{{- end -}}

{{/* Fields of a pod except its containers. */}}
{{- define "tidemill.pod" -}}
{{- $root := .root -}}
{{- $of := .of -}}
{{- /* Anti-affinity between the replicas of one group, or between groups of one replica. */ -}}
{{- $apart := omit . "group" -}}
{{- if .isReplicated -}}{{- $apart = . -}}{{- end -}}
serviceAccountName: {{ include "tidemill.serviceAccountName" . }}
automountServiceAccountToken: {{ default false .token }}
# The processes do not use the variables of Services.
enableServiceLinks: false
{{- with $root.Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with $root.Values.dnsConfig }}
dnsConfig:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with $root.Values.hostAliases }}
hostAliases:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") . }}
{{- end }}
{{- end }}
{{- with $of.podSecurityContext }}
securityContext:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with $of.nodeSelector }}
nodeSelector:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with $of.tolerations }}
tolerations:
{{ toYaml . | indent 2 }}
{{- end }}
{{- if $of.affinity }}
affinity:
{{ tpl (toYaml $of.affinity) $root | indent 2 }}
{{- else if eq (default "none" $of.podAntiAffinity) "soft" }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
{{ include "tidemill.selectorLabels" $apart | indent 14 }}
{{- else if eq (default "none" $of.podAntiAffinity) "hard" }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
{{ include "tidemill.selectorLabels" $apart | indent 12 }}
{{- end }}
{{- with $of.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
  - {{ merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (include "tidemill.selectorLabels" $apart | fromYaml))) | toYaml | indent 4 | trim }}
{{- end }}
{{- end }}
{{- $priority := $of.priorityClassName -}}
{{- if and $root.Values.priorityClass.create (not $priority) (has .component (list "broker" "proxy")) -}}
{{- $priority = include "tidemill.priorityClass" $root -}}
{{- end -}}
{{- with $priority }}
priorityClassName: {{ . }}
{{- end }}
{{- with $of.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $of.initContainers }}
initContainers:
{{ tpl (toYaml .) $root | indent 2 }}
{{- end }}
{{- end -}}

{{/* Fields of a container except arguments, variables, ports and volumes. */}}
{{- define "tidemill.container" -}}
image: {{ include "tidemill.image" . }}
imagePullPolicy: {{ default .root.Values.image.pullPolicy (default dict .of.image).pullPolicy }}
{{- with .of.securityContext }}
securityContext:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .of.resources }}
resources:
{{ toYaml . | indent 2 }}
{{- end }}
{{- range $probe := list "startupProbe" "livenessProbe" "readinessProbe" }}
{{- with get $.of $probe }}
{{ $probe }}:
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}
{{- with .of.lifecycle }}
lifecycle:
{{ tpl (toYaml .) $.root | indent 2 }}
{{- end }}
{{- with .of.extraEnvFrom }}
envFrom:
{{ tpl (toYaml .) $.root | indent 2 }}
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{/* Variables of every process. */}}
{{- define "tidemill.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: TIDEMILL_NODE_ID
  value: $(POD_NAME)
{{- with .of.extraEnv }}
{{ tpl (toYaml .) $.root }}
{{- end }}
{{- end -}}

{{- define "tidemill.volumes" -}}
- name: config
  configMap:
    name: {{ .config }}
{{- if .root.Values.internalTls.enabled }}
- name: internal-tls
  secret:
    secretName: {{ include "tidemill.internalSecret" (list .root .tls) }}
    defaultMode: 0440
{{- end }}
{{- if .root.Values.monitoring.auth.enabled }}
- name: metrics-token
  secret:
    secretName: {{ include "tidemill.metricsSecret" .root }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.monitoring.auth.key }}, path: token}]
{{- end }}
{{- if and (has .process (list "proxy" "admin")) (include "tidemill.hasUsers" .root) }}
- name: security-key
  secret:
    secretName: {{ include "tidemill.keySecret" .root }}
    defaultMode: 0440
{{- end }}
{{- if and (has .process (list "proxy" "admin")) (include "tidemill.asksApiServer" .root) }}
- name: issuer
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- with .of.extraVolumes }}
{{ tpl (toYaml .) $.root }}
{{- end }}
{{- end -}}

{{- define "tidemill.volumeMounts" -}}
- name: config
  mountPath: /etc/tidemill
  readOnly: true
{{- if .root.Values.internalTls.enabled }}
- name: internal-tls
  mountPath: /etc/tidemill-tls
  readOnly: true
{{- end }}
{{- if .root.Values.monitoring.auth.enabled }}
- name: metrics-token
  mountPath: /etc/tidemill-metrics
  readOnly: true
{{- end }}
{{- if and (has .process (list "proxy" "admin")) (include "tidemill.hasUsers" .root) }}
- name: security-key
  mountPath: /etc/tidemill-security
  readOnly: true
{{- end }}
{{- if and (has .process (list "proxy" "admin")) (include "tidemill.asksApiServer" .root) }}
- name: issuer
  mountPath: /etc/tidemill-issuer
  readOnly: true
{{- end }}
{{- with .of.extraVolumeMounts }}
{{ tpl (toYaml .) $.root }}
{{- end }}
{{- end -}}

{{/* The security mode of the values: off, permissive or on. */}}
{{- define "tidemill.securityMode" -}}
{{- default "on" .Values.security.mode -}}
{{- end -}}

{{/* Whether processes check users, and need the keys of their secrets. */}}
{{- define "tidemill.hasUsers" -}}
{{- if ne (include "tidemill.securityMode" .) "off" -}}yes{{- end -}}
{{- end -}}

{{/* Whether proxies and the admin process read the keys of tokens at the API server. */}}
{{- define "tidemill.asksApiServer" -}}
{{- if and (include "tidemill.hasUsers" .) .Values.security.oidc.enabled (not .Values.security.oidc.keys) -}}yes{{- end -}}
{{- end -}}

{{/* The Secret with the keys of the secrets of users. */}}
{{- define "tidemill.keySecret" -}}
{{- default (include "tidemill.name" (list . "security-key")) .Values.security.existingKeySecret -}}
{{- end -}}

{{/* The Secret with the token of /metrics. */}}
{{- define "tidemill.metricsSecret" -}}
{{- default (include "tidemill.name" (list . "metrics-token")) .Values.monitoring.auth.existingSecret -}}
{{- end -}}

{{/* The Secret with the first administrator. */}}
{{- define "tidemill.adminUserSecret" -}}
{{- default (include "tidemill.name" (list . "admin-user")) .Values.security.existingAdminSecret -}}
{{- end -}}

{{/* Path of a process's certificate: (list $ "proxy"), or a broker group's name. */}}
{{- define "tidemill.internalSecret" -}}
{{- $root := index . 0 -}}
{{- default (printf "%s-tls" (include "tidemill.name" (list $root (index . 1)))) $root.Values.internalTls.existingSecret -}}
{{- end -}}
