{{/* Names of objects: see docs/adr/0035-a-release-and-its-names.md. */}}

{{/* At most 31 characters. With a group's name of 20 characters, the name of a StatefulSet has 52. A label
of its pods adds a hash of ten characters and may have 63. */}}
{{- define "tidemill.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 31 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 31 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 31 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of an object of this release: include "tidemill.name" (list $ "proxy"). */}}
{{- define "tidemill.name" -}}
{{- printf "%s-%s" (include "tidemill.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{- define "tidemill.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
tidemill.io/broker-group: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of an object: (dict "root" $ "component" "broker" "group" "broker-0"); `more` adds labels. */}}
{{- define "tidemill.labels" -}}
{{- $own := include "tidemill.selectorLabels" . | fromYaml -}}
{{- $chart := dict
    "helm.sh/chart" (printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_"))
    "app.kubernetes.io/version" (.root.Chart.AppVersion | trunc 63)
    "app.kubernetes.io/part-of" "tidemill"
    "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $common := tpl (toYaml .root.Values.commonLabels) .root | fromYaml -}}
{{- merge $own $chart (default dict .more) $common | toYaml -}}
{{- end -}}

{{/* Labels of pods, without versions, so that a new chart restarts only changed pods. */}}
{{- define "tidemill.podLabels" -}}
{{- omit (include "tidemill.labels" . | fromYaml) "helm.sh/chart" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" | toYaml -}}
{{- end -}}

{{/* Annotations with their key, or an empty text. */}}
{{- define "tidemill.annotations" -}}
{{- $common := tpl (toYaml .root.Values.commonAnnotations) .root | fromYaml -}}
{{- $more := tpl (toYaml (default dict .more)) .root | fromYaml -}}
{{- with merge (default dict .own) $more $common -}}
annotations:
{{ toYaml . | indent 2 }}
{{- end -}}
{{- end -}}

{{- define "tidemill.metadata" -}}
name: {{ .name }}
{{- if not .isClusterWide }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
{{ include "tidemill.labels" . | indent 2 }}
{{- with include "tidemill.annotations" (dict "root" .root "own" .own "more" .annotations) }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "tidemill.serviceAccountName" -}}
{{- $account := .of.serviceAccount -}}
{{- if $account.name -}}{{ $account.name }}
{{- else if $account.create -}}{{ include "tidemill.name" (list .root .component) }}
{{- else -}}default
{{- end -}}
{{- end -}}

{{/* Addresses of all broker groups: host:port of the first replica of each, with commas between them. A
process has one link per group, which follows its master. */}}
{{- define "tidemill.members" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- $service := include "tidemill.name" (list $root .name) -}}
{{- $found = append $found (printf "%s-0.%s:10911" $service $service) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* Whether a broker group has several replicas, and therefore controllers. */}}
{{- define "tidemill.groupIsReplicated" -}}
{{- if gt (int (default 1 .replicas)) 1 -}}yes{{- end -}}
{{- end -}}
{{/* The existing BrokerGroup of a group; empty if the cluster lacks the kind or is unreachable. */}}
{{- define "tidemill.standingGroup" -}}
{{- $root := index . 0 -}}
{{- if $root.Capabilities.APIVersions.Has "tidemill.io/v1/BrokerGroup" -}}
{{- lookup "tidemill.io/v1" "BrokerGroup" $root.Release.Namespace (include "tidemill.name" (list $root (index . 1).name)) | toJson -}}
{{- else -}}{}{{- end -}}
{{- end -}}

{{/* Current maximum of replicas of a group: retiring replicas serve until the others are in sync. */}}
{{- define "tidemill.replicasMost" -}}
{{- $standing := include "tidemill.standingGroup" . | fromJson -}}
{{- max (int (default 1 (index . 1).replicas)) (int (dig "spec" "replicas" 1 $standing)) -}}
{{- end -}}

{{- define "tidemill.isReplicated" -}}
{{- range .Values.brokerGroups -}}{{- include "tidemill.groupIsReplicated" . -}}{{- end -}}
{{- end -}}

{{/* Addresses of the controllers: a list of host:port. */}}
{{- define "tidemill.controllers" -}}
{{- $found := list -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- $found = append $found (printf "%s:10912" (include "tidemill.name" (list $ (printf "controller-%d" $number)))) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* The names in the controllers' certificate. */}}
{{- define "tidemill.controllerNames" -}}
{{- $names := list -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- $names = append $names (include "tidemill.name" (list $ (printf "controller-%d" $number))) -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* The processes of a release. */}}
{{- define "tidemill.components" -}}
[broker, proxy, admin{{ if include "tidemill.isReplicated" . }}, controller{{ end }}]
{{- end -}}

{{/* The DNS names of a Service: short, with the namespace, and full. */}}
{{- define "tidemill.serviceNames" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $in := printf "%s.%s" $name $root.Release.Namespace -}}
{{- list $name $in (printf "%s.svc" $in) (printf "%s.svc.%s" $in $root.Values.clusterDomain) | toJson -}}
{{- end -}}

{{/* The broker groups whose messages `helm uninstall` deletes, with commas between them. */}}
{{- define "tidemill.groupsThatGo" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- $persistence := (include "tidemill.brokerGroup" (list $root .) | fromYaml).persistence -}}
{{- if or (not $persistence.enabled) (eq $persistence.whenDeleted "Delete") -}}
{{- $found = append $found .name -}}
{{- end -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* The broker group with the defaults of `broker`. */}}
{{- define "tidemill.brokerGroup" -}}
{{- $root := index . 0 -}}
{{- mergeOverwrite (deepCopy $root.Values.broker) (omit (index . 1) "config") (dict "config" (mergeOverwrite (deepCopy $root.Values.broker.config) (default dict (index . 1).config))) | toYaml -}}
{{- end -}}
