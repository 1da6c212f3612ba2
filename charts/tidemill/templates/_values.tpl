{{/* The complete values.

`helm upgrade --reuse-values` renders a chart with the values of the previous one, including its
defaults, so new values are missing. Each file begins with this template, which adds them.
files/defaults.yaml is a copy of values.yaml, because a template cannot read values.yaml. */}}
{{- define "tidemill.values" -}}
{{- if not (hasKey . "valuesAreWhole") -}}
{{- include "tidemill.fill" (list .Values (.Files.Get "files/defaults.yaml" | fromYaml)) -}}
{{- $_ := set . "valuesAreWhole" true -}}
{{- end -}}
{{- end -}}

{{/* Add defaults for missing values. Values with Kubernetes types stay unchanged. So do the targets of
the autoscaler, where `null` disables a target. */}}
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
