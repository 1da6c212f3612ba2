{{/* The values, whole.

`helm upgrade --reuse-values` renders a chart with the values of the last one, its defaults among them:
what this chart has and that one had not is missing then. Each file begins with this, so that
whatever a template asks for is there. files/defaults.yaml is values.yaml, which a template cannot read. */}}
{{- define "tidemill.values" -}}
{{- if not (hasKey . "valuesAreWhole") -}}
{{- include "tidemill.fill" (list .Values (.Files.Get "files/defaults.yaml" | fromYaml)) -}}
{{- $_ := set . "valuesAreWhole" true -}}
{{- end -}}
{{- end -}}

{{/* Give values the defaults of what they have not. What Kubernetes describes is taken as it is, and so
is a target of the autoscaler: there `null` is how one says that there shall be none. */}}
{{- define "tidemill.fill" -}}
{{- $values := index . 0 -}}
{{- $isNullable := list "resources" "podSecurityContext" "securityContext" "startupProbe" "livenessProbe" "readinessProbe" "strategy" "targetCPUUtilizationPercentage" -}}
{{- range $name, $default := index . 1 -}}
{{- if not (has $name $isNullable) -}}
{{- if not (hasKey $values $name) -}}
{{- $_ := set $values $name $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $name)) -}}
{{- include "tidemill.fill" (list (get $values $name) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
